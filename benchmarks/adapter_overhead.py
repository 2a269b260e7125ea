"""What measuring costs: `python benchmarks/adapter_overhead.py [--pairs 500] [--steps 10] [--output FILE]`.

Two pinned processes train a small GPT (PP2, CPU device). A pair is two adjacent blocks of steps in these same
processes, one with the measuring adapter around `train_step` and one without, in random order; its ratio is
the time with over the time without, of the slower rank. Printed are the median of the ratios and its 95 %
bootstrap interval over pairs. The exit code is 1 when the interval's upper end is not below 1.01.
"""

import argparse
import json
import os
import random
import runpy
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "pretrain_gpt.py"
GOAL = 1.01
# Short iterations, so that what the adapter adds to each weighs more than in a real job.
FLAGS = shlex.split(
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 8 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --train-iters 100000 "
    "--lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --clip-grad 1.0 "
    "--attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-interval 1000000 --eval-iters 0"
)
WARMUP_STEPS = 10


Step = Callable[..., Any]


def _measured_or_plain(files: Any, plain: Step) -> dict[bool, Step]:
    """`train_step` with the adapter around it, and without."""
    from quartet_plugin.megatron.measure import MegatronMeter

    meter = MegatronMeter(files, neutralised=[], as_written=argparse.Namespace(), started_at=time.time())
    return {True: meter.wrap(plain), False: plain}


def main(
    *,
    script: str = __file__,
    text: str | None = __doc__,
    goal: float = GOAL,
    functions: Callable[[Any, Step], dict[bool, Step]] = _measured_or_plain,
) -> int:
    """Start the two processes, or be one of them, with the two `functions` to compare; 1 above the goal."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--steps", type=int, default=10, help="steps a block")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write every block's time there, as JSON")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        run_rank(options, functions)
        return 0
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", script),
                *("--folder", folder, "--pairs", str(options.pairs), "--steps", str(options.steps)),
                *("--seed", str(options.seed)),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": path},
        )
        blocks = [json.loads((Path(folder) / f"blocks-{rank}.json").read_text()) for rank in range(2)]
    return report(options, blocks, goal=goal)


def report(options: argparse.Namespace, blocks: Sequence[Any], *, goal: float) -> int:
    """Print the interval; 0 when its upper end is below the goal."""
    seconds = np.max([rank["seconds"] for rank in blocks], axis=0).reshape(-1, 2)
    is_on = np.array(blocks[0]["is_on"]).reshape(-1, 2)
    assert bool((is_on.sum(axis=1) == 1).all())
    with_s, without_s = seconds[is_on], seconds[~is_on]
    ratios = with_s / without_s
    generator = np.random.default_rng(options.seed)
    draws = generator.choice(ratios, size=(20_000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    median = float(np.median(ratios))
    iteration_s = float(np.median(without_s)) / options.steps
    print(f"pairs {len(ratios)}, steps a block {options.steps}, iteration {iteration_s * 1e3:.1f} ms without")
    print(f"time with / without: {median:.4f} [{low:.4f}, {high:.4f}] (95 % bootstrap over pairs)")
    print(f"upper end below {goal}: {'yes' if high < goal else 'no'}")
    if options.output is not None:
        content = {
            "ratio": {"median": median, "low": float(low), "high": float(high)},
            "iteration_s": iteration_s,
            "with_s": with_s.tolist(),
            "without_s": without_s.tolist(),
            "steps_per_block": options.steps,
            "seed": options.seed,
        }
        options.output.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if high < goal else 1


def run_rank(options: argparse.Namespace, functions: Callable[[Any, Step], dict[bool, Step]]) -> None:
    """Train, with a `train_step` that switches the adapter on and off between blocks."""
    from quartet_plugin.megatron import cpu_device

    cpu_device.ensure_environment()
    cpu_device.install()
    from megatron.training import training

    from quartet_plugin.protocol.attempt_files import TrialSpec
    from quartet_plugin.rank.files import RankFileWriter
    from quartet_plugin.rank.rendezvous import RankEnv

    spec = TrialSpec(
        schema_version=1,
        attempt_id=secrets.token_hex(16),
        folder=str(options.folder),
        warmup=0,
        measure=100_000,
        plan_key=None,
    )
    files = RankFileWriter(spec, RankEnv.of(os.environ))
    files.start()
    training.train_step = Blocks(options, functions(files, training.train_step)).train_step
    # After the imports, which two pinned processes do more slowly.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    sys.argv = [str(SCRIPT), *FLAGS, *cpu_device.required_flags(set(FLAGS))]
    runpy.run_path(str(SCRIPT), run_name="__main__")


class Blocks:
    """Counts steps and takes one or the other function, block by block, alike on every rank."""

    def __init__(self, options: argparse.Namespace, functions: dict[bool, Step]) -> None:
        generator = random.Random(options.seed)
        pairs = [generator.sample([True, False], 2) for _ in range(options.pairs)]
        self._is_on = [is_on for pair in pairs for is_on in pair]
        self._functions = functions
        self._steps = options.steps
        self._folder = options.folder
        self._done = -WARMUP_STEPS
        self._block_start = 0.0
        self._seconds: list[float] = []

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """One step of the current block; both functions run during the warm-up."""
        block = self._done // self._steps
        is_on = self._is_on[block] if self._done >= 0 else self._done % 2 == 0
        results = self._functions[is_on](*args, **kwargs)
        self._done += 1
        if self._done >= 0 and self._done % self._steps == 0:
            now = time.perf_counter()
            if self._done > 0:
                self._seconds.append(now - self._block_start)
            self._block_start = now
        if len(self._seconds) == len(self._is_on):
            self._finish()
        return results

    def _finish(self) -> None:
        import torch.distributed as dist

        from quartet_plugin.rank.session import exit_now

        path = self._folder / f"blocks-{os.environ['RANK']}.json"
        path.write_text(json.dumps({"seconds": self._seconds, "is_on": self._is_on}))
        dist.barrier()
        exit_now(0)


if __name__ == "__main__":
    sys.exit(main())
