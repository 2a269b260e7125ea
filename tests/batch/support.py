"""Batches of tests: in this process, and as processes that a test kills."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quartet_plugin.batch.config import Batch, parse_batch
from quartet_plugin.batch.runner import BatchRunner
from quartet_plugin.model.batch import BatchPaths, BatchResults
from quartet_plugin.tuner.config import TuneConfig

ROOT = Path(__file__).parents[2]
TINY = (sys.executable, "-S", "-E", str(Path(__file__).parent / "tiny_quartet.py"))
COMMAND = ("torchrun", "--nproc-per-node", "2", "pretrain.py")


def batch_of(folder: Path, *jobs: dict[str, Any], **sections: Any) -> Batch:
    """A batch of these jobs; a job without a command has one."""
    written = [{"command": [*COMMAND, *job.pop("words", ())], **job} for job in jobs]
    return parse_batch({"jobs": written, **sections}, where="JOBS.yaml", folder=folder)


class Watcher:
    """Keeps what a user would have read, and calls `each` at every change."""

    is_live = True

    def __init__(self, each: Callable[[BatchResults], None] = lambda results: None) -> None:
        self.messages: list[str] = []
        self.latest: BatchResults | None = None
        self._each = each

    def message(self, text: str) -> None:
        """Keep a line."""
        self.messages.append(text)

    def changed(self, results: BatchResults) -> None:
        """Keep the results."""
        self.latest = results
        self._each(results)


def runner_of(batch: Batch, folder: Path, **options: Any) -> BatchRunner:
    """A runner of a batch in `folder`, with the tiny tuner."""
    paths = BatchPaths(folder / batch.name)
    paths.runs.mkdir(parents=True, exist_ok=True)
    configs = {job.name: TuneConfig() for job in batch.jobs}
    return BatchRunner(
        batch,
        **{
            "paths": paths,
            "cwd": folder,
            "configs": configs,
            "program": TINY,
            "observer": Watcher(),
            "should_stop": lambda: False,
            "fence": lambda: None,
            "write": lambda results: None,
            **options,
        },
    )


def start_batch(folder: Path, *words: str, program: tuple[str, ...] = TINY) -> "subprocess.Popen[bytes]":
    """`quartet batch` as a process of its own whose tuners are `program`."""
    code = f"from quartet_plugin.cli import batch, main\nbatch.PROGRAM = {program!r}\nmain.entry()\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, "batch", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def log_of(path: Path) -> list[list[str]]:
    """The lines of the tiny tuners."""
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []
