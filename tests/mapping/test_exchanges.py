"""Exchanges of runs of slots: every order is reached, the longest runs where they will do."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_plugin.mapping.exchanges import exchanged, exchanges_between, run_lengths
from quartet_plugin.mapping.orders import is_legal, slots_of
from tests.space.jobs import make_layout, make_nodes


@given(st.permutations(range(12)))
def test_any_order_is_made_of_the_stock_one(order: list[int]) -> None:
    layout = make_layout(pipeline_parallel=12)
    slots = slots_of(make_nodes(12))
    wanted = tuple(slots[index] for index in order)
    pairs = exchanges_between(slots, wanted, length=1)
    assert pairs is not None
    assert len(pairs) < 12
    assert exchanged(slots, pairs, length=1, layout=layout) == wanted


def test_nodes_move_as_a_whole() -> None:
    slots = slots_of(make_nodes(4, 4, 4))
    wanted = (*slots[:4], *slots[8:], *slots[4:8])
    assert exchanges_between(slots, wanted, length=4) == [(1, 2)]
    assert exchanges_between(slots, (*slots[1:4], slots[0], *slots[4:]), length=4) is None


@pytest.mark.parametrize(
    ("tensor", "nodes", "lengths"),
    [
        (1, (8,), (4, 2, 1)),
        (2, (4, 4), (4, 2, 1)),
        (4, (8, 8), (8, 4, 2, 1)),
        (1, (3, 3), (3, 1)),
        (1, (1, 2), ()),
    ],
)
def test_lengths_divide_a_node(tensor: int, nodes: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    layout = make_layout(tensor_parallel=tensor, pipeline_parallel=sum(nodes) // tensor)
    assert run_lengths(layout, nodes=make_nodes(*nodes)) == lengths


def test_exchanges_that_break_a_rule_change_nothing() -> None:
    layout, nodes = make_layout(tensor_parallel=2, pipeline_parallel=4), make_nodes(4, 4)
    slots, draw = slots_of(nodes), random.Random(0)
    assert exchanged(slots, [(0, 4)], length=1, layout=layout) == slots  # RANK 0 leaves node 0
    assert exchanged(slots, [(1, 4)], length=1, layout=layout) == slots  # a group on two nodes
    for _ in range(50):
        pairs = [(draw.randrange(8), draw.randrange(8)) for _ in range(3)]
        assert is_legal(exchanged(slots, pairs, length=1, layout=layout), layout=layout)
