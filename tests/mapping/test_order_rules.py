"""What orders keep for features that take ranks for places: whole nodes, and where experts are shared."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import PlanError
from quartet_plugin.mapping.exchanges import exchanged, run_lengths
from quartet_plugin.mapping.order_rules import OrderRules
from quartet_plugin.mapping.orders import is_legal, legal_orders, order_named, slots_of
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Slot
from tests.space.jobs import make_layout, make_nodes

NODES, EXPERTS = OrderRules(keeps_nodes=True), OrderRules(keeps_experts=True)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """A layout with experts, spread over tensor-parallel ranks in some, and the slots of a node."""
    tensor, context, experts, pipeline = (
        draw(st.sampled_from(choices)) for choices in ((1, 2), (1, 2), (1, 2, 4), (1, 2))
    )
    replicas = draw(st.sampled_from((1, 2, 4)))
    over_tensor = tensor if draw(st.booleans()) else 1
    data = max(1, experts // (context * over_tensor)) * replicas
    layout = make_layout(
        tensor_parallel=tensor,
        context_parallel=context,
        expert_parallel=experts,
        pipeline_parallel=pipeline,
        data_parallel=data,
    )
    sizes = [size for size in (2, 4, 8) if layout.world_size % size == 0 and size % tensor == 0]
    return layout, draw(st.sampled_from(sizes or [layout.world_size]))


def ways(layout: Layout) -> tuple[bool, ...]:
    """Whether experts are whole, for each way to cut them that the layout has."""
    return (True,) if layout.tensor_parallel == 1 or layout.needs_whole_experts else (True, False)


def shared(slots: Sequence[Slot], layout: Layout, *, whole: bool) -> list[tuple[int, ...]]:
    """The nodes of the ranks that share experts, group by group, counted one rank at a time."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, slot in enumerate(slots):
        copy, tensor = divmod(rank, layout.tensor_parallel)
        key = (rank // layout.expert_parallel,) if whole else (copy // layout.expert_parallel, tensor)
        groups.setdefault(key, []).append(slot.node)
    return [tuple(nodes) for nodes in groups.values()]


@settings(max_examples=150, deadline=None)
@given(layouts(), st.integers(0, 2**32), st.sampled_from([NODES, EXPERTS]))
def test_no_order_that_is_offered_breaks_a_rule(
    job: tuple[Layout, int], seed: int, rules: OrderRules
) -> None:
    (layout, size), draw = job, random.Random(seed)
    nodes = make_nodes(*[size] * (layout.world_size // size))
    stock = slots_of(nodes)
    orders = [order.mapping.slots for order in legal_orders(layout, nodes=nodes, rules=rules)]
    assert stock in orders
    for length in run_lengths(layout, nodes=nodes, rules=rules):
        num_runs = layout.world_size // length
        pairs = [(draw.randrange(num_runs), draw.randrange(num_runs)) for _ in range(2)]
        orders.append(exchanged(stock, pairs, length=length, layout=layout, rules=rules))
    for order in orders:
        assert is_legal(order, layout=layout)
        if rules is NODES:
            blocks = list(itertools.batched(order, size))
            assert sorted(blocks) == list(itertools.batched(stock, size))
            continue
        for whole in ways(layout):
            assert set(shared(order, layout, whole=whole)) <= set(shared(stock, layout, whole=whole))


@settings(max_examples=100, deadline=None)
@given(layouts(), st.randoms(use_true_random=False))
def test_what_divides_experts_otherwise_is_refused(job: tuple[Layout, int], draw: random.Random) -> None:
    layout, size = job
    stock = slots_of(make_nodes(*[size] * (layout.world_size // size)))
    order = list(stock)
    draw.shuffle(order)
    is_kept = layout.expert_parallel == 1 or all(
        set(shared(order, layout, whole=whole)) <= set(shared(stock, layout, whole=whole))
        for whole in ways(layout)
    )
    assert (EXPERTS.fault(order, layout=layout) is None) == is_kept


def test_groups_longer_than_a_node_move_as_a_whole() -> None:
    layout = make_layout(pipeline_parallel=4, data_parallel=4, expert_parallel=4)
    nodes = make_nodes(*[2] * 8)
    assert run_lengths(layout, nodes=nodes, rules=EXPERTS) == (4, 2, 1)
    slots = slots_of(nodes)
    moved = exchanged(slots, [(1, 3)], length=4, layout=layout, rules=EXPERTS)
    assert moved == (*slots[:4], *slots[12:], *slots[8:12], *slots[4:8])
    # One node of a group for one of another would leave both on nodes that no group has.
    assert exchanged(slots, [(3, 5)], length=2, layout=layout, rules=EXPERTS) == slots
    # Inside a node ranks may change their devices.
    assert exchanged(slots, [(2, 3)], length=1, layout=layout, rules=EXPERTS) != slots


def test_groups_over_tensor_parallel_ranks_move_as_a_whole() -> None:
    """Four nodes hold two groups of eight ranks; of experts that are shared a group would have sixteen."""
    layout = make_layout(tensor_parallel=2, pipeline_parallel=2, data_parallel=4, expert_parallel=8)
    assert layout.needs_whole_experts
    nodes = make_nodes(*[4] * 4)
    assert 8 in run_lengths(layout, nodes=nodes, rules=EXPERTS)
    slots = slots_of(nodes)
    assert EXPERTS.fault((*slots[4:8], *slots[:4], *slots[8:]), layout=layout) is not None
    assert EXPERTS.fault((*slots[8:], *slots[:8]), layout=layout) is None


def test_fast_links_of_a_part_of_a_node_are_kept() -> None:
    layout = make_layout(pipeline_parallel=1, data_parallel=8, expert_parallel=4)
    slots = slots_of(make_nodes(8))
    mixed = (*slots[:3], slots[4], slots[3], *slots[5:])
    assert EXPERTS.fault(mixed, layout=layout) is None
    assert OrderRules(keeps_experts=True, domain_devices=4).fault(mixed, layout=layout) is not None
    assert OrderRules(keeps_experts=True, domain_devices=64).fault(mixed, layout=layout) is None


def test_whole_nodes_move_alone() -> None:
    layout = make_layout(pipeline_parallel=3, data_parallel=4)
    nodes = make_nodes(4, 4, 4)
    assert run_lengths(layout, nodes=nodes, rules=NODES) == (4,)
    slots = slots_of(nodes)
    assert NODES.fault((*slots[:4], *slots[8:], *slots[4:8]), layout=layout) is None
    assert NODES.fault((*slots[:4], *slots[7:3:-1], *slots[8:]), layout=layout) is not None


@pytest.mark.parametrize(
    ("name", "rules", "words"),
    [
        ("0,1,2,4,3,5,6,7", EXPERTS, "must keep each expert-parallel group on the nodes of one such group"),
        ("1,0,2,3,4,5,6,7", NODES, "must move whole nodes alone"),
    ],
)
def test_an_order_by_hand_says_the_rule_that_it_breaks(name: str, rules: OrderRules, words: str) -> None:
    layout = make_layout(pipeline_parallel=2, data_parallel=4, expert_parallel=4)
    with pytest.raises(PlanError, match=words):
        order_named(name, layout=layout, nodes=make_nodes(4, 4), rules=rules)
