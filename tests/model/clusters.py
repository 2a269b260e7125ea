"""Cluster files for tests, as plain data."""

from typing import Any


def make_cluster(
    *,
    num_nodes: int = 2,
    per_node: int = 4,
    device: str = "A100-SXM-80GB",
    slowdown: dict[tuple[int, int], float] | None = None,
    links: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Equal nodes of one device; `slowdown` by (node, local index), `links` over the usual ones."""
    slow = slowdown or {}
    nodes = [
        {
            "name": f"node-{at}",
            "devices": [device] * per_node,
            "slowdown": [slow.get((at, local), 1.0) for local in range(per_node)],
        }
        for at in range(num_nodes)
    ]
    usual = {
        "scale_up": {"bandwidth_bytes_per_s": 3e11, "latency_s": 2e-6},
        "network": {"bandwidth_bytes_per_s": 2.5e10, "latency_s": 1e-5},
    }
    return {"schema_version": 1, "nodes": nodes, "links": {**usual, **(links or {})}}
