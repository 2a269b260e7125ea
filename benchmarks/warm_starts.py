"""How long a trial takes from launch to first iteration: started anew, and forked from a trial server.

    python -m benchmarks.warm_starts [--pairs 30] [--processes 2 4] [--output FILE]

Real Megatron trains a small GPT on the CPU device, once a launch. A pair is a cold and a warm launch of the
same command, in random order. Printed are, for each number of processes, the medians in seconds, the ratio of
the medians with its 95 % bootstrap interval over pairs, and the seconds of the server's imports, which the
first launch alone waits for. The exit code is 1 where a ratio is above 0.4.
"""

import argparse
import json
import random
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quartet_plugin.launchers.command import parse_command
from quartet_plugin.launchers.local import LocalLauncher
from quartet_plugin.launchers.protocol import Launcher
from quartet_plugin.launchers.warm import WarmLauncher
from quartet_plugin.trial.request import Progress, TrialRequest
from quartet_plugin.trial.runner import run_trial

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "pretrain_gpt.py"
GOAL = 0.4
RESAMPLES = 10_000
FLAGS = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 8 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 "
    "--train-iters 100 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-decay-iters 100 "
    "--log-interval 1 --eval-interval 1000 --eval-iters 0"
)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write every launch's seconds there, as JSON")
    options = parser.parse_args()
    generator = random.Random(options.seed)
    results = {}
    for count in options.processes:
        results[count] = measure(count, pairs=options.pairs, generator=generator)
        print(line_of(count, results[count], generator=generator), flush=True)
        if options.output is not None:
            options.output.write_text(json.dumps(results) + "\n")
    return int(any(ratio_of(result["pairs"]) > GOAL for result in results.values()))


def measure(count: int, *, pairs: int, generator: random.Random) -> dict[str, Any]:
    """The seconds of every pair's cold and warm launch, and of the server's imports."""
    words = ["torchrun", "--nproc-per-node", str(count), str(SCRIPT), *FLAGS]
    words[0] = str(Path(sys.executable).with_name("torchrun"))
    command = [*words, "--pipeline-model-parallel-size", str(min(count, 4))]
    rows = []
    with WarmLauncher() as warm:
        launch_s(command, warm)
        if not warm.latest.is_warm:
            raise SystemExit(f"no warm start: {warm.latest.cold_reason}")
        import_s = warm.latest.import_s
        for _ in range(pairs):
            launchers: list[tuple[str, Launcher]] = [("cold", LocalLauncher()), ("warm", warm)]
            generator.shuffle(launchers)
            rows.append({name: launch_s(command, launcher) for name, launcher in launchers})
    return {"import_s": import_s, "pairs": rows}


def launch_s(words: list[str], launcher: Launcher) -> float:
    """The seconds from a launch to the first iteration of its slowest rank."""
    first_s: list[float] = []
    begin = time.perf_counter()

    def note(progress: Progress) -> None:
        if progress.phase in ("warmup", "measure", "done") and not first_s:
            first_s.append(time.perf_counter() - begin)

    folder = Path(tempfile.mkdtemp(prefix="warm-starts-"))
    try:
        request = TrialRequest(
            folder=folder / "trial",
            command=parse_command(words),
            warmup=1,
            measure=2,
            device="cpu",
            max_spread=1e6,
            max_attempts=1,
        )
        result = run_trial(request, launcher=launcher, on_progress=note, poll_s=0.02, is_subreaper=True)
    finally:
        shutil.rmtree(folder)
    if not result.is_measured or not first_s:
        raise SystemExit(f"a launch failed: {result.reason}")
    return first_s[0]


def ratio_of(pairs: list[dict[str, float]]) -> float:
    """The median of the warm launches over that of the cold ones."""
    medians = {name: statistics.median(pair[name] for pair in pairs) for name in ("warm", "cold")}
    return medians["warm"] / medians["cold"]


def line_of(count: int, result: dict[str, Any], *, generator: random.Random) -> str:
    """The medians, and their ratio with its interval."""
    pairs = result["pairs"]
    ratios = sorted(ratio_of(generator.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    low, high = ratios[int(0.025 * RESAMPLES)], ratios[int(0.975 * RESAMPLES)]
    cold, warm = (statistics.median(pair[name] for pair in pairs) for name in ("cold", "warm"))
    return (
        f"{count} processes, {len(pairs)} pairs: cold {cold:.2f} s, warm {warm:.2f} s, "
        f"ratio {ratio_of(pairs):.2f} ({low:.2f} to {high:.2f}); imports {result['import_s']:.1f} s, once"
    )


if __name__ == "__main__":
    sys.exit(main())
