"""The slots of a cluster, the links between them, and the bottleneck link of a group of ranks.

A *domain* holds slots that fast links join (scale-up); between domains the links may be unequal. A *segment*
holds the nodes below one switch. A *block* is the slots of one tensor-parallel group: always on one node and
in one domain, so it is assigned as a unit.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched

import numpy as np

from quartet_plugin.errors import PlanError
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Slot


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Topology:
    """The slots of a cluster in the launcher's order, and their links.

    `node_of_slot`, `domain_of_slot` and `slowdown` are [num_slots], `between_bytes_per_s` and
    `between_latency_s` [num_domains, num_domains], row to column, diagonals not read. Bandwidths are one
    device's in one direction, as collectives reach them. `segment_of_slot` [num_slots] is None where no two
    segments are known.
    """

    slots: tuple[Slot, ...]
    domain_of_slot: IntArray
    slowdown: FloatArray
    inside_bytes_per_s: float
    inside_latency_s: float
    between_bytes_per_s: FloatArray
    between_latency_s: FloatArray
    segment_of_slot: IntArray | None = None

    @property
    def node_of_slot(self) -> IntArray:
        """The node's index of each slot."""
        return np.array([slot.node for slot in self.slots], dtype=np.int64)

    @property
    def has_equal_links(self) -> bool:
        """Whether all links between domains are equal."""
        apart = ~np.eye(len(self.between_bytes_per_s), dtype=np.bool_)
        return all(
            np.ptp(values[apart]) == 0 if apart.any() else True
            for values in (self.between_bytes_per_s, self.between_latency_s)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLink:
    """The link of a group of ranks: its size, its domains, and the bottleneck of the ring through them all.

    `local` counts its ranks in the domain that has the fewest: several rings, one through each of these
    devices, share the traffic between domains. `port_bytes_per_s` is the rate of one device between domains,
    through its own port: an all-to-all sends at it, where the rings together are limited by the links inside.
    """

    size: int
    num_domains: int
    local: int
    bytes_per_s: float
    port_bytes_per_s: float
    latency_s: float
    inside_latency_s: float

    @property
    def ring_latency_s(self) -> float:
        """Seconds of latency in one pass around the ring of all ranks."""
        between = self.latency_s * (self.num_domains - 1)
        return between + self.inside_latency_s * (self.size - self.num_domains)


def group_link(topology: Topology, domains: Sequence[int]) -> GroupLink:
    """The link of a group whose members are in `domains`, one entry a member.

    The ring visits domains in ascending order, as a communication library that orders ranks by node does.
    """
    counts: dict[int, int] = {}
    for domain in domains:
        counts[domain] = counts.get(domain, 0) + 1
    order = sorted(counts)
    inside, inside_latency = topology.inside_bytes_per_s, topology.inside_latency_s
    if len(order) == 1:
        return GroupLink(
            size=len(domains),
            num_domains=1,
            local=len(domains),
            bytes_per_s=inside,
            port_bytes_per_s=inside,
            latency_s=inside_latency,
            inside_latency_s=inside_latency,
        )
    pairs = list(zip(order, [*order[1:], order[0]], strict=True))
    local = min(counts.values())
    port = min(float(topology.between_bytes_per_s[a, b]) for a, b in pairs)
    slowest = port * local
    return GroupLink(
        size=len(domains),
        num_domains=len(order),
        local=local,
        bytes_per_s=min(slowest, inside) if local > 1 else slowest,
        port_bytes_per_s=port,
        latency_s=max(float(topology.between_latency_s[a, b]) for a, b in pairs),
        inside_latency_s=inside_latency,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """The slots of each block, ascending by node and domain; `kind` is equal for interchangeable blocks.

    `slots` holds indices into `Topology.slots`; `node`, `domain`, `segment` (0 where none are known),
    `slowdown` (the slowest slot's) and `kind` are [num_blocks].
    """

    slots: tuple[tuple[int, ...], ...]
    node: IntArray
    domain: IntArray
    segment: IntArray
    slowdown: FloatArray
    kind: IntArray

    def __len__(self) -> int:
        return len(self.slots)


@functools.lru_cache(maxsize=64)
def blocks_of(topology: Topology, *, size: int, sort: bool = True) -> Blocks:
    """Blocks of `size` slots, each on one node and in one domain.

    With `sort`, slots of like speed share a block: of all ways to cut a domain this gives the least
    slowdowns, block by block. Without, consecutive slots share one, as in the launcher's order. Raises
    PlanError where the slots of a node in a domain are no multiple of `size`.
    """
    nodes = topology.node_of_slot
    cells: dict[tuple[int, int], list[int]] = {}
    for slot, (node, domain) in enumerate(zip(nodes.tolist(), topology.domain_of_slot.tolist(), strict=True)):
        cells.setdefault((node, domain), []).append(slot)
    cut: list[tuple[int, ...]] = []
    for (node, domain), members in sorted(cells.items()):
        if len(members) % size:
            raise PlanError(
                f"tensor_parallel: {size}; must divide the {len(members)} devices of node {node} in scale-up "
                f"domain {domain}, or a group would leave it"
            )
        ordered = sorted(members, key=lambda slot: (topology.slowdown[slot], slot)) if sort else members
        cut += [tuple(sorted(block)) for block in batched(ordered, size)]
    return _blocks(topology, cut)


def blocks_in_order(topology: Topology, slots: Sequence[int], *, size: int) -> Blocks:
    """The blocks of an order of slots, RANK 0 first. Raises PlanError for a block on two nodes or domains."""
    cut = list(batched(slots, size))
    nodes, domains = topology.node_of_slot.tolist(), topology.domain_of_slot.tolist()
    for block in cut:
        if len({(nodes[slot], domains[slot]) for slot in block}) > 1:
            raise PlanError(
                f"mapping: slots {list(block)}; a tensor-parallel group must stay on one node and in one "
                "scale-up domain"
            )
    return _blocks(topology, cut)


def crossings(layout: Layout, segments: IntArray) -> int:
    """The crossings between segments of pipelines and groups whose blocks are in `segments` [pp, copies].

    Two pipeline ranks that pass tensors to each other cross once, a context or expert parallel group once for
    each of its segments but one. `layout` counts expert parallelism in blocks (`degrees_alone`).
    """
    number = np.count_nonzero(segments[1:] != segments[:-1])
    for size in (layout.context_parallel, layout.expert_parallel):
        if size > 1:
            groups = np.sort(np.ascontiguousarray(segments).reshape(-1, size), axis=1)
            number += np.count_nonzero(groups[:, 1:] != groups[:, :-1])
    return int(number)


def crossings_in_order(topology: Topology, slots: Sequence[int], *, layout: Layout) -> int:
    """The `crossings` of an order of slots, RANK 0 first; none where no two segments are known."""
    if topology.segment_of_slot is None:
        return 0
    firsts = topology.segment_of_slot[list(slots)[:: layout.tensor_parallel]]
    return crossings(layout, firsts.reshape(layout.pipeline_parallel, -1))


def expert_blocks(layout: Layout, *, has_whole_experts: bool) -> int:
    """The blocks beside each other whose ranks exchange the tokens of experts, at least one.

    A group of whole experts is `expert_parallel` consecutive ranks, those of a block among them; a group of
    experts that a block shares has one rank of each of as many blocks (`order_rules.expert_groups`). Groups
    that share a block count together.
    """
    tensor = layout.tensor_parallel
    span = layout.expert_parallel * (1 if has_whole_experts else tensor)
    return math.lcm(span, tensor) // tensor


def degrees_alone(layout: Layout, *, has_whole_experts: bool = False) -> Layout:
    """The layout's degrees without options: all that an order of blocks depends on.

    `expert_parallel` counts blocks (`expert_blocks`), which are fewer than ranks where experts are whole.
    """
    return Layout(
        tensor_parallel=layout.tensor_parallel,
        pipeline_parallel=layout.pipeline_parallel,
        data_parallel=layout.data_parallel,
        virtual_stages=1,
        context_parallel=layout.context_parallel,
        expert_parallel=expert_blocks(layout, has_whole_experts=has_whole_experts),
        micro_batch_size=1,
        sequence_parallel=False,
        distributed_optimizer=False,
        recompute="none",
    )


def slowdowns_of_blocks(layout: Layout, blocks: Blocks, arrangement: IntArray) -> FloatArray:
    """The slowdown of each block with those it waits for in every layer [pp, copies].

    They are those of its context and expert parallel groups, neighbours in a row of `arrangement`. `layout`
    counts expert parallelism in blocks (`degrees_alone`).
    """
    slowdowns: FloatArray = blocks.slowdown[arrangement]
    for size in (layout.context_parallel, layout.expert_parallel):
        if size > 1:
            groups = slowdowns.reshape(len(slowdowns), -1, size).max(axis=2)
            slowdowns = np.repeat(groups, size, axis=1)
    return slowdowns


def _blocks(topology: Topology, cut: Sequence[tuple[int, ...]]) -> Blocks:
    members = np.array(cut, dtype=np.int64)
    firsts = members[:, 0]
    node, domain = topology.node_of_slot[firsts], topology.domain_of_slot[firsts]
    segments = topology.segment_of_slot
    slowdown: FloatArray = topology.slowdown[members].max(axis=1)
    keys = list(zip(node.tolist(), domain.tolist(), slowdown.tolist(), strict=True))
    index = {key: number for number, key in enumerate(sorted(set(keys)))}
    return Blocks(
        slots=tuple(cut),
        node=node,
        domain=domain,
        segment=np.zeros_like(domain) if segments is None else segments[firsts],
        slowdown=slowdown,
        kind=np.array([index[key] for key in keys], dtype=np.int64),
    )
