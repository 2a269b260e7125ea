"""Exchanges of slots in an order of ranks: every order is reached from any other one.

An order is cut into runs of equal length, consecutive ranks each, which move as a whole. A pair of numbers
exchanges two runs by their positions. Long runs need fewer exchanges: a run of a node's slots moves nodes.
"""

from collections.abc import Iterable, Sequence
from itertools import batched, islice

from quartet_plugin.mapping.order_rules import NO_RULES, OrderRules
from quartet_plugin.mapping.orders import is_legal
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import NodeInfo, Slot

type Pair = tuple[int, int]

# Pairs of runs that are exchanged for one length.
MAX_PAIRS = 128


def run_lengths(
    layout: Layout, *, nodes: Sequence[NodeInfo], rules: OrderRules = NO_RULES
) -> tuple[int, ...]:
    """The lengths of runs to choose from, the longest first: divisors of a node's slots, at least two runs.

    Each divides a tensor-parallel group or is a multiple of it. Where whole groups alone may move that are
    longer than a node, their length is one, too. Empty for nodes of unequal size: RANKs could not be
    assigned at launch.
    """
    sizes = {node.num_slots for node in nodes}
    if len(sizes) > 1:
        return ()
    (size,) = sizes
    tensor, most = layout.tensor_parallel, layout.world_size // 2
    divisors = [
        length
        for length in range(min(size, most), 0, -1)
        if size % length == 0 and (length % tensor == 0 or tensor % length == 0)
    ]
    if rules.keeps_nodes:
        divisors = [length for length in divisors if length == size]
    units = [length for length in rules.units(layout, slots_per_node=size) if length <= most]
    return (*units, *divisors)


def exchanged(
    slots: Sequence[Slot],
    pairs: Iterable[Pair],
    *,
    length: int,
    layout: Layout,
    rules: OrderRules = NO_RULES,
) -> tuple[Slot, ...]:
    """The order after the exchanges of runs, one after the other; `slots` itself where they break a rule."""
    runs = list(batched(slots, length))
    for first, second in pairs:
        runs[first], runs[second] = runs[second], runs[first]
    order = tuple(slot for run in runs for slot in run)
    return order if is_legal(order, layout=layout, rules=rules) else tuple(slots)


def pairs_of_runs(num_runs: int) -> list[Pair]:
    """The first `MAX_PAIRS` pairs of runs but that of RANK 0, neighbours first."""
    pairs = ((first, first + by) for by in range(1, num_runs) for first in range(1, num_runs - by))
    return list(islice(pairs, MAX_PAIRS))


def exchanges_between(slots: Sequence[Slot], wanted: Sequence[Slot], *, length: int) -> list[Pair] | None:
    """The fewest exchanges of runs that make `wanted` of `slots`; None where runs would have to be cut."""
    runs, goal = list(batched(slots, length)), list(batched(wanted, length))
    position = {run: index for index, run in enumerate(runs)}
    if any(run not in position for run in goal):
        return None
    pairs = []
    for index, run in enumerate(goal):
        other = position[run]
        if other == index:
            continue
        pairs.append((index, other))
        runs[index], runs[other] = run, runs[index]
        position[runs[other]] = other
    return pairs
