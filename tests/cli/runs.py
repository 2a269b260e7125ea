"""Runs on the disk for the commands that look at them, made once."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.tuner.run_folders import write_run


@contextmanager
def kept_run(**config: Any) -> Iterator[Path]:
    """A finished run called `r`; in memory where the system has such a place, since a study flushes much."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="quartet-runs-", dir=parent))
    try:
        run, _ = write_run(folder / "r", **config)
        yield run.folder.path
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def copy_of(run: Path, *, to: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(run, to)
    return to
