"""Room on the disk that is kept for the last words: a run that fills it up can still say so.

A file of the run folder holds the room while the tuner runs. It is given up when a write fails, so that what
was measured gets its result and the events their last line.
"""

import contextlib
import os
from pathlib import Path

SIZE_BYTES = 64 * 2**20

_NAME = ".ballast-"


class DiskReserve:
    """`with DiskReserve(folder) as reserve:` holds the room; `drop` gives it up, as the block's end does.

    A disk that has no room for it is left alone: then no trial would be started either.
    """

    def __init__(self, folder: Path, *, size_bytes: int = SIZE_BYTES) -> None:
        self._folder = folder
        self._path = folder / f"{_NAME}{os.getpid()}"
        self._size_bytes = size_bytes

    def __enter__(self) -> "DiskReserve":
        """Take the room. Only whoever holds the run's lease may: what killed tuners left is removed."""
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
        """Give the room up."""
        self.drop()

    def drop(self) -> None:
        """Give the room up; nothing where it was given up before."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
