"""Segmented dynamic programming against every combination of states."""

import numpy as np
import pytest
from numpy.typing import NDArray

from quartet_plugin.errors import PlanError
from quartet_plugin.partition.search import OperatorGraph, cheapest_states, min_plus

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


@pytest.mark.parametrize("long_edges", [((0, 3), (2, 5)), ((1, 4), (0, 2))])
def test_edges_that_cross_are_refused(long_edges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(PlanError, match="crosses another"):
        cheapest_states(random_graph(0, num_nodes=6, long_edges=long_edges))


def test_min_plus_is_the_product_of_the_least() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(4, 7)), rng.normal(size=(7, 5))
    assert (min_plus(left, right) == (left[:, :, None] + right[None]).min(axis=1)).all()
