"""Segmented dynamic programming against every combination of states."""

from itertools import pairwise, product

import numpy as np
import pytest
from numpy.typing import NDArray

from quartet_plugin.errors import PlanError
from quartet_plugin.partition.search import OperatorGraph, cheapest_of_layers, cheapest_states, min_plus

# The transformer layer of PrimePar's Fig. 6: segments begin at 0, 2 and 7.
NUM_NODES = 13
LONG_EDGES = ((0, 7), (2, 5), (7, 12))


def random_graph(
    seed: int, *, num_nodes: int = NUM_NODES, long_edges: tuple[tuple[int, int], ...] = LONG_EDGES
) -> OperatorGraph:
    """Three states an operator; the last operator costs what the first does, as in a row of layers."""
    rng = np.random.default_rng(seed)
    edges = [(node, node + 1) for node in range(num_nodes - 1)] + list(long_edges)
    nodes = [rng.integers(0, 100, 3).astype(float) for _ in range(num_nodes - 1)]
    return OperatorGraph(
        [*nodes, nodes[0]], {edge: rng.integers(0, 100, (3, 3)).astype(float) for edge in edges}
    )


def all_totals(graph: OperatorGraph) -> NDArray[np.int16]:
    """The cost of every combination, an axis an operator."""
    count = len(graph.node_costs)
    totals = np.zeros((3,) * count, dtype=np.int16)
    for node, costs in enumerate(graph.node_costs):
        totals += costs.astype(np.int16).reshape([3 if axis == node else 1 for axis in range(count)])
    for edge, costs in graph.edge_costs.items():
        totals += costs.astype(np.int16).reshape([3 if axis in edge else 1 for axis in range(count)])
    return totals


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_it_finds_the_least_of_all_combinations(first: int) -> None:
    for seed in range(first, first + 50):
        graph = random_graph(seed)
        totals = all_totals(graph)
        cost, states = cheapest_states(graph)
        assert cost == totals.min() == totals[tuple(states)]


@pytest.mark.parametrize("num_layers", [1, 2, 3, 5, 8])
def test_equal_layers_by_doubling(num_layers: int) -> None:
    for seed in range(10):
        graph = random_graph(seed, num_nodes=5, long_edges=((0, 2), (2, 4)))
        layer = all_totals(graph).min(axis=(1, 2, 3))
        shared = graph.node_costs[0]
        expected = min(
            sum(layer[pair] for pair in pairwise(ends)) - sum(shared[end] for end in ends[1:-1])
            for ends in product(range(3), repeat=num_layers + 1)
        )
        cost, states = cheapest_of_layers(graph, num_layers)
        assert cost == expected
        assert len(states) == num_layers
        assert all(before[-1] == after[0] for before, after in pairwise(states))
        totals = all_totals(graph)
        counted = sum(int(totals[tuple(row)]) for row in states)
        assert counted - sum(shared[row[0]] for row in states[1:]) == cost


def test_layers_must_end_as_they_begin() -> None:
    graph = random_graph(0)
    other = OperatorGraph([*graph.node_costs[:-1], graph.node_costs[0] + 1], graph.edge_costs)
    with pytest.raises(PlanError, match="the last operator must have the first one's states"):
        cheapest_of_layers(other, 2)


@pytest.mark.parametrize("long_edges", [((0, 3), (2, 5)), ((1, 4), (0, 2))])
def test_edges_that_cross_are_refused(long_edges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(PlanError, match="crosses another"):
        cheapest_states(random_graph(0, num_nodes=6, long_edges=long_edges))


def test_min_plus_is_the_product_of_the_least() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(4, 7)), rng.normal(size=(7, 5))
    assert (min_plus(left, right) == (left[:, :, None] + right[None]).min(axis=1)).all()
