"""The speeds of a trial's nodes, by the matrix products that its ranks timed after the last iteration.

Iterations of synchronous training take all ranks equally long, whichever node they wait for.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quartet_plugin.calibration.observations import spread_of
from quartet_plugin.protocol.rank_files import RankReport, num_cores_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpeed:
    """A node's time of the products: the median of its ranks'; `spread` is its relative standard error.

    Only nodes of one `kind` compare: the device's name, the number of ranks, and of ranks on the CPU the
    number of cores that they share.
    """

    host: str
    kind: tuple[str, int, int]
    product_s: float
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSlowdown:
    """A node's time of the products over that of an ordinary node of its kind, with its relative error."""

    factor: float
    spread: float


def node_speeds(reports: Iterable[RankReport]) -> tuple[NodeSpeed, ...]:
    """The speeds of the nodes that ranks ran on, in the launcher's order.

    A node is left out where a rank has no times, or where its ranks have devices of several names.
    """
    by_host: dict[str, list[RankReport]] = {}
    for report in sorted(reports, key=lambda report: report.launch_rank):
        by_host.setdefault(report.host, []).append(report)
    speeds = (_speed_of(host, ranks) for host, ranks in by_host.items())
    return tuple(speed for speed in speeds if speed is not None)


def _speed_of(host: str, ranks: Sequence[RankReport]) -> NodeSpeed | None:
    times = [rank.product_s for rank in ranks if rank.product_s and min(rank.product_s) > 0.0]
    device = ranks[0].device
    if len(times) < len(ranks) or any(rank.device != device for rank in ranks):
        return None
    return NodeSpeed(
        host=host,
        kind=(device, len(ranks), num_cores_of(ranks)),
        product_s=statistics.median(statistics.median(samples) for samples in times),
        spread=statistics.median(spread_of(samples) for samples in times),
    )


def node_slowdowns(speeds: Iterable[NodeSpeed]) -> Mapping[str, NodeSlowdown]:
    """The slowdown of every node that has another one of its kind, by host.

    The ordinary node is the median one; of an even number the faster of the two in the middle, so that of two
    nodes the slower one is slow.
    """
    kinds: dict[tuple[str, int, int], list[NodeSpeed]] = {}
    for speed in speeds:
        kinds.setdefault(speed.kind, []).append(speed)
    slowdowns = {}
    for nodes in kinds.values():
        ordered = sorted(nodes, key=lambda node: node.product_s)
        ordinary = ordered[(len(ordered) - 1) // 2]
        for node in ordered if len(ordered) > 1 else []:
            slowdowns[node.host] = NodeSlowdown(
                factor=node.product_s / ordinary.product_s,
                spread=(node.spread**2 + ordinary.spread**2) ** 0.5,
            )
    return slowdowns
