"""How long planning takes: GPT-175B on 1,024 H100, everything `auto`.

    python benchmarks/plan_gpt175b.py            # the first plan, then repeats from empty caches
    python benchmarks/plan_gpt175b.py --top 5    # also show the runners-up

The first time holds the loading of compiled kernels; the repeats empty the cache of schedules each time. A
plan is the ranking and the mapping of the best. Last the whole command is run, imports and files included.
CPU time is shown beside wall time, because other work on the machine lengthens only the latter.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from quartet_plugin.cost import pipeline
from quartet_plugin.planner.job import parse_job
from quartet_plugin.planner.ranking import Ranking, best_plans
from quartet_plugin.split.layers import even_split_with_ends

JOB = {
    "model": {
        "num_layers": 96,
        "hidden_size": 12288,
        "num_attention_heads": 96,
        "seq_length": 2048,
        "vocab_size": 51200,
    },
    "cluster": {"device": "H100-SXM-80GB", "num_nodes": 128, "devices_per_node": 8},
    "batch": {"global_batch_size": 1536},
    "search": dict.fromkeys(
        (
            "tensor_parallel",
            "pipeline_parallel",
            "data_parallel",
            "context_parallel",
            "virtual_stages",
            "micro_batch_size",
            "recompute",
            "distributed_optimizer",
        ),
        "auto",
    ),
}


def planned(top: int) -> tuple[float, float, Ranking]:
    """Wall and CPU seconds from the job's data to the ranking, schedules not cached."""
    pipeline.order.cache_clear()
    even_split_with_ends.cache_clear()
    start, cpu = time.perf_counter(), time.process_time()
    job = parse_job(JOB, where="job")
    ranking = best_plans(job, top=top)
    return time.perf_counter() - start, time.process_time() - cpu, ranking


def whole_command_s() -> float:
    """Wall seconds of `quartet plan` from its start to its exit."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        job.write_text(json.dumps(JOB), encoding="utf-8")
        code = "from quartet_plugin.cli.main import entry; entry()"
        words = [sys.executable, "-c", code, "plan", str(job), "-o", str(job.with_name("plan.json"))]
        start = time.perf_counter()
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start


def main() -> None:
    """Print the times, the counts and the best layouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--top", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    first, cpu, ranking = planned(options.top)
    print(f"first in the process: wall {first:.2f} s, CPU {cpu:.2f} s")
    repeats = [planned(options.top)[:2] for _ in range(options.repeats)]
    for name, times in zip(("wall", "CPU"), zip(*repeats, strict=True), strict=True):
        print(
            f"after that, {options.repeats} times: {name} median {statistics.median(times):.2f} s, "
            f"from {min(times):.2f} to {max(times):.2f}"
        )
    commands = [whole_command_s() for _ in range(options.repeats)]
    print(
        f"the whole command, {options.repeats} times: wall median {statistics.median(commands):.2f} s, "
        f"from {min(commands):.2f} to {max(commands):.2f}"
    )
    print(
        f"{ranking.num_considered} layouts: {ranking.num_predicted} predicted, "
        f"{ranking.num_too_large} do not fit, {ranking.num_pruned} cannot be faster"
    )
    for ranked in ranking.best:
        print(f"{ranked.iteration_s:.3f} s: {ranked.layout.label}, recompute {ranked.layout.recompute}")


if __name__ == "__main__":
    main()
