"""Tuning runs of the fake training, as a user would start them."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

HERE = Path(__file__).parent
FAKE = HERE.parent / "faults" / "fake_trial.py"
CONFIG = """\
run: fake
search: {pipeline_parallel: 2, virtual_stages: 1, schedule: 1f1b}
trial: {warmup: 1, measure: 3, deadline_s: 60}
study: {trials: 3, top_k: 1, rounds: 3}
device: cpu
"""


def prepare(folder: Path, *, config: str = CONFIG) -> tuple[list[str], list[str]]:
    """Options of `quartet tune`, and the words of a command that starts two ranks of the fake training."""
    program = folder / "torchrun"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "fake_torchrun.py"}" "$@"\n')
    program.chmod(0o755)
    (folder / "q.yaml").write_text(config)
    options = ["tune", "--config", str(folder / "q.yaml"), "--run-dir", str(folder / "runs")]
    return options, [str(program), "--nproc-per-node", "2", str(FAKE)]


def environment() -> dict[str, str]:
    """For a subprocess that finds the package of this source tree."""
    root = str(HERE.parents[1])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def wait_until(is_so: Callable[[], bool], *, what: str, timeout_s: float = 60.0) -> None:
    """Wait for something that happens in another process."""
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.02)


def living(folder: Path) -> list[str]:
    """Processes that were started for a run in `folder`."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(folder) in word for word in words):
            found.append(" ".join(words))
    return found
