"""What the record of execution costs: `python -m benchmarks.record_cost [--pairs 500] [--steps 10]`.

Two pinned processes train a small GPT (PP2, CPU device), as in `benchmarks.adapter_overhead`. A pair is two
adjacent blocks of steps in these same processes, in random order: a meter that records what ran and times the
steps, and one that times them alone. Printed are the median of the ratios with its 95 % bootstrap interval,
and the seconds in which RANK 0 decides after an iteration whether enough is measured, which every trial does
whose number of iterations is not fixed. The exit code is 1 when the interval's upper end is not below 1.005.
"""

import argparse
import random
import sys
import time
from typing import Any

from benchmarks import adapter_overhead
from quartet_plugin.protocol.attempt_files import TrialSpec
from quartet_plugin.protocol.measured_window import EarlyEnd

GOAL = 1.005
NUM_DECISIONS = 1000


def with_record_or_times_alone(files: Any, plain: adapter_overhead.Step) -> dict[bool, adapter_overhead.Step]:
    """`train_step` as a trial wraps it, and wrapped by a meter that keeps times alone."""
    from quartet_plugin.megatron.measure import MegatronMeter
    from quartet_plugin.rank.step_meter import StepMeter

    def meter() -> MegatronMeter:
        return MegatronMeter(files, neutralised=[], as_written=argparse.Namespace(), started_at=time.time())

    return {True: meter().wrap(plain), False: StepMeter.wrap(meter(), plain)}


def decision_s() -> float:
    """Seconds of one decision after 20 iterations, the most that a trial makes by itself."""
    rule = EarlyEnd(least=4, precision=1e-6, slower_than_s=10.0)
    spec = TrialSpec(
        attempt_id="0" * 32,
        folder="/",
        warmup=1,
        measure=11,
        plan_key=None,
        max_warmup=10,
        early_end=rule,
    )
    generator = random.Random(0)
    times = [generator.lognormvariate(0.0, 0.05) for _ in range(20)]
    begin = time.perf_counter()
    for _ in range(NUM_DECISIONS):
        spec.why_enough(times, num_later=2)
    return (time.perf_counter() - begin) / NUM_DECISIONS


def main() -> int:
    """Measure both."""
    code = adapter_overhead.main(
        script=__file__, text=__doc__, goal=GOAL, functions=with_record_or_times_alone
    )
    if "--folder" not in sys.argv:
        print(f"decision of RANK 0 after an iteration: {decision_s() * 1e6:.0f} us")
    return code


if __name__ == "__main__":
    sys.exit(main())
