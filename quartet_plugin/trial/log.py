"""stdout.log, the output of the processes: kept within a size, and its last lines for the user."""

import os
import re
import stat
from io import FileIO
from pathlib import Path

from quartet_plugin.protocol.masking import masked

MAX_LOG_BYTES = 256 * 2**20
_KEPT_BYTES = 16 * 2**20
_TAIL_BYTES = 256 * 1024

_ELASTIC_LINE = re.compile(r"[WEIF]\d{4} [\d:.]+ \d+ .*torch/distributed/")
_ELASTIC_FAILURE = re.compile(r"torch/distributed/elastic/.*\] (failed \(exitcode|Received \d+ death signal)")
_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)?", re.DOTALL)
_ROOT_CAUSE = re.compile(r"Root Cause.*?exitcode\s*:\s*(-?\d{1,5}) \(pid: (\d{1,10})\)", re.DOTALL)
_ADDRESS_IN_USE = re.compile(r"EADDRINUSE|[Aa]ddress already in use")


class CappedLog:
    """Keeps a file that other processes append to within `max_bytes`: its head and its tail stay."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_LOG_BYTES, kept_bytes: int = _KEPT_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._kept_bytes = min(kept_bytes, max_bytes // 8)
        self._num_left_out = 0

    def trim(self) -> bool:
        """Cut the middle out once the file has half of `max_bytes`; True if it did.

        Writers have the file open for appending, so they continue behind the tail. Output written during
        the cut may be lost.
        """
        try:
            if self._path.lstat().st_size <= self._max_bytes // 2:
                return False
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "r+b", buffering=0) as file:
                return self._cut_out(file)
        except OSError:
            return False

    def _cut_out(self, file: FileIO) -> bool:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return False
        head = os.pread(file.fileno(), self._kept_bytes, 0)
        tail = os.pread(file.fileno(), self._kept_bytes, status.st_size - self._kept_bytes)
        self._num_left_out += status.st_size - 2 * self._kept_bytes
        file.truncate(0)
        note = f"\n[... about {self._num_left_out} bytes left out ...]\n".encode()
        for piece in (head, note, tail):
            file.write(piece)
        return True


def read_tail(path: Path, *, max_bytes: int = _TAIL_BYTES) -> str:
    """The end of the log as text; empty where there is no log."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        file.seek(max(0, size - max_bytes))
        return file.read(max_bytes).decode("utf-8", errors="replace")


def last_lines(text: str, *, num_lines: int = 20) -> tuple[str, ...]:
    """The last lines that the program printed, safe for a terminal.

    Torchrun's own report is left out, and so are secrets and control characters: output is not trusted.
    """
    lines = []
    for line in masked(_ESCAPE.sub("", text)).split("\n"):
        if _ELASTIC_FAILURE.search(line):
            break
        if not _ELASTIC_LINE.match(line):
            clean = "".join(char if char.isprintable() else " " for char in line.rpartition("\r")[2] or line)
            lines.append(clean.rstrip()[:500])
    return tuple([line for line in lines if line][-num_lines:])


def root_cause(text: str) -> tuple[int, int] | None:
    """(exit code, pid) of the rank that torchrun saw fail first; the code of a signal is negative."""
    matches = list(_ROOT_CAUSE.finditer(text))
    return (int(matches[-1][1]), int(matches[-1][2])) if matches else None


def has_address_in_use(text: str) -> bool:
    """Whether the log reports a port that could not be bound."""
    return _ADDRESS_IN_USE.search(text) is not None
