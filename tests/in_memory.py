"""Runs in memory: a study flushes every write, and a busy disk would make these tests minutes long."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
_LEAST_BYTES = 8 << 30


def _has_room() -> bool:
    """Whether the system has such a place, with room, where programs may be kept too."""
    if not os.access(MEMORY, os.W_OK):
        return False
    about = os.statvfs(MEMORY)
    return about.f_bavail * about.f_frsize >= _LEAST_BYTES and not about.f_flag & os.ST_NOEXEC


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder of its own, in memory where that is possible."""
    folder = Path(tempfile.mkdtemp(prefix="quartet-test-", dir=MEMORY if _has_room() else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
