"""What nodes are known by: the id of a machine's boot, and names of which no two nodes have the same."""

import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")


def recorded_boot_id() -> str:
    """The id of the machine's boot, which its containers share; empty where the system records none."""
    with contextlib.suppress(OSError):
        return BOOT_FILE.read_text(encoding="utf-8").strip()
    return ""


def distinct_names(hosts: Sequence[str]) -> list[str]:
    """A name for each node, by the nodes' host names: a host name that several share has the node's index."""
    times = Counter(hosts)
    return [host if times[host] == 1 else f"{host} {index}" for index, host in enumerate(hosts)]
