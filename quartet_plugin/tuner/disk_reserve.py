"""Reserves disk space so that a run that fills the disk can still write its result and the end of its log.

A file of the run folder holds the space while the tuner runs. It is removed when a write fails.
"""

import contextlib
import os
from pathlib import Path

SIZE_BYTES = 64 * 2**20

_NAME = ".ballast-"


class DiskReserve:
    """`with DiskReserve(folder) as reserve:` holds the space; `drop` frees it, as the block's end does.

    A disk that has no space for it is left alone: then no trial would be started either.
    """

    def __init__(self, folder: Path, *, size_bytes: int = SIZE_BYTES) -> None:
        self._folder = folder
        self._path = folder / f"{_NAME}{os.getpid()}"
        self._size_bytes = size_bytes

    def __enter__(self) -> "DiskReserve":
        """Take the space. Only whoever holds the run's lease may: what killed tuners left is removed."""
        with contextlib.suppress(OSError):
            for left in self._folder.glob(f"{_NAME}*"):
                left.unlink(missing_ok=True)
        try:
            self._path.touch(mode=0o600, exist_ok=False)
            with self._path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, self._size_bytes)
        except OSError:
            self.drop()
        return self

    def __exit__(self, *exception: object) -> None:
        """Free the space."""
        self.drop()

    def drop(self) -> None:
        """Free the space; nothing where it was freed before."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
