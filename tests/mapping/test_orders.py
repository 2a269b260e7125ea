"""Orders of ranks: legal, distinct, and complete up to four processes."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import PlanError
from quartet_plugin.mapping import orders
from quartet_plugin.mapping.orders import (
    coordinates,
    first_equal,
    is_legal,
    legal_orders,
    order_named,
    rank_of,
    slots_of,
)
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Mapping, NodeInfo, Slot
from tests.space.jobs import make_layout, make_nodes


def layout_of(tensor: int, pipeline: int, data: int, context: int = 1, experts: int = 1) -> Layout:
    return make_layout(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        data_parallel=data,
        context_parallel=context,
        expert_parallel=experts,
    )


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Layout, tuple[NodeInfo, ...]]:
    layout = layout_of(
        draw(st.sampled_from([1, 2, 4])),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from([1, 2])),
    )
    world = layout.world_size
    divisors = [
        n for n in range(1, world + 1) if world % n == 0 and (world // n) % layout.tensor_parallel == 0
    ]
    num_nodes = draw(st.sampled_from(divisors))
    return layout, make_nodes(*[world // num_nodes] * num_nodes)


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_orders_are_legal_and_distinct(job: tuple[Layout, tuple[NodeInfo, ...]]) -> None:
    layout, nodes = job
    found = legal_orders(layout, nodes=nodes)
    assert found[0].name == "stock"
    assert found[0].mapping.slots == slots_of(nodes)
    assert len({order.name for order in found}) == len(found)
    assert len({order.mapping for order in found}) == len(found)
    for order in found:
        assert sorted(order.mapping.slots) == list(slots_of(nodes))
        assert order.mapping.slots[0].node == 0
        assert is_legal(order.mapping.slots, layout=layout)
        assert order_named(order.name, layout=layout, nodes=nodes) == order


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_ranks_and_coordinates_are_inverse(job: tuple[Layout, tuple[NodeInfo, ...]]) -> None:
    layout, _ = job
    for rank in range(layout.world_size):
        tp, cp, dp, pp = coordinates(rank, layout=layout)
        assert rank_of(tp, cp=cp, dp=dp, pp=pp, layout=layout) == rank


@pytest.mark.parametrize(
    ("degrees", "num"),
    [
        ((1, 2, 1), 2),  # the swap
        ((1, 4, 1), math.factorial(4)),
        ((4, 1, 1), 1),  # inside a TP group nothing changes
        ((1, 1, 4), 1),  # replicas are alike
        ((1, 2, 2), math.factorial(4) // 2),
        ((2, 2, 1), math.comb(4, 2)),
    ],
)
def test_up_to_four_processes_every_arrangement_is_there_once(
    degrees: tuple[int, int, int], num: int
) -> None:
    layout = layout_of(*degrees)
    assert len(legal_orders(layout, nodes=make_nodes(layout.world_size))) == num


def test_an_arrangement_beside_the_listed_ones_is_equal_to_one_of_them() -> None:
    layout = layout_of(1, 2, 2)
    nodes = make_nodes(4)
    slots = slots_of(nodes)
    stages = {
        frozenset(zip(order.mapping.slots[:2], order.mapping.slots[2:], strict=True))
        for order in legal_orders(layout, nodes=nodes)
    }
    for permutation in itertools.permutations(slots):
        assert frozenset(zip(permutation[:2], permutation[2:], strict=True)) in stages


def communicating(slots: Sequence[Slot], layout: Layout) -> object:
    """What tells arrangements apart: pipelines with the positions in CP, and the groups of the experts."""
    tensor, copies = layout.tensor_parallel, layout.context_parallel * layout.data_parallel
    groups = [frozenset(group) for group in itertools.batched(slots, tensor)]
    stages = list(itertools.batched(groups, copies))
    width = layout.context_parallel
    experts = layout.expert_parallel // (tensor if layout.needs_whole_experts else 1)
    replicas = frozenset(
        tuple(stage[dp * width : (dp + 1) * width] for stage in stages) for dp in range(layout.data_parallel)
    )
    shared = [frozenset(frozenset(part) for part in itertools.batched(stage, experts)) for stage in stages]
    same = [frozenset(frozenset(stage[part::experts]) for part in range(experts)) for stage in stages]
    return replicas, tuple(shared), tuple(same)


@pytest.mark.parametrize(
    ("degrees", "num"),
    [
        ((1, 1, 4, 1, 1), 1),
        ((1, 1, 4, 1, 4), 1),
        ((1, 1, 4, 1, 2), 6),  # three ways to share the experts, two copies of each
        ((1, 1, 2, 2, 2), 12),  # a group is a replica
        ((1, 1, 2, 2, 4), 12),
        ((1, 2, 2, 1, 2), 12),
        # Spread over tensor-parallel ranks: a group is two of these, or lies in each.
        ((2, 1, 2, 1, 4), 3),
        ((2, 2, 1, 1, 2), 6),
    ],
)
def test_orders_are_equal_only_where_the_groups_of_experts_are(
    degrees: tuple[int, int, int, int, int], num: int
) -> None:
    layout, nodes = layout_of(*degrees), make_nodes(4)
    kinds: dict[object, set[tuple[Slot, ...]]] = {}
    for order in itertools.permutations(slots_of(nodes)):
        kinds.setdefault(communicating(order, layout), set()).add(first_equal(order, layout=layout))
    assert all(len(first) == 1 for first in kinds.values())
    assert len(set.union(*kinds.values())) == len(kinds) == num
    assert len(legal_orders(layout, nodes=nodes)) == num


@pytest.mark.parametrize("degrees", [(1, 2, 2), (2, 2, 1), (1, 1, 4), (2, 1, 2), (1, 4, 1)])
def test_the_first_equal_order_is_the_listed_one(degrees: tuple[int, int, int]) -> None:
    layout, nodes = layout_of(*degrees), make_nodes(4)
    listed = {order.mapping.slots for order in legal_orders(layout, nodes=nodes)}
    equal = [first_equal(order, layout=layout) for order in itertools.permutations(slots_of(nodes))]
    assert set(equal) == listed
    assert [first_equal(order, layout=layout) for order in equal] == equal


def test_many_processes_have_named_orders() -> None:
    layout = layout_of(2, 4, 2)
    names = {order.name for order in legal_orders(layout, nodes=make_nodes(8, 8))}
    assert {"stock", "tp-pp-dp"} <= names
    beside = order_named("tp-pp-dp", layout=layout, nodes=make_nodes(8, 8)).mapping.slots
    replica = [beside[rank_of(0, cp=0, dp=0, pp=pp, layout=layout)].node for pp in range(4)]
    assert replica == [0, 0, 0, 0]


def test_nodes_of_unequal_size_keep_the_stock_order() -> None:
    assert [order.name for order in legal_orders(layout_of(1, 3, 1), nodes=make_nodes(1, 2))] == ["stock"]


@pytest.mark.parametrize("name", ["0,0", "0,1,2", "sideways", "9,1"])
def test_an_impossible_order_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match="mapping"):
        order_named(name, layout=layout_of(1, 2, 1), nodes=make_nodes(2))


def test_rank_zero_stays_on_the_first_node() -> None:
    with pytest.raises(PlanError, match="RANK 0"):
        order_named("1,0", layout=layout_of(1, 2, 1), nodes=make_nodes(1, 1))


@pytest.mark.parametrize("name", ["pipeline-reversed", "0,2,1,3,4,5"])
def test_nodes_of_unequal_size_keep_the_launchers_order(name: str) -> None:
    """A start refuses any other order there."""
    nodes = (*make_nodes(4), *(replace(node, host="small") for node in make_nodes(2)))
    layout = layout_of(1, 2, 3)
    assert order_named("stock", layout=layout, nodes=nodes).mapping.is_stock
    with pytest.raises(PlanError, match="nodes with 2 and with 4 slots"):
        order_named(name, layout=layout, nodes=nodes)


def listed_first_equal(slots: Sequence[Slot], layout: Layout) -> tuple[Slot, ...]:
    """The first equal order by sorting: TP groups, then columns and rows of replicas that share experts."""
    groups = [sorted(group) for group in itertools.batched(slots, layout.tensor_parallel)]
    width = layout.tensor_parallel * layout.context_parallel
    parts = list(itertools.batched(itertools.chain(*groups), width))
    replicas = [parts[dp :: layout.data_parallel] for dp in range(layout.data_parallel)]
    sharing = max(1, layout.expert_parallel // layout.context_parallel)
    rows = list(itertools.batched(replicas, sharing))
    first = min(rows, key=min)
    columns = sorted(range(sharing), key=lambda column: first[column])
    ordered = itertools.chain(*sorted(tuple(row[column] for column in columns) for row in rows))
    return tuple(itertools.chain(*itertools.chain(*zip(*ordered, strict=True))))


@settings(max_examples=100, deadline=None)
@given(jobs(), st.sampled_from([1, 2, 4]), st.randoms(use_true_random=False))
def test_the_first_equal_order_is_the_sorted_one(
    job: tuple[Layout, tuple[NodeInfo, ...]], experts: int, draw: random.Random
) -> None:
    layout, nodes = job
    slots = list(slots_of(nodes))
    draw.shuffle(slots)
    sharing, rest = divmod(experts, layout.context_parallel)
    if (rest == 0 and layout.data_parallel % sharing == 0) or layout.context_parallel % experts == 0:
        layout = replace(layout, expert_parallel=experts)
    assert first_equal(slots, layout=layout) == listed_first_equal(slots, layout)


def test_layouts_with_one_order_share_its_mapping() -> None:
    """What is derived from an order of a thousand slots is derived once."""
    nodes = make_nodes(8, 8)
    first, second = (legal_orders(layout, nodes=nodes) for layout in (layout_of(1, 2, 8), layout_of(2, 2, 4)))
    assert first[0].mapping is second[0].mapping


def test_a_mapping_is_made_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most layouts of a large space have orders that no plan takes."""
    made: list[int] = []

    def counted(*, slots: tuple[Slot, ...]) -> Mapping:
        made.append(len(slots))
        return Mapping(slots=slots)

    monkeypatch.setattr(orders, "Mapping", counted)
    orders._mapping_of.cache_clear()
    listed = legal_orders(layout_of(2, 4, 4), nodes=make_nodes(16, 16))
    assert len(listed) > 2
    assert made == []
    assert listed[1].mapping is listed[1].mapping
    assert made == [32]
