"""Whether the kernel killed processes for want of memory."""

import contextlib
from pathlib import Path

_GROUP_FILE = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def num_oom_kills() -> int:
    """Processes that the kernel killed for memory in this process's group so far; 0 where it cannot say.

    Control groups of either version: `memory.events`, or `memory.oom_control` of the memory controller.
    """
    places = [_GROUPS / "memory.events"]
    with contextlib.suppress(OSError):
        for line in _GROUP_FILE.read_text().splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if number == "0":
                places.insert(0, _GROUPS / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                # A container sees its own group as the root.
                for folder in (_GROUPS / "memory" / path.lstrip("/"), _GROUPS / "memory"):
                    places.append(folder / "memory.oom_control")
    for place in places:
        with contextlib.suppress(OSError, ValueError):
            for line in place.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0
