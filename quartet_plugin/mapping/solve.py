"""The mapping that minimizes a step: exact where few arrangements differ, local search where many do.

Blocks of one kind (equal node, domain and slowdown) are interchangeable, and so are data-parallel replicas
and the columns of a context-parallel group; arrangements that differ only in these are counted once. RANK 0
stays on node 0. The search starts from Megatron's two stock orders, so by the costs it is never worse.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quartet_plugin.errors import PlanError
from quartet_plugin.mapping.kind_words import KindWords
from quartet_plugin.mapping.topology import Blocks, Topology, blocks_of
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.layout import Layout

# Seconds of a forbidden arrangement: longer than any step, and sums of it stay finite.
NEVER_S = 1e30
# Seconds a step of an arrangement of blocks [pp, copies].
Objective = Callable[[IntArray], float]
EXACT_LIMIT = 5_000
# More dead ends than this, about a second of them, end an enumeration.
MAX_DEAD_ENDS = 100_000
EVALUATIONS = 2_000
STOCK_ORDERS = ("tp-cp-ep-dp-pp", "tp-pp-dp")
# Local search is repeated from this many of the best starts.
NUM_CLIMBS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An order of slots: `slots[r]`, an index into the topology's slots, plays RANK r in a step of `step_s`.

    `stock_s` has the seconds of the legal `STOCK_ORDERS`; `exact`: no order is better. `others` are the next
    best orders that were tried, for a prediction that includes more than the costs do.
    """

    slots: tuple[int, ...]
    step_s: float
    stock_s: Mapping[str, float]
    exact: bool
    others: tuple[tuple[int, ...], ...] = ()


def solve(
    layout: Layout,
    topology: Topology,
    objective_of: Callable[[Blocks], Objective],
    *,
    compute_s: FloatArray,
    inside: frozenset[str] = frozenset(),
    seed: int = 0,
    evaluations: int = EVALUATIONS,
    exact_limit: int = EXACT_LIMIT,
    num_others: int = 0,
) -> Solution:
    """The best order of the search; `evaluations` limits local search, `exact_limit` enumeration.

    `objective_of` gives the objective of arrangements of given blocks; it takes `NEVER_S` where a group of
    `inside` leaves its domain. `compute_s` [pp] says which pipeline ranks have the most to compute.

    The result depends on the arguments alone. Raises PlanError where slots and ranks differ in number, a
    tensor-parallel group cannot stay in a domain, or no arrangement keeps `inside` groups in one.
    """
    if len(topology.slots) != layout.world_size:
        raise PlanError(
            f"mapping: {len(topology.slots)} slots for {layout.world_size} ranks; one each is needed"
        )
    blocks = blocks_of(topology, size=layout.tensor_parallel)
    search = _Search(objective_of(blocks), blocks, layout)
    stock = _stock(layout, topology, blocks, objective_of)
    for start in _starts(layout, compute_s, blocks, [arrangement for arrangement, _ in stock.values()]):
        search.try_out(start)
    exact = search.enumerate(exact_limit)
    if not exact:
        search.climb(random.Random(seed), evaluations)  # noqa: S311 (a search, no secret)
    if search.best is None or search.best_s >= NEVER_S:
        raise PlanError(
            f"mapping: no order of {layout.label} has RANK 0 on the first node and its groups of "
            f"{', '.join(sorted(inside)) or 'tensor'} parallelism in one scale-up domain; use smaller degrees"
        )
    order = [search.best, *search.others(num_others)]
    slots, *others = (
        tuple(slot for block in arrangement.ravel().tolist() for slot in blocks.slots[block])
        for arrangement in order
    )
    return Solution(
        slots=slots,
        step_s=search.best_s,
        stock_s={name: seconds for name, (_, seconds) in stock.items() if seconds < NEVER_S},
        exact=exact,
        others=tuple(others),
    )


def stock_arrangement(layout: Layout, name: str) -> IntArray:
    """One of `STOCK_ORDERS` with blocks numbered in the launcher's order [pp, copies]."""
    shape = (layout.pipeline_parallel, layout.data_parallel, layout.context_parallel)
    numbers = np.arange(math.prod(shape), dtype=np.int64)
    if name == "tp-pp-dp":
        by_replica = numbers.reshape(shape[1], shape[0], shape[2])
        return np.ascontiguousarray(by_replica.transpose(1, 0, 2)).reshape(shape[0], -1)
    return numbers.reshape(shape[0], -1)


class _Search:
    """The best arrangement tried, in canonical form; enumeration and local search for better ones."""

    def __init__(self, step: Objective, blocks: Blocks, layout: Layout) -> None:
        self._step, self._blocks, self._layout = step, blocks, layout
        # Columns that keep their topology relative to each other when replicas are renamed.
        experts, context = layout.expert_parallel, layout.context_parallel
        self._width = context if experts == 1 else math.lcm(context, experts)
        self._copies = layout.context_parallel * layout.data_parallel
        self._seen: dict[bytes, float] = {}
        self._ranked: list[tuple[float, int, IntArray]] = []
        self.best: IntArray | None = None
        self.best_s = math.inf

    def try_out(self, arrangement: IntArray) -> float:
        """Seconds a step of the arrangement, infinite where RANK 0 cannot be on node 0."""
        canonical = self._canonical(arrangement)
        if canonical is None:
            return math.inf
        key = self._blocks.kind[canonical].tobytes()
        seconds = self._seen.get(key)
        if seconds is None:
            seconds = self._seen[key] = self._step(canonical)
            self._ranked.append((seconds, len(self._ranked), canonical))
        if seconds < self.best_s:
            self.best, self.best_s = canonical, seconds
        return seconds

    def others(self, number: int) -> list[IntArray]:
        """The `number` next best after the best one."""
        tried = sorted(self._ranked, key=lambda entry: entry[:2])[: number + 1]
        return [
            arrangement
            for seconds, _, arrangement in tried
            if arrangement is not self.best and seconds < NEVER_S
        ][:number]

    def enumerate(self, limit: int) -> bool:
        """Try every arrangement, each kind once; False where some are left, as there may be above `limit`."""
        if self._least_count() > limit:
            return False
        num_tried = num_dead_ends = 0
        for arrangement in self._every():
            if arrangement is None:
                num_dead_ends += 1
                if num_dead_ends > MAX_DEAD_ENDS:
                    return False
            elif num_tried == limit:
                return False
            else:
                self.try_out(arrangement)
                num_tried += 1
        return True

    def climb(self, rng: random.Random, evaluations: int) -> None:
        """Local search by exchanges that are no worse, from the best starts in turn, `evaluations` in all."""
        starts = [entry[2] for entry in sorted(self._ranked, key=lambda entry: entry[:2])[:NUM_CLIMBS]]
        for start in starts:
            current, seconds = start, self.try_out(start)
            for _ in range(evaluations // len(starts)):
                other = self._moved(current, rng)
                reached = self.try_out(other)
                if reached <= seconds:
                    current, seconds = other, reached

    def _moved(self, arrangement: IntArray, rng: random.Random) -> IntArray:
        """Two blocks, two runs of columns of a stage, or two whole stages exchanged."""
        other = arrangement.copy()
        stages, copies = other.shape
        draw = rng.random()
        if draw < 0.15 and stages > 1:
            first, second = rng.sample(range(stages), 2)
            other[[first, second]] = other[[second, first]]
            return other
        run = 1
        if draw < 0.4:
            run = rng.choice([size for size in range(1, copies + 1) if copies % size == 0])
        count = stages * (copies // run)
        pieces = other.reshape(count, run)
        if count < 2:
            return other
        first = rng.randrange(count)
        kinds = self._blocks.kind
        for _ in range(8):
            second = rng.randrange(count)
            if (kinds[pieces[first]] != kinds[pieces[second]]).any():
                break
        pieces[[first, second]] = pieces[[second, first]]
        return other

    def _canonical(self, arrangement: IntArray) -> IntArray | None:
        """The arrangement with replicas in ascending order of their blocks; None without RANK 0 on node 0.

        Every block occurs once, so the blocks of stage 0 tell columns and groups of columns apart.
        """
        groups = arrangement[0].reshape(-1, self._width)
        columns = np.arange(arrangement.shape[1]).reshape(groups.shape)
        if self._layout.expert_parallel == 1:
            inner = np.argsort(groups, axis=1)
            groups, columns = np.take_along_axis(groups, inner, 1), np.take_along_axis(columns, inner, 1)
        outer = np.argsort(groups[:, 0])
        if self._blocks.node[groups[outer[0], 0]] != 0:
            return None
        return np.ascontiguousarray(arrangement[:, columns[outer].ravel()])

    def _least_count(self) -> int:
        """A lower bound on the arrangements that differ."""
        _, sizes = np.unique(self._blocks.kind, return_counts=True)
        count = math.factorial(len(self._blocks)) // math.prod(math.factorial(int(n)) for n in sizes)
        renamed = math.factorial(self._copies // self._width)
        if self._layout.expert_parallel == 1:
            renamed *= math.factorial(self._width) ** (self._copies // self._width)
        return count // renamed

    def _every(self) -> Iterator[IntArray | None]:
        """Every arrangement, replicas in ascending order of kinds; None at each dead end (`KindWords`)."""
        kinds, stages = self._blocks.kind, self._layout.pipeline_parallel
        words = KindWords(
            np.bincount(kinds).tolist(),
            stages=stages,
            width=self._width,
            is_sorted=self._layout.expert_parallel == 1,
        )
        members = np.argsort(kinds, kind="stable")
        for word in words:
            if word is None:
                yield None
                continue
            blocks = np.empty_like(members)
            blocks[np.argsort(word, kind="stable")] = members
            yield blocks.reshape(self._copies, stages).T


def _stock(
    layout: Layout, topology: Topology, blocks: Blocks, objective_of: Callable[[Blocks], Objective]
) -> dict[str, tuple[IntArray, float]]:
    """Each stock order with equal or faster blocks at every position, and the seconds of the order itself.

    Tensor-parallel groups of a domain are cut anew, slots of like speed together: the fastest new block takes
    the position of the order's fastest one, so no position gets slower.
    """
    unsorted = blocks_of(topology, size=layout.tensor_parallel, sort=False)
    better = np.arange(len(blocks), dtype=np.int64)
    cells = unsorted.domain * (int(unsorted.node.max()) + 1) + unsorted.node
    for cell in np.unique(cells):
        members = np.flatnonzero(cells == cell)
        better[members[np.argsort(unsorted.slowdown[members], kind="stable")]] = members
    step = objective_of(unsorted)
    arrangements = {name: stock_arrangement(layout, name) for name in STOCK_ORDERS}
    return {name: (better[arrangement], step(arrangement)) for name, arrangement in arrangements.items()}


def _starts(
    layout: Layout, compute_s: FloatArray, blocks: Blocks, stock: Sequence[IntArray]
) -> Iterator[IntArray]:
    """The stock orders, every regular tiling, and the slowest blocks where there is the least to compute.

    Where the nodes of a segment or a domain do not follow one another, tilings and also the stock orders
    are those of nodes that do.
    """
    yield from stock
    together = np.lexsort((blocks.domain, blocks.segment))
    if (np.diff(together) != 1).any():
        yield from (together[arrangement] for arrangement in stock)
    yield from (together[tiling] for tiling in _tilings(layout, blocks))
    order = np.argsort(blocks.slowdown, kind="stable")
    by_work = np.argsort(-compute_s, kind="stable")
    rows = np.empty((layout.pipeline_parallel, len(blocks) // layout.pipeline_parallel), dtype=np.int64)
    rows[by_work] = order.reshape(rows.shape)
    yield np.sort(rows, axis=1)


def _tilings(layout: Layout, blocks: Blocks) -> Iterator[IntArray]:
    """Arrangements where every cell (the blocks of a node in a domain) holds an equal box of the layout."""
    _, sizes = np.unique(np.stack([blocks.node, blocks.domain]), axis=1, return_counts=True)
    if len(set(sizes.tolist())) > 1:
        return
    degrees = (layout.pipeline_parallel, layout.data_parallel, layout.context_parallel)
    numbers = np.indices(degrees)
    for box in _boxes(degrees, int(sizes[0])):
        outer = [axis // size for axis, size in zip(numbers, box, strict=True)]
        inner = [axis % size for axis, size in zip(numbers, box, strict=True)]
        spans = [degree // size for degree, size in zip(degrees, box, strict=True)]
        within = (inner[0] * box[1] + inner[1]) * box[2] + inner[2]
        for axes in itertools.permutations(range(3)):
            cell = np.zeros(degrees, dtype=np.int64)
            for axis in axes:
                cell = cell * spans[axis] + outer[axis]
            yield (cell * math.prod(box) + within).reshape(degrees[0], -1)


def _boxes(degrees: Sequence[int], volume: int) -> Iterator[tuple[int, ...]]:
    """Boxes of `volume` whose sides divide the degrees."""
    sides = [[n for n in range(1, degree + 1) if degree % n == 0] for degree in degrees]
    for box in itertools.product(*sides):
        if math.prod(box) == volume:
            yield box
