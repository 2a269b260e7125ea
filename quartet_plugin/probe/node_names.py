"""Which ranks of a probe are on one node, and what the nodes are called."""

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """The id of the machine's boot, which its containers share; empty where the system has none."""
    with contextlib.suppress(OSError):
        return _BOOT_FILE.read_text(encoding="utf-8").strip()
    return ""


def node_names(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """The name of the node of each rank, by the ranks' `host`, `machine` and `local_rank`.

    A node has one host name and one machine, and each local rank once: containers and copies of an image may
    have one host name. Nodes that share a name have their index in the order of ranks behind it.
    """
    seen: Counter[tuple[str, str, int]] = Counter()
    keys: list[tuple[str, str, int]] = []
    for rank in ranks:
        slot = (str(rank["host"]), str(rank["machine"]), int(rank["local_rank"]))
        # A local rank that comes again is another launcher's.
        keys.append((*slot[:2], seen[slot]))
        seen[slot] += 1
    nodes = list(dict.fromkeys(keys))
    times = Counter(host for host, *_ in nodes)
    names = {
        node: node[0] if times[node[0]] == 1 else f"{node[0]} {index}" for index, node in enumerate(nodes)
    }
    return [names[key] for key in keys]
