"""What a search of ten minutes comes to: `python -m benchmarks.ten_minutes [--minutes 10] [--output FILE]`.

`quartet tune --max-minutes` with the defaults of q.yaml for a GPT of 12 layers and 256 hidden on three CPU
processes; `--sequences` makes an iteration, which is to take 2.6 s, shorter or longer. Printed are its
seconds, the plans that were tried, the final rounds and the winner. The exit code is 1 where fewer than five
plans were tried, no winner is proven, or the time was exceeded by more than a minute.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "pretrain_gpt.py"
LEAST_TRIED = 5
MOST_OVER_S = 60.0
FLAGS = shlex.split(
    "--num-layers 12 --hidden-size 256 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --pipeline-model-parallel-size 3 --micro-batch-size 1 "
    "--mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 16383 --train-iters 1000 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine "
    "--lr-decay-iters 1000 --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0 --log-interval 10 "
    "--eval-interval 100000 --eval-iters 0"
)


def main() -> int:
    """Search, and judge the run by its events."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--sequences", type=int, default=12, help="the global batch; divisible by 3")
    parser.add_argument("--output", type=Path, help="write the figures there, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = search(Path(folder), options)
    for name, value in figures.items():
        print(f"{name}: {value}")
    if options.output is not None:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
    is_enough = figures["tried"] >= LEAST_TRIED and figures["winner"] is not None
    return 0 if is_enough and figures["wall_s"] <= 60.0 * options.minutes + MOST_OVER_S else 1


def search(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a search in `folder`."""
    config = folder / "q.yaml"
    config.write_text("run: ten-minutes\ndevice: cpu\n")
    command = ["torchrun", "--nproc-per-node", "3", str(SCRIPT), *FLAGS]
    command += ["--global-batch-size", str(options.sequences)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    begin = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from quartet_plugin.cli.main import entry; entry()", "tune"),
            *("--config", str(config), "--run-dir", str(folder), "--max-minutes", str(options.minutes)),
            *("--", *command),
        ],
        env={**os.environ, "PYTHONPATH": path, "PATH": programs, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    wall_s = time.monotonic() - begin
    lines = (folder / "ten-minutes" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    told = [event["record"] for event in events if event["kind"] == "told"]
    measured = [record for record in told if record["verdict"] == "measured" and record["repeats"] is None]
    end: dict[str, Any] = next((event for event in events if event["kind"] == "end"), {})
    rounds = [event["round"] for event in events if event["kind"] == "final-round"]
    return {
        "exit_code": done.returncode,
        "wall_s": round(wall_s, 1),
        "iteration_s": _baseline_s(folder / "ten-minutes"),
        "tried": len(measured),
        "launches": sum(event["kind"] == "launch" for event in events),
        "rounds": max(rounds, default=0),
        "winner": end.get("winner"),
    }


def _baseline_s(run: Path) -> float | None:
    """The median seconds of an iteration of trial 0."""
    for path in sorted(run.glob("trials/000000/attempt-*/result.json"), reverse=True):
        times = sorted(json.loads(path.read_text())["iteration_s"])
        if times:
            return float(times[len(times) // 2])
    return None


if __name__ == "__main__":
    sys.exit(main())
