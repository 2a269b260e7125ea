"""Overlapped pairs for the results of a search, where the costs have all-to-all that a pair can hide.

The rounds of the search know no pairs. After each of them the incumbent's neighbours are fused: all at once,
then one pair after the other made or undone where the score does not grow. Named schedules that are known
with pairs are candidates too, and get the same, so the result is never worse than the best of them. How much
is tried depends on the order's size alone: more rounds never give a longer result.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from quartet_plugin.model.costs import IntArray
from quartet_plugin.schedule import kernel
from quartet_plugin.schedule.action import Action, ActionKind, OverlappedPair
from quartet_plugin.schedule.placement import Placement
from quartet_plugin.schedule.schedule import PartArray, Schedule, marked_parts
from quartet_plugin.schedule.search.named_starts import NamedStart, named_schedules
from quartet_plugin.schedule.search.problem import NamedResult, ScheduleProblem, SearchResult
from quartet_plugin.schedule.simulate import flatten, lanes_of, simulate_costs
from quartet_plugin.split.entries import Entries

# Actions of the orders that are run for one schedule's pairs: a fifth of a second or so.
_WORK = 8_000_000
_MAX_TRIES = 4_000
_PERIOD_ROUNDS = np.int64(8)
# Splits of a named schedule that are tried, and named schedules without pairs whose neighbours are fused.
_MAX_SPLITS, _NAMED_FUSED = 16, 2
# An order is only replaced by one that is shorter by more than rounding.
_CLEARLY = 1 - 1e-9


class PairedRounds:
    """The best result with pairs of the rounds so far."""

    def __init__(
        self,
        problem: ScheduleProblem,
        options: Mapping[Placement, Sequence[Entries]],
        *,
        lower_bound_s: float,
        seed: int,
        time_left_s: Callable[[], float],
        on_round: Callable[[SearchResult], None] | None,
    ) -> None:
        """`lower_bound_s` is proven for orders with pairs, too; a search without them may prove more."""
        self._problem, self._bound_s, self._seed = problem, lower_bound_s, seed
        self._time_left_s, self._on_round = time_left_s, on_round
        self._best: tuple[float, Schedule] | None = None
        self._fused: set[tuple[object, ...]] = set()
        self._options = options
        self._named: list[NamedResult] = []
        self._is_started = False

    def take(self, result: SearchResult) -> None:
        """Fuse what a round has reached, and report it."""
        improved = self.finished(result)
        if self._on_round is not None:
            self._on_round(improved)

    def finished(self, result: SearchResult) -> SearchResult:
        """The result, or the best order with pairs where one is shorter."""
        if not self._is_started:
            self._is_started = True
            self._named = list(self._named_results())
        plain = [each.schedule for each in result.named[:_NAMED_FUSED]]
        paired = [each.schedule for each in self._named[:_NAMED_FUSED]]
        for schedule in (*paired, result.schedule, *plain):
            self._consider(schedule)
        named = tuple(sorted([*result.named, *self._named], key=lambda each: each.score_s))
        improved = replace(
            result, named=named, named_best=named[0] if named else None, lower_bound_s=self._bound_s
        )
        reached = self._score(result.schedule)
        if self._best is None or self._best[0] >= reached * _CLEARLY:
            return improved
        score, schedule = self._best
        return replace(
            improved,
            schedule=schedule,
            simulation=simulate_costs(schedule, self._problem.costs),
            best_score_s=min(score, result.best_score_s),
        )

    def _named_results(self) -> Iterator[NamedResult]:
        """Named schedules with pairs under the splits that the search may take, the best split of each."""
        bests: list[NamedResult] = []
        costs = self._problem.costs
        schedules = named_schedules(
            list(self._options),
            num_devices=costs.num_devices,
            num_microbatches=costs.num_microbatches,
            with_pairs=True,
        )
        for schedule in schedules:
            splits = self._options[schedule.placement][:_MAX_SPLITS]
            label = f"{NamedStart(schedule=schedule, split=()).label} with pairs"
            results = [
                NamedResult(label=label, schedule=order, score_s=self._score(order))
                for order in (replace(schedule, layers_per_stage=split) for split in splits)
            ]
            bests += sorted(results, key=lambda each: each.score_s)[:1]
        yield from sorted(
            (each for each in bests if np.isfinite(each.score_s)), key=lambda each: each.score_s
        )

    def _consider(self, schedule: Schedule) -> None:
        """Keep the schedule, or what fusing makes of it, where it is the shortest so far."""
        rows = (*schedule.orders, *schedule.pairs)
        key = (schedule.placement, schedule.layers_per_stage, *(row.tobytes() for row in rows))
        if key in self._fused:
            return
        self._fused.add(key)
        score, fused = fuse(schedule, self._problem, seed=self._seed, time_left_s=self._time_left_s)
        if self._best is None or score < self._best[0] * _CLEARLY:
            self._best = (score, fused)

    def _score(self, schedule: Schedule) -> float:
        return _Order(schedule, self._problem).score()


def fuse(
    schedule: Schedule,
    problem: ScheduleProblem,
    *,
    seed: int,
    time_left_s: Callable[[], float] = lambda: np.inf,
) -> tuple[float, Schedule]:
    """The shortest order that fusing neighbours has led to, with its score in seconds; or the same schedule.

    Only neighbours whose pair hides something are fused. It ends early where no time is left.
    """
    order = _Order(schedule, problem)
    start = order.codes.copy(), order.parts.copy()
    score = order.score()
    best_s, best = score, start
    for starts_forward in (None, True, False):
        order.codes[:], order.parts[:] = start
        order.fuse_all(starts_forward=starts_forward)
        trial_s = order.score()
        if trial_s < best_s * _CLEARLY:
            best_s, best = trial_s, (order.codes.copy(), order.parts.copy())
    order.codes[:], order.parts[:] = best
    score = best_s
    rng = np.random.default_rng([seed, 2])
    total = len(order.codes)
    tries = min(_MAX_TRIES, _WORK // max(1, total))
    once = [int(place) for place in order.from_the_beginning[:tries]]
    for place in (*once, *(int(rng.integers(total)) for _ in range(tries - len(once)))):
        if time_left_s() <= 0:
            break
        undo = order.toggle(place)
        if undo is None:
            continue
        trial_s = order.score()
        if trial_s > score:
            order.codes[place : place + 2], order.parts[place : place + 2] = undo
            continue
        score = trial_s
        if trial_s < best_s * _CLEARLY:
            best_s, best = trial_s, (order.codes.copy(), order.parts.copy())
    if best is start:
        return best_s, schedule
    return best_s, order.schedule_of(*best)


class _Order:
    """The actions of all devices in arrays that pairs are made and undone in.

    `codes` and `parts` are flat, as the kernels take them.
    """

    def __init__(self, schedule: Schedule, problem: ScheduleProblem) -> None:
        assert schedule.layers_per_stage is not None
        costs = problem.stage_costs(schedule.placement, schedule.layers_per_stage)
        self._schedule, self._problem = schedule, problem
        self._lanes = lanes_of(schedule, costs)
        self.codes, self._offsets = flatten(schedule)
        marked = marked_parts(schedule)
        self.parts = marked if len(marked) else np.zeros(len(self.codes), dtype=np.uint8)
        self._ends = set(self._offsets[1:].tolist())
        # Of a forward its seconds and those of its exchange by stage; of a backward by kind and stage.
        self._seconds: list[list[float]] = self._lanes.cost_s.tolist()
        self._exchange_s: list[list[float]] = self._lanes.exchange_s.tolist()

    @property
    def from_the_beginning(self) -> IntArray:
        """All places, by their distance from the beginning of their device's order."""
        lengths = np.diff(self._offsets)
        within = np.arange(len(self.codes)) - np.repeat(self._offsets[:-1], lengths)
        return np.argsort(within, kind="stable")

    def score(self) -> float:
        """The makespan or the period in seconds; inf for what deadlocks or does not fit."""
        problem, lanes = self._problem, self._lanes
        codes, offsets, parts = self.codes, self._offsets, self.parts
        peak = np.zeros(len(offsets) - 1)
        if kernel.check_memory(codes, offsets, lanes, problem.limit_bytes, peak)[0] >= 0:
            return np.inf
        ran, _, end, sequence = kernel.run_orders(codes, offsets, parts, lanes)
        if ran < len(codes):
            return np.inf
        if problem.has_period_objective:
            return float(kernel.steady_period(codes, offsets, parts, sequence, lanes, _PERIOD_ROUNDS))
        return float(end.max())

    def fuse_all(self, *, starts_forward: bool | None) -> None:
        """Make pairs of neighbours from the left: of all, or of those that start with F, or that do not."""
        place = 0
        while place < len(self.codes):
            is_forward = bool(self.codes[place] & 3 == ActionKind.F)
            is_wanted = starts_forward in (None, is_forward) and not self.parts[place]
            place += 2 if is_wanted and self.toggle(place) is not None else 1

    def toggle(self, place: int) -> tuple[IntArray, PartArray] | None:
        """Undo the pair that begins at `place`, or make one of the two actions there.

        What the arrays had there before, or None where neither is possible.
        """
        two = slice(place, place + 2)
        if place + 1 >= len(self.codes) or place + 1 in self._ends or self.parts[place] == 2:
            return None
        before = self.codes[two].copy(), self.parts[two].copy()
        if self.parts[place] == 1:
            self.parts[two] = 0
            return before
        forward, backward = sorted(before[0].tolist(), key=lambda code: code & 3)
        if self.parts[place + 1] or not self._hides(forward, backward):
            return None
        self.codes[two] = forward, backward
        self.parts[two] = 1, 2
        return before

    def _hides(self, forward: int, backward: int) -> bool:
        """Whether two actions may be a pair, and one that is shorter than they are."""
        m = self._schedule.num_microbatches
        if OverlappedPair(Action.decode(forward, m), Action.decode(backward, m)).fault is not None:
            return False
        ahead, back = (forward >> 2) // m, (backward >> 2) // m
        hidden = kernel.hidden_s(
            self._seconds[ActionKind.F][ahead],
            self._exchange_s[0][ahead],
            self._seconds[backward & 3][back],
            self._exchange_s[1][back],
        )
        return hidden > 0

    def schedule_of(self, codes: IntArray, parts: PartArray) -> Schedule:
        """The schedule with these actions and pairs."""
        pairs = tuple(np.flatnonzero(row == 1) for row in np.split(parts, self._offsets[1:-1]))
        return replace(
            self._schedule,
            orders=tuple(np.split(codes, self._offsets[1:-1])),
            pairs=pairs if any(map(len, pairs)) else (),
            origin={**self._schedule.origin, "inserted": True},
        )
