"""Whether a fork of this process after its imports is equivalent to a new process.

A fork has the thread that forked and nothing of the others, shares open files and shared memory with its
siblings, and cannot use a device that its parent has opened. What a module reads of a rank's variables while
it is imported would be the same in every rank.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The variables that torchrun gives each rank a value of its own for, beside its TORCHELASTIC_*.
_RANK_VARIABLES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
_DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/davinci")


class ImportChecks:
    """Notes what this process has open now; `fault` says what came since that a fork cannot take over."""

    def __init__(self) -> None:
        self._descriptors = _descriptors()
        self._shared = _shared_memory()
        self._rank_reads: list[str] = []

    def fault(self, *, on_cpu: bool) -> str | None:
        """The effect of imports that a fork cannot inherit; None if there is none."""
        num_threads = self._num_threads()
        if num_threads > 1:
            return f"starts {num_threads - 1} thread{'s' if num_threads > 2 else ''}"
        if _has_children():
            return "starts a process"
        # A copy of the server's own input or output; a fork closes it and has its own.
        standard = {self._descriptors.get(number) for number in range(3)}
        new = {
            number: path
            for number, path in _descriptors().items()
            if number not in self._descriptors and path not in standard
        }
        devices = [path for path in new.values() if path.startswith(_DEVICE_FILES)]
        if devices:
            return f"opens the device {devices[0]}"
        torch = sys.modules.get("torch")
        if not on_cpu and torch is not None and torch.cuda.is_initialized():
            return "touches a CUDA device"
        if new:
            return f"opens {next(iter(new.values()))}"
        if shared := sorted(_shared_memory() - self._shared):
            return f"shares memory ({shared[0]})"
        return f"reads {self._rank_reads[0]}" if self._rank_reads else None

    def _num_threads(self) -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    @contextlib.contextmanager
    def noting_rank_reads(self) -> Iterator[None]:
        """Note what the block reads of a rank's variables."""
        environment = type(os.environ)
        read = environment.__getitem__

        def noting(self_: Any, name: Any) -> Any:
            if isinstance(name, str) and (name in _RANK_VARIABLES or name.startswith("TORCHELASTIC_")):
                self._rank_reads.append(name)
            return read(self_, name)

        environment.__getitem__ = noting  # type: ignore[method-assign]
        try:
            yield
        finally:
            environment.__getitem__ = read  # type: ignore[method-assign]


def _descriptors() -> dict[int, str]:
    """The open descriptors with what they are of."""
    paths = {}
    for entry in Path("/proc/self/fd").iterdir():
        # The listing's own descriptor is closed again.
        with contextlib.suppress(OSError):
            paths[int(entry.name)] = str(entry.readlink())
    return paths


def _shared_memory() -> set[str]:
    """Writable memory mappings that are shared with forked processes."""
    paths = set()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split(maxsplit=5)
        if words[1].startswith("rw") and words[1].endswith("s"):
            paths.add(words[5] if len(words) > 5 else "anonymous")
    return paths


def _has_children() -> bool:
    # Also one that nobody has waited for: it would be another's child in a fork.
    return any((task / "children").read_text().split() for task in Path("/proc/self/task").iterdir())
