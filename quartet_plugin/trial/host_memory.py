"""Whether the kernel killed processes for want of memory."""

import contextlib
from pathlib import Path

_GROUP_FILE = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def num_oom_kills() -> int:
    """Processes that the kernel killed for memory in this process's group so far; 0 where it cannot say."""
    folders = [_GROUPS]
    with contextlib.suppress(OSError):
        for line in _GROUP_FILE.read_text().splitlines():
            number, _, rest = line.partition(":")
            if number == "0":
                folders.insert(0, _GROUPS / rest.partition(":")[2].lstrip("/"))
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):
            for line in (folder / "memory.events").read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0
