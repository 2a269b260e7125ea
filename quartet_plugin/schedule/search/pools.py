"""What a schedule search improves, round by round: named schedules, candidates of the family, whole orders.

A task is a compiled kernel that releases the GIL; tasks of a batch run side by side. What a round does
depends on the problem, the seed and the rounds before alone.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.placement import Placement
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.search.effort import Effort
from quartet_plugin.schedule.search.named_starts import NamedStart, named_schedules
from quartet_plugin.schedule.search.problem import FamilyCandidate, ScheduleProblem
from quartet_plugin.schedule.search.refinement import (
    EVALUATIONS_A_WIDTH,
    WIDTHS,
    exact_order,
    improve_by_insertion,
    is_small,
)
from quartet_plugin.schedule.search.space import family_starts
from quartet_plugin.schedule.simulate import simulate_costs
from quartet_plugin.split.entries import Entries

_BATCH_WIDTH = 8
_MAX_STEPS = 200
_MAX_TASK_S = 0.08
_POOL = 24
_PER_PLACEMENT = 8
_KEPT_ORDERS = 12
_NUM_WALKS = 4
# Nominal seconds of a step for each action of the order: a move of layers under a fixed order, an order of
# the family, a move of an action. They only set how many steps a task has.
_MOVE_S, _FAMILY_S, _INSERTION_S = 3e-8, 1.5e-7, 1.5e-7
MOVES_AN_EVALUATION = round(_FAMILY_S / _MOVE_S)

ScoredOrder = tuple[float, Schedule]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPool:
    """The threads, the random numbers and the budget of a search."""

    problem: ScheduleProblem
    effort: Effort
    threads: ThreadPoolExecutor
    rng: np.random.Generator

    def each[Item, Result](self, items: Sequence[Item], task: Callable[[Item, int], Result]) -> list[Result]:
        """Run `task(item, seed)` for all items on all cores; results in the items' order.

        Raises OutOfTimeError between tasks once the time limit has passed; no further one is begun.
        """
        seeds = self.rng.integers(0, 2**31 - 1, size=len(items)).tolist()
        futures = [self.threads.submit(task, item, seed) for item, seed in zip(items, seeds, strict=True)]
        results: list[Result] = []
        try:
            for future in futures:
                self.effort.check()
                results.append(future.result())
        finally:
            for future in futures:
                future.cancel()
        return results

    def batches(self, evaluations: float, *, num_actions: int, step_s: float) -> Iterator[int]:
        """The number of steps of each task, batch after batch, for the work of `evaluations` typical orders.

        `num_actions` is the number of actions of an order, `step_s` the nominal seconds of a step for each of
        them. Raises OutOfTimeError before a batch that would begin after the time limit.
        """
        typical = self.num_actions(2 * self.problem.costs.num_devices)
        steps = evaluations * typical * _FAMILY_S / (num_actions * step_s) / _BATCH_WIDTH
        most = max(1.0, min(_MAX_STEPS, _MAX_TASK_S / (num_actions * step_s)))
        number = math.ceil(steps / most)
        for index in range(number):
            count = round(steps * (index + 1) / number) - round(steps * index / number)
            if count > 0:
                self.effort.check()
                yield count

    def num_actions(self, num_stages: int) -> int:
        """The number of actions of an order of `num_stages` stages whose backwards are split."""
        return 3 * num_stages * self.problem.costs.num_microbatches

    def by_rank[Item](self, items: Sequence[Item], width: int = _BATCH_WIDTH) -> list[int]:
        """Indices of `width` items, the first ones the likeliest."""
        return np.minimum(self.rng.geometric(0.2, size=width) - 1, len(items) - 1).tolist()  # type: ignore[no-any-return]


@dataclass(slots=True, kw_only=True)
class NamedPool:
    """Named schedules, each under the best split so far, best first."""

    tasks: TaskPool
    options: dict[Placement, list[Entries]]
    items: list[NamedStart] = field(default_factory=list)
    _tried: set[tuple[Placement, Entries]] = field(default_factory=set)

    def start(self) -> None:
        """Score every named schedule under every split to start from; none where the family stands alone."""
        costs = self.tasks.problem.costs
        if self.tasks.problem.limits.is_family_alone:
            return
        schedules = named_schedules(
            list(self.options), num_devices=costs.num_devices, num_microbatches=costs.num_microbatches
        )
        fresh = [
            NamedStart(schedule=schedule, split=split)
            for schedule in schedules
            for split in self.options[schedule.placement]
        ]
        self._merge(self._climbed([(item, 0) for item in fresh]))

    @property
    def fitting(self) -> list[NamedStart]:
        """The schedules that run and fit the memory limit."""
        return [item for item in self.items if item.fits]

    def improve(self, evaluations: float, splits: Sequence[tuple[Placement, Entries]]) -> None:
        """Move layers at random, and try `splits` that served other schedules."""
        if not self.tasks.problem.has_free_split or not self.items:
            return
        fresh = [place for place in dict.fromkeys(splits) if place not in self._tried]
        self._tried.update(fresh)
        tries = [
            (replace(item, split=split), 0)
            for item in self.items
            for placement, split in fresh
            if item.schedule.placement == placement
        ]
        self._merge(self._climbed(tries))
        num_actions = max(self.tasks.num_actions(item.schedule.num_stages) for item in self.items)
        for steps in self.tasks.batches(evaluations, num_actions=num_actions, step_s=_MOVE_S):
            chosen = [self.items[index] for index in dict.fromkeys(self.tasks.by_rank(self.items))]
            self._merge(self._climbed([(item, steps) for item in chosen]))
            self.tasks.effort.used += steps * len(chosen)

    def _climbed(self, starts: list[tuple[NamedStart, int]]) -> list[NamedStart]:
        return self.tasks.each(starts, partial(_climb_named, problem=self.tasks.problem))

    def _merge(self, items: list[NamedStart]) -> None:
        best = {item.label: item for item in self.items}
        for item in items:
            known = best.get(item.label)
            if math.isfinite(item.score) and (known is None or item.score < known.score):
                best[item.label] = item
        self.items = sorted(best.values(), key=lambda item: item.score)


@dataclass(slots=True, kw_only=True)
class FamilyPool:
    """Candidates of the family at `num_microbatches`, best first, and the structured starts not tried yet."""

    tasks: TaskPool
    num_microbatches: int
    starts: list[FamilyCandidate] = field(default_factory=list)
    items: list[FamilyCandidate] = field(default_factory=list)

    def improve(self, evaluations: float) -> None:
        """Try some of the starts that are left, then climb from candidates chosen by rank."""
        count = max(1, min(len(self.starts), int(0.3 * evaluations)))
        fresh, self.starts = self.starts[:count], self.starts[count:]
        self.add(fresh)
        if not self.items:
            return
        rest = evaluations - len(fresh)
        scale = self.num_microbatches / self.tasks.problem.costs.num_microbatches
        num_actions = max(1, int(scale * self.tasks.num_actions(max(len(x.placement) for x in self.items))))
        for steps in self.tasks.batches(rest, num_actions=num_actions, step_s=_FAMILY_S):
            ranks = self.tasks.by_rank(self.items)
            climbed = self._climbed([(self.items[rank], steps) for rank in ranks])
            self.tasks.effort.used += steps * len(ranks)
            # The best child replaces its parent, so that the pool stays as diverse as its starts.
            for rank, child in zip(ranks, climbed, strict=True):
                if child.score <= self.items[rank].score:
                    self.items[rank] = child
            self.items.sort(key=lambda item: item.score)

    def add(self, candidates: Sequence[FamilyCandidate]) -> None:
        """Score candidates and keep the best of all."""
        scored = self._climbed([(candidate, 0) for candidate in candidates])
        self.tasks.effort.used += len(scored)
        self.items = _pruned([*self.items, *(item for item in scored if math.isfinite(item.score))])

    def _climbed(self, starts: list[tuple[FamilyCandidate, int]]) -> list[FamilyCandidate]:
        task = partial(_climb_family, problem=self.tasks.problem, num_microbatches=self.num_microbatches)
        return self.tasks.each(starts, task)


def ranked_starts(
    problem: ScheduleProblem, options: dict[Placement, list[Entries]], named: list[NamedStart]
) -> list[FamilyCandidate]:
    """Every structured start, best guesses first, with the split that served named schedules."""
    devices = problem.costs.num_devices
    ranked: list[tuple[int, FamilyCandidate]] = []
    for placement, splits in options.items():
        same = [item.split for item in named if item.schedule.placement == placement]
        chosen = list(dict.fromkeys([*same[:1], *splits]))
        families = family_starts(len(placement) // devices, devices, problem.costs.num_microbatches)
        for k, family in enumerate(families):
            is_full = int(problem.fused_pays and k % 5 > 2)
            candidate = FamilyCandidate(
                placement=placement,
                split=chosen[k % len(chosen)],
                params=problem.limits.within(family, k).to_vector(),
                full_backward=np.full(len(placement), is_full, dtype=np.int64),
            )
            ranked.append((k, candidate))
    return [candidate for _, candidate in sorted(ranked, key=lambda pair: pair[0])]


@dataclass(slots=True, kw_only=True)
class _Walk:
    """A local search on an order: where it stands, and the best makespan that it has seen."""

    best_s: float
    schedule: Schedule


@dataclass(slots=True, kw_only=True)
class OrderPool:
    """Whole orders with their scores in seconds, best first, and the walks that improve some of them.

    `is_open`: the placement or the split is free, so that the optimum of one of them proves nothing.
    """

    tasks: TaskPool
    is_open: bool
    items: list[ScoredOrder] = field(default_factory=list)
    _walks: list[_Walk] = field(default_factory=list)
    _seen: set[tuple[object, ...]] = field(default_factory=set)
    _num_widths: int = 0

    def add(self, candidates: Sequence[FamilyCandidate], named: Sequence[NamedStart]) -> None:
        """Take the orders of candidates and of named schedules; a walk goes on from the best new ones."""
        fresh = [
            self._simulated(candidate.schedule(self.tasks.problem))
            for candidate in candidates
            if self._is_new(candidate)
        ]
        fresh += [(item.score, item.order) for item in named if self._is_new(item)]
        self._keep(fresh)
        for score, schedule in sorted(fresh, key=lambda pair: pair[0]):
            if len(self._walks) < _NUM_WALKS:
                self._walks.append(_Walk(best_s=score, schedule=schedule))
                continue
            worst = max(self._walks, key=lambda walk: walk.best_s)
            if score < worst.best_s:
                worst.best_s, worst.schedule = score, schedule

    def improve(self, evaluations: float) -> None:
        """Move actions on the critical paths of the walks' orders; small orders also by branch and bound."""
        if not self.items:
            return
        self._try_exact()
        num_actions = max(self.tasks.num_actions(walk.schedule.num_stages) for walk in self._walks)
        for steps in self.tasks.batches(
            evaluations * _BATCH_WIDTH / len(self._walks), num_actions=num_actions, step_s=_INSERTION_S
        ):
            if self.tasks.effort.is_met:
                return
            task = partial(improve_by_insertion, problem=self.tasks.problem, target=self.tasks.effort.goal_s)
            outcome = self.tasks.each([(walk.schedule, steps) for walk in self._walks], task)
            self.tasks.effort.used += steps * len(self._walks)
            for walk, (best, last) in zip(self._walks, outcome, strict=True):
                walk.best_s, walk.schedule = min(walk.best_s, best[0]), last
            self._keep([best for best, _ in outcome])

    def _try_exact(self) -> None:
        """Search the optimum of the best order's placement, split and forms of backward.

        A pass waits until it costs no more than the search has done so far.
        """
        schedule = self.items[0][1]
        if self._num_widths == len(WIDTHS) or not is_small(schedule):
            return
        width = WIDTHS[self._num_widths]
        cost = EVALUATIONS_A_WIDTH * width
        effort = self.tasks.effort
        if cost > effort.used:
            return
        self._num_widths += 1
        exact = exact_order(
            schedule, self.tasks.problem, widths=(width,), time_limit_s=max(0.0, effort.left_s)
        )
        effort.used += cost
        effort.check()
        if exact is None:
            return
        # An order with full backwards is the best among those with the same ones alone.
        is_split = not any((order & 3 == ActionKind.B).any() for order in schedule.orders)
        if exact.proven and is_split and not self.is_open and not self.tasks.problem.fused_pays:
            effort.goal_s = max(effort.goal_s, exact.makespan_s)
        self._keep([(exact.makespan_s, exact.schedule)])

    def _keep(self, orders: Sequence[ScoredOrder]) -> None:
        known = {score for score, _ in self.items}
        new = [pair for pair in orders if pair[0] not in known]
        self.items = sorted([*self.items, *new], key=lambda pair: pair[0])[:_KEPT_ORDERS]
        if self.items:
            self.tasks.effort.reached(self.items[0][0])

    def _simulated(self, schedule: Schedule) -> ScoredOrder:
        """A schedule with its score by the simulator, which may run actions earlier than a generator did."""
        result = simulate_costs(schedule, self.tasks.problem.costs)
        return (result.period_s if self.tasks.problem.has_period_objective else result.makespan_s), schedule

    def _is_new(self, candidate: FamilyCandidate | NamedStart) -> bool:
        if isinstance(candidate, NamedStart):
            key: tuple[object, ...] = (candidate.label, candidate.split)
        else:
            backward = candidate.full_backward.tobytes()
            key = (candidate.placement, candidate.split, candidate.params.tobytes(), backward)
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new


def _climb_named(start: tuple[NamedStart, int], seed: int, *, problem: ScheduleProblem) -> NamedStart:
    return start[0].climb(problem, steps=start[1], seed=seed)


def _climb_family(
    start: tuple[FamilyCandidate, int], seed: int, *, problem: ScheduleProblem, num_microbatches: int
) -> FamilyCandidate:
    candidate, steps = start
    return candidate.climb(problem, num_microbatches=num_microbatches, steps=steps, target=0.0, seed=seed)


def _pruned(candidates: list[FamilyCandidate]) -> list[FamilyCandidate]:
    """The best distinct candidates, at most a few of each placement."""
    kept: list[FamilyCandidate] = []
    count: dict[Placement, int] = {}
    seen: set[tuple[float, bytes, Entries]] = set()
    for candidate in sorted(candidates, key=lambda p: p.score):
        key = (candidate.score, candidate.params.tobytes(), candidate.split)
        if key in seen or count.get(candidate.placement, 0) >= _PER_PLACEMENT:
            continue
        seen.add(key)
        count[candidate.placement] = count.get(candidate.placement, 0) + 1
        kept.append(candidate)
        if len(kept) == _POOL:
            break
    return kept
