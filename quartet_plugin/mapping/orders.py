"""Axis 4: the slot of every rank, by named orders.

Megatron numbers ranks tp fastest, then cp, dp and pp ("tp-cp-ep-dp-pp"):
RANK = tp + TP (cp + CP (dp + DP pp)).
Every order keeps RANK 0 on node 0, the master's host, and every TP group on one node. A job may have further
rules (`order_rules`).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from quartet_plugin.errors import PlanError
from quartet_plugin.mapping.order_rules import NO_RULES, OrderRules
from quartet_plugin.model.costs import IntArray
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Mapping, NodeInfo, Slot

EXHAUSTIVE_RANKS = 4
STOCK = "stock"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """A mapping with a name: `stock`, the name of a rule, or the slots' indices ("1,0").

    `node_sizes` [num_nodes] are slots a node, `indices` the int64 slot index of every rank, as bytes.
    """

    name: str
    node_sizes: tuple[int, ...]
    indices: bytes

    @property
    def mapping(self) -> Mapping:
        """The mapping, made where it is asked for: a large space has many orders that no plan uses."""
        return _mapping_of(self.node_sizes, self.indices)


def slots_of(nodes: Sequence[NodeInfo]) -> tuple[Slot, ...]:
    """All slots, in the launcher's order: node by node."""
    return _slots_of_counts(tuple(node.num_slots for node in nodes))


def slot_indices(nodes: Sequence[NodeInfo], mapping: Mapping) -> IntArray:
    """The index of each rank's slot in the launcher's order [world size]; not to be written to."""
    counts = tuple(node.num_slots for node in nodes)

    def indices() -> IntArray:
        known = mapping.indices(counts)
        assert known is not None, "slots of other nodes"
        return np.array(known, dtype=np.int64)

    return mapping.remembered(("slot_indices", counts), indices)


@lru_cache(maxsize=512)
def _mapping_of(counts: tuple[int, ...], order: bytes) -> Mapping:
    """The mapping of an order of the slots' indices, made once for all layouts that have it."""
    slots = _slots_of_counts(counts)
    return Mapping(slots=tuple(slots[index] for index in np.frombuffer(order, dtype=np.int64).tolist()))


@lru_cache(maxsize=64)
def _slots_of_counts(counts: tuple[int, ...]) -> tuple[Slot, ...]:
    return tuple(
        Slot(node=index, local=local) for index, count in enumerate(counts) for local in range(count)
    )


def legal_orders(
    layout: Layout, *, nodes: Sequence[NodeInfo], rules: OrderRules = NO_RULES
) -> tuple[RankOrder, ...]:
    """The orders for `layout`, `stock` first where it is legal, each physical arrangement once.

    Up to four processes these are all permutations but for equivalent ones: the order inside a TP group
    changes nothing, nor does the numbering of data-parallel replicas, as far as it leaves the
    expert-parallel groups and their copies. With more processes they are the named orders.
    Nodes of unequal size keep the stock order: RANKs could not be assigned at launch. Raises PlanError when
    `nodes` do not have one slot a process.
    """
    slots = slots_of(nodes)
    if len(slots) != layout.world_size:
        raise PlanError(f"mapping: {len(slots)} slots for {layout.world_size} processes; one each is needed")
    counts = tuple(node.num_slots for node in nodes)
    if len(set(counts)) > 1:
        return (_stock_order(counts),)
    named = _permutations(len(slots)) if len(slots) <= EXHAUSTIVE_RANKS else _named(layout)
    node_of_slot = np.repeat(np.arange(len(nodes)), counts[0])
    by_arrangement: dict[bytes, RankOrder] = {}
    for name, order in named:
        arrangement = _first_equal(order, layout).tobytes()
        if arrangement in by_arrangement or not _keeps_groups(node_of_slot[order], layout):
            continue
        rank_order = _order(name, order, node_sizes=counts)
        if not rules.limits_orders or rules.fault(rank_order.mapping.slots, layout=layout) is None:
            by_arrangement[arrangement] = rank_order
    return tuple(by_arrangement.values())


def order_named(
    name: str, *, layout: Layout, nodes: Sequence[NodeInfo], rules: OrderRules = NO_RULES
) -> RankOrder:
    """The order called `name`: `stock`, one of `legal_orders`, or the slot of every rank ("1,0").

    Raises PlanError for an unknown name, or slots that break a rule.
    """
    counts = tuple(node.num_slots for node in nodes)
    if name == STOCK:
        return _stock_order(counts)
    sizes = sorted(set(counts))
    if len(sizes) > 1:
        raise PlanError(
            f"mapping: {name!r}; nodes with {sizes[0]} and with {sizes[-1]} slots keep the launcher's order"
        )
    if name[:1].isdigit():
        indices = np.array(_listed_indices(name, nodes=nodes), dtype=np.int64)
    elif name in _RULES:
        indices = _by_rule(name, layout)
    else:
        raise PlanError(f"mapping: {name!r}; not the name of an order; known: {', '.join(ORDER_NAMES)}")
    order = _order(name, indices, node_sizes=counts)
    if not is_legal(order.mapping.slots, layout=layout):
        raise PlanError(
            f"mapping: {name!r}; RANK 0 must stay on node 0, and every TP group of {layout.label} on one node"
        )
    if fault := rules.fault(order.mapping.slots, layout=layout):
        raise PlanError(f"mapping: {name!r}; an order of {layout.label} must {fault}")
    return order


def listed_slots(text: str, *, nodes: Sequence[NodeInfo]) -> tuple[Slot, ...]:
    """The slot of every rank in a list such as "1,0". Raises PlanError unless it has each slot once."""
    slots = slots_of(nodes)
    return tuple(slots[index] for index in _listed_indices(text, nodes=nodes))


def _listed_indices(text: str, *, nodes: Sequence[NodeInfo]) -> list[int]:
    """The indices of the slots in a list, in the launcher's order."""
    indices, num_slots = [int(word) for word in text.split(",")], sum(node.num_slots for node in nodes)
    if sorted(indices) != list(range(num_slots)):
        raise PlanError(f"mapping: {text!r}; each of the slots 0 to {num_slots - 1} once is needed")
    return indices


def first_equal(slots: Sequence[Slot], *, layout: Layout) -> tuple[Slot, ...]:
    """The first of the orders of one physical arrangement: each TP group sorted, then the replicas.

    An arrangement is a set of replicas, each a list of stages of CP lists of TP sets. Replicas that share
    experts differ by the part of these that each holds.
    """
    known = sorted(slots)
    index = {slot: number for number, slot in enumerate(known)}
    order = np.array([index[slot] for slot in slots], dtype=np.int64)
    return tuple(known[number] for number in _first_equal(order, layout).tolist())


def _first_equal(order: IntArray, layout: Layout) -> IntArray:
    """`first_equal` of an order of the slots' indices [world size]."""
    groups = np.sort(order.reshape(-1, layout.tensor_parallel), axis=1)
    num_sharing = _num_sharing_experts(layout)
    if num_sharing is None:
        return groups.ravel()
    # The slots of each stage of each replica.
    parts = groups.reshape(layout.pipeline_parallel, layout.data_parallel, -1)
    renumbered: IntArray = parts[:, _renumbered(parts[0, :, 0], num_sharing=num_sharing)].ravel()
    return renumbered


def _num_sharing_experts(layout: Layout) -> int | None:
    """The number of replicas that hold the experts together; None where a group ends inside a replica.

    An expert-parallel group has EP consecutive copies of a tensor-parallel rank, CP before DP. One that also
    spans tensor-parallel ranks has all ranks of EP / TP copies, or some ranks of a single copy.
    """
    experts, context, tensor = layout.expert_parallel, layout.context_parallel, layout.tensor_parallel
    if layout.needs_whole_experts:
        if experts % tensor and tensor % experts:
            return None
        experts = max(1, experts // tensor)
    if context % experts == 0:
        return 1
    return None if experts % context or layout.data_parallel % (experts // context) else experts // context


def _renumbered(first_slots: IntArray, *, num_sharing: int) -> IntArray:
    """The first of the numberings that leave every expert-parallel group, and its copies, what they are.

    Groups are rows of `num_sharing` replicas. A column holds the same experts in every row, so that rows may
    be exchanged, and columns as a whole. No two replicas share their first slot, so these put them in order.
    """
    by_row = first_slots.reshape(-1, num_sharing)
    columns = by_row[by_row.min(axis=1).argmin()].argsort()
    rows = by_row[:, columns[0]].argsort()
    numbers: IntArray = np.arange(by_row.size).reshape(by_row.shape)[rows][:, columns].ravel()
    return numbers


def is_legal(slots: Sequence[Slot], *, layout: Layout, rules: OrderRules = NO_RULES) -> bool:
    """Whether RANK 0 is on node 0 and every TP group on one node, and the job's rules are kept."""
    node_of_rank = np.array([slot.node for slot in slots], dtype=np.int64)
    return _keeps_groups(node_of_rank, layout) and rules.fault(slots, layout=layout) is None


def _keeps_groups(node_of_rank: IntArray, layout: Layout) -> bool:
    """Whether RANK 0 is on node 0 and every TP group on one node; `node_of_rank` [world size] are indices."""
    groups = node_of_rank.reshape(-1, layout.tensor_parallel)
    return bool(node_of_rank[0] == 0 and (groups == groups[:, :1]).all())


def coordinates[R: (int, IntArray)](rank: R, *, layout: Layout) -> tuple[R, R, R, R]:
    """(tp, cp, dp, pp) of a Megatron RANK, or of several."""
    rest, tp = divmod(rank, layout.tensor_parallel)
    rest, cp = divmod(rest, layout.context_parallel)
    pp, dp = divmod(rest, layout.data_parallel)
    return tp, cp, dp, pp


def rank_of[R: (int, IntArray)](tp: R, *, cp: R, dp: R, pp: R, layout: Layout) -> R:
    """The Megatron RANK of these coordinates, or the RANKs of several."""
    replicas = layout.context_parallel * (dp + layout.data_parallel * pp)
    rank: R = tp + layout.tensor_parallel * (cp + replicas)
    return rank


def _stock_order(node_sizes: tuple[int, ...]) -> RankOrder:
    return _order(STOCK, np.arange(sum(node_sizes), dtype=np.int64), node_sizes=node_sizes)


def _order(name: str, indices: IntArray, *, node_sizes: tuple[int, ...]) -> RankOrder:
    is_stock = bool((indices[:-1] < indices[1:]).all())
    return RankOrder(name=STOCK if is_stock else name, node_sizes=node_sizes, indices=indices.tobytes())


# A name, and the index of each rank's slot.
type _Named = tuple[str, IntArray]


def _permutations(num_slots: int) -> list[_Named]:
    return [
        (",".join(map(str, indices)), np.array(indices, dtype=np.int64))
        for indices in itertools.permutations(range(num_slots))
    ]


def _named(layout: Layout) -> list[_Named]:
    """The named orders; the slot of a rank is the stock slot of the rank that `rule` names."""
    stock = np.arange(layout.world_size, dtype=np.int64)
    return [(STOCK, stock), *((name, _by_rule(name, layout)) for name in _RULES)]


def _by_rule(name: str, layout: Layout) -> IntArray:
    """The index of each rank's slot."""
    ranks = coordinates(np.arange(layout.world_size, dtype=np.int64), layout=layout)
    return _RULES[name](layout, *ranks)


# The rank whose stock slot each rank takes, by the ranks' coordinates.
type _Rule = Callable[[Layout, IntArray, IntArray, IntArray, IntArray], IntArray]


def _pipeline_reversed(layout: Layout, tp: IntArray, cp: IntArray, dp: IntArray, pp: IntArray) -> IntArray:
    return rank_of(tp, cp=cp, dp=dp, pp=layout.pipeline_parallel - 1 - pp, layout=layout)


def _rotated(by: int) -> _Rule:
    def rule(layout: Layout, tp: IntArray, cp: IntArray, dp: IntArray, pp: IntArray) -> IntArray:
        return rank_of(tp, cp=cp, dp=dp, pp=(pp + by) % layout.pipeline_parallel, layout=layout)

    return rule


def _tp_pp_dp(layout: Layout, tp: IntArray, cp: IntArray, dp: IntArray, pp: IntArray) -> IntArray:
    """A replica's stages beside each other: slots are counted tp, cp, pp, then dp."""
    inner = cp + layout.context_parallel * (pp + layout.pipeline_parallel * dp)
    rank: IntArray = tp + layout.tensor_parallel * inner
    return rank


_RULES: dict[str, _Rule] = {
    "tp-pp-dp": _tp_pp_dp,
    "pipeline-reversed": _pipeline_reversed,
    "pipeline-rotated-1": _rotated(1),
    "pipeline-rotated-minus-1": _rotated(-1),
}

# Names that a request may have beside the slots of every rank.
ORDER_NAMES = (STOCK, *_RULES)
