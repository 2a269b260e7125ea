"""events.jsonl: one line an event, appended; a torn last line is what a crash leaves and readers skip it."""

import contextlib
import json
import os
import time
from pathlib import Path

from quartet_plugin.errors import StorageError


class EventLog:
    """Appends events to a file; each is one write, so that a reader never sees half of one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, kind: str, *, trial: int | None = None, **what: str | int | float | None) -> None:
        """Append one event. Raises StorageError when the disk fails."""
        event = {"time": round(time.time(), 3), "kind": kind, "trial": trial, **what}
        line = json.dumps(event, ensure_ascii=False, allow_nan=False) + "\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self._path, flags, 0o600)
            try:
                os.write(descriptor, self._end_of_torn_line() + line.encode("utf-8", errors="replace"))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be written: {error.strerror}") from error

    def _end_of_torn_line(self) -> bytes:
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) is not None:
                return b"" if file.read(1) == b"\n" else b"\n"
        return b""
