"""Which ranks of a probe are on one node, and what the nodes are called."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from quartet_plugin.protocol.node_identity import distinct_names


def node_names(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """The name of each rank's node, by the ranks' `host`, `machine` (the id of its boot) and `local_rank`.

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
    names = dict(zip(nodes, distinct_names([host for host, *_ in nodes]), strict=True))
    return [names[key] for key in keys]
