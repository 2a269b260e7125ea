"""The cheapest state of every operator of a layer graph: PrimePar's segmented dynamic programming, exact.

Operators are in order; an edge joins two of them and costs by both states. An operator with an edge to
other than its successor begins a segment, and that edge's end begins the next, so that operators with few
states divide a chain: inside of a segment only neighbours have edges (Eq. 11 and 12). Segments are merged
over the operator that they share, and edges between segments' ends are added after (Eq. 13 and 14).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.errors import PlanError

CostMatrix = NDArray[np.float64]
# Rows of a product of matrices at a time: what they take stays in a core's cache.
_ROWS = 64
# The states of operators by their places in the order.
Choice = dict[int, int]


@dataclass(frozen=True, slots=True)
class OperatorGraph:
    """Costs of a layer's operators: `node_costs` [operator][state], `edge_costs` (i, j) -> [state, state].

    An edge goes from an earlier operator i to a later one j. Neighbours without an edge cost nothing
    together.
    """

    node_costs: Sequence[NDArray[np.float64]]
    edge_costs: Mapping[tuple[int, int], CostMatrix]


@dataclass(frozen=True, slots=True)
class _Span:
    """The operators from `first` to `last`: least cost by the states of both, and how to find the others'.

    The costs of both ends are included.
    """

    first: int
    last: int
    costs: CostMatrix
    choose: Callable[[int, int], Choice]


def cheapest_states(graph: OperatorGraph) -> tuple[float, list[int]]:
    """The least total cost and each operator's state.

    Raises PlanError for edges that cross each other, which the dynamic programming cannot take.
    """
    span = _layer(graph)
    first, last = (int(end) for end in np.unravel_index(int(span.costs.argmin()), span.costs.shape))
    choice = span.choose(first, last)
    return float(span.costs[first, last]), [choice[node] for node in range(len(graph.node_costs))]


def min_plus(left: CostMatrix, right: CostMatrix) -> CostMatrix:
    """The least of left[i, k] + right[k, j] over k."""
    best = np.full((left.shape[0], right.shape[1]), np.inf)
    candidate = np.empty((min(_ROWS, left.shape[0]), right.shape[1]))
    for first in range(0, left.shape[0], _ROWS):
        rows, least = left[first : first + _ROWS], best[first : first + _ROWS]
        sums = candidate[: len(rows)]
        for middle in range(left.shape[1]):
            np.add(rows[:, middle, None], right[middle], out=sums)
            np.minimum(least, sums, out=least)
    return best


def _layer(graph: OperatorGraph) -> _Span:
    """All operators as one span: segments first, then merged from the innermost long edge outwards."""
    last = len(graph.node_costs) - 1
    long = [(i, j) for i, j in graph.edge_costs if j != i + 1]
    long.sort(key=lambda edge: (edge[1] - edge[0], edge))
    bounds = sorted({0, last, *(end for edge in long for end in edge)})
    spans = [_segment(graph, *pair) for pair in pairwise(bounds)]
    for i, j in [*long, (0, last)]:
        covered = [span for span in spans if i <= span.first and span.last <= j]
        if not covered or covered[0].first != i or covered[-1].last != j:
            raise PlanError(
                f"edge from operator {i} to {j}: it crosses another; edges lie inside of each other or apart"
            )
        merged = covered[0]
        for span in covered[1:]:
            merged = _merged(merged, span, graph.node_costs[span.first])
        if (i, j) in long:
            merged = _Span(i, j, merged.costs + graph.edge_costs[i, j], merged.choose)
        place = spans.index(covered[0])
        spans[place : place + len(covered)] = [merged]
    return spans[0]


def _segment(graph: OperatorGraph, first: int, last: int) -> _Span:
    """The operators of a segment one after the other, for each state of its first."""
    start = graph.node_costs[first]
    steps: list[tuple[CostMatrix, CostMatrix]] = []
    costs = np.full((len(start), len(start)), np.inf)
    np.fill_diagonal(costs, start)
    for node in range(first + 1, last + 1):
        shape = (len(graph.node_costs[node - 1]), len(graph.node_costs[node]))
        edge = graph.edge_costs.get((node - 1, node), np.zeros(shape))
        steps.append((costs, edge))
        if node == first + 1:
            costs = start[:, None] + edge + graph.node_costs[node]
            continue
        costs = min_plus(costs, edge) + graph.node_costs[node]

    def choose(begin: int, end: int) -> Choice:
        choice = {last: end}
        for node in range(last - 1, first - 1, -1):
            before, edge = steps[node - first]
            choice[node] = int((before[begin] + edge[:, choice[node + 1]]).argmin())
        return choice

    return _Span(first, last, costs, choose)


def _merged(left: _Span, right: _Span, shared: NDArray[np.float64]) -> _Span:
    def choose(begin: int, end: int) -> Choice:
        middle = int((left.costs[begin] - shared + right.costs[:, end]).argmin())
        return left.choose(begin, middle) | right.choose(middle, end)

    return _Span(left.first, right.last, min_plus(left.costs - shared, right.costs), choose)
