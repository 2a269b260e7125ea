"""Runs in memory: a study flushes every write, and a busy disk would make these tests minutes long."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder of its own, in memory where the system has such a place."""
    parent = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="quartet-test-", dir=parent))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
