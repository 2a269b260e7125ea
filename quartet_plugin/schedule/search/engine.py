"""The search of schedules: named ones, the family, then insertion on the best, then a test under noise.

Work is cut into tasks of compiled, GIL-free kernels that threads run side by side. With a fixed number of
evaluations the tasks, their seeds and their order depend on the arguments alone, so the number of threads
does not matter.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Literal

import numpy as np

from quartet_plugin.errors import ConfigError, InfeasibleError
from quartet_plugin.model.costs import Costs, LayerCost
from quartet_plugin.schedule.compilation import compilation_time
from quartet_plugin.schedule.placement import Placement
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.search.effort import Effort, Rate, num_cores
from quartet_plugin.schedule.search.named_starts import NamedStart, named_schedules
from quartet_plugin.schedule.search.problem import FamilyCandidate, NamedResult, ScheduleProblem, SearchResult
from quartet_plugin.schedule.search.refinement import (
    EVALUATIONS_A_WIDTH,
    NoisyCosts,
    exact_order,
    improve_by_insertion,
    is_small,
    widths_within,
)
from quartet_plugin.schedule.search.space import AUTO, family_starts, placements_for, splits_for
from quartet_plugin.schedule.simulate import simulate_costs
from quartet_plugin.split.entries import Entries

DEFAULT_TIME_LIMIT_S = 10.0
_ROUND_WIDTH = 8
_BATCH = 32
_POOL = 24
_PROOFS = 8
_PER_PLACEMENT = 8
# Parts of the effort after which a phase ends.
_NAMED_UNTIL, _FAMILY_UNTIL, _INSERTION_UNTIL = 0.2, 0.65, 0.93


def search(
    costs: Costs,
    *,
    placement: str | Sequence[int] = AUTO,
    chunks: str | int | None = AUTO,
    split: str | Sequence[int] = AUTO,
    objective: Literal["makespan", "period"] | str = "makespan",
    time_limit_s: float | None = None,
    evaluations: int | None = None,
    seed: int = 0,
    allow_empty: bool = False,
    lower_bound_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Search placement, split and order for `costs`; never worse than the best named schedule.

    `time_limit_s` (10 if neither is given) is for everything but compilation; `evaluations` makes the
    result depend on `seed` alone. The search stops early at `lower_bound_s`, a proven bound on the makespan.
    With the period as the objective, insertion and the exact optimum of small orders, which shorten
    makespans, are left out. Another order replaces a named one only if its mean makespan over 64 paired
    draws of the costs is lower too. Raises ConfigError for impossible arguments and InfeasibleError when
    the memory limit does not hold one microbatch under any split.
    """
    if objective not in ("makespan", "period"):
        raise ConfigError(f"objective: {objective[:40]!r}; expected makespan or period")
    problem = ScheduleProblem.of(
        costs, want_period=objective == "period", allow_empty=allow_empty, free_split=split == AUTO
    )
    shapes = placements_for(costs, placement=placement, chunks=chunks, split=split, allow_empty=allow_empty)
    limit = DEFAULT_TIME_LIMIT_S if time_limit_s is None else time_limit_s
    begin = clock()
    with compilation_time() as compiling:
        compile_kernels()
    effort = Effort(
        clock=clock,
        started_s=begin + compiling(),
        time_limit_s=None if evaluations else limit,
        evaluations=evaluations,
        goal_s=0.0 if problem.want_period else lower_bound_s,
    )
    options = {shape: splits_for(costs, shape, split, allow_empty=allow_empty) for shape in shapes}
    return _run(problem, effort, options, seed)


@cache
def compile_kernels() -> None:
    """Compile all the search runs, or load it from the cache, by searching a tiny pipeline once."""
    layer = LayerCost(name="layer", forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, activation_bytes=1.0)
    costs = Costs(
        num_devices=2,
        num_microbatches=2,
        layers=(layer,) * 5,
        device_slowdown=np.array([1.0, 1.5]),
        transfer_s=np.zeros((2, 2)),
        memory_limit_bytes=None,
        weight_grad_held_fraction=1.0,
        backward_fused_s=None,
    )
    problem = ScheduleProblem.of(costs, want_period=False, allow_empty=False, free_split=True)
    effort = Effort(clock=time.monotonic, started_s=0.0, time_limit_s=None, evaluations=200)
    _run(problem, effort, {(0, 1): [(2, 3)], (0, 1, 1, 0): [(1, 1, 1, 2)]}, 0)


def _run(
    problem: ScheduleProblem, effort: Effort, options: dict[Placement, list[Entries]], seed: int
) -> SearchResult:
    with ThreadPoolExecutor(max_workers=num_cores()) as pool:
        rng = np.random.default_rng(seed)
        return _ScheduleSearch(problem=problem, effort=effort, pool=pool, rng=rng).run(options)


@dataclass(slots=True, kw_only=True)
class _ScheduleSearch:
    """One search: its problem, its budget, and the seconds that its steps have taken so far."""

    problem: ScheduleProblem
    effort: Effort
    pool: ThreadPoolExecutor
    rng: np.random.Generator
    move_rate: Rate = field(default_factory=lambda: Rate(3e-8))
    climb_rate: Rate = field(default_factory=lambda: Rate(1.5e-7))
    insert_rate: Rate = field(default_factory=lambda: Rate(1.5e-7))

    def run(self, options: dict[Placement, list[Entries]]) -> SearchResult:
        """All phases, for every placement with its splits to start from."""
        named = self.named_candidates(options)
        family = self.family_candidates(options, named)
        named = self.with_splits_of(family[:3], named)
        orders = self.insertion(family, named, is_open=len(options) > 1 or self.problem.free_split)
        return self.result(orders, named)

    # Named schedules.

    def named_candidates(self, options: dict[Placement, list[Entries]]) -> list[NamedStart]:
        """Every named schedule under every start split, then layers moved where that is free."""
        costs = self.problem.costs
        schedules = named_schedules(
            list(options), num_devices=costs.num_devices, num_microbatches=costs.num_microbatches
        )
        fresh = [NamedStart(schedule=s, split=split) for s in schedules for split in options[s.placement]]
        scored = self.each([(item, 0) for item in fresh], partial(_climb_named, problem=self.problem))
        best: dict[str, NamedStart] = {}
        for item in scored:
            if math.isfinite(item.score) and item.score < (
                best[item.label].score if item.label in best else math.inf
            ):
                best[item.label] = item
        items = sorted(best.values(), key=lambda item: item.score)
        self.effort.reached(items[0].score if items else math.inf)
        if not self.problem.free_split:
            return [item for item in items if item.fits]
        while items and self.effort.spent < _NAMED_UNTIL:
            # The promising half is climbed twice as often.
            chosen = items if self.rng.random() < 0.5 else items[: (len(items) + 1) // 2]
            moved = self.round(
                chosen, self.move_rate, _NAMED_UNTIL, partial(_climb_named, problem=self.problem)
            )
            if not moved:
                break
            items = sorted([*moved, *items[len(chosen) :]], key=lambda item: item.score)
            self.effort.reached(items[0].score)
        return [item for item in items if item.fits]

    def with_splits_of(self, family: list[FamilyCandidate], named: list[NamedStart]) -> list[NamedStart]:
        """Named schedules under the splits that served the family best, where those are better."""
        if not self.problem.free_split:
            return named
        trials = [
            (replace(item, split=candidate.split), 0)
            for item in named
            for candidate in family
            if item.schedule.placement == candidate.placement and item.split != candidate.split
        ]
        best = {item.label: item for item in named}
        for item in self.each(trials, partial(_climb_named, problem=self.problem)):
            if item.score < best[item.label].score:
                best[item.label] = item
        return sorted(best.values(), key=lambda item: item.score)

    # The family.

    def family_candidates(
        self, options: dict[Placement, list[Entries]], named: list[NamedStart]
    ) -> list[FamilyCandidate]:
        """Structured starts, then hill climbs from the best candidates so far."""
        m = self.problem.costs.num_microbatches
        short = min(m, max(16, 4 * self.problem.costs.num_devices))
        candidates = self.scored_starts(self.ranked_starts(options, named, short), short)
        fraction = _FAMILY_UNTIL if short == m else 0.8 * _FAMILY_UNTIL
        candidates = self.climb_rounds(candidates, short, fraction)
        if short == m or not candidates:
            return candidates
        full = self.each(
            [(p, 0) for p in candidates[:12]],
            partial(_climb_family, problem=self.problem, num_microbatches=m),
        )
        return self.climb_rounds(sorted(full, key=lambda p: p.score), m, _FAMILY_UNTIL)

    def scored_starts(self, candidates: list[FamilyCandidate], m: int) -> list[FamilyCandidate]:
        """Score structured starts, batch by batch, as many as a part of the family's effort allows."""
        done: list[FamilyCandidate] = []
        until = self.effort.spent + 0.3 * max(0.0, _FAMILY_UNTIL - self.effort.spent)
        for first in range(0, len(candidates), _BATCH):
            batch = [(candidate, 0) for candidate in candidates[first : first + _BATCH]]
            done += self.each(batch, partial(_climb_family, problem=self.problem, num_microbatches=m))
            self.effort.used += len(batch)
            if self.effort.spent >= until:
                break
        return _pruned([p for p in done if math.isfinite(p.score)])

    def ranked_starts(
        self, options: dict[Placement, list[Entries]], named: list[NamedStart], num_microbatches: int
    ) -> list[FamilyCandidate]:
        """Every structured start, best guesses first, with the split that served named schedules."""
        devices = self.problem.costs.num_devices
        ranked: list[tuple[int, FamilyCandidate]] = []
        for placement, splits in options.items():
            same = [b.split for b in named if b.schedule.placement == placement]
            chosen = list(dict.fromkeys([*same[:1], *splits]))
            families = family_starts(len(placement) // devices, devices, num_microbatches)
            for k, family in enumerate(families):
                is_full = int(self.problem.fused_pays and k % 5 > 2)
                candidate = FamilyCandidate(
                    placement=placement,
                    split=chosen[k % len(chosen)],
                    params=family.to_vector(),
                    full_backward=np.full(len(placement), is_full, dtype=np.int64),
                )
                ranked.append((k, candidate))
        return [candidate for _, candidate in sorted(ranked, key=lambda pair: pair[0])]

    def climb_rounds(self, candidates: list[FamilyCandidate], m: int, until: float) -> list[FamilyCandidate]:
        """Rounds of climbs from candidates chosen by rank, until `until` of the effort is spent."""
        task = partial(_climb_family, problem=self.problem, num_microbatches=m)
        while candidates and self.effort.spent < until:
            ranks = np.minimum(self.rng.geometric(0.2, size=_ROUND_WIDTH) - 1, len(candidates) - 1).tolist()
            climbed = self.round([candidates[k] for k in ranks], self.climb_rate, until, task, m=m)
            if not climbed:
                break
            # The best child replaces its parent, so that the pool stays as diverse as its starts.
            for k, child in zip(ranks, climbed, strict=True):
                if child.score <= candidates[k].score:
                    candidates[k] = child
            candidates.sort(key=lambda p: p.score)
            if m == self.problem.costs.num_microbatches:
                self.effort.reached(candidates[0].score)
        return candidates

    # Insertion.

    def insertion(
        self, family: list[FamilyCandidate], named: list[NamedStart], *, is_open: bool
    ) -> list[tuple[float, Schedule]]:
        """The best orders of both kinds, improved by insertion; (score in seconds, schedule), best first.

        `is_open`: the placement or the split is free, so that the optimum of one of them proves nothing.
        """
        orders = [self.simulated(p.schedule(self.problem)) for p in family[:6]]
        orders += [(b.score, replace(b.schedule, layers_per_stage=b.split)) for b in named[:2]]
        orders.sort(key=lambda pair: pair[0])
        if self.problem.want_period or not orders:
            return orders
        self.effort.reached(orders[0][0])
        orders = sorted(
            [*self.exact_orders(orders[0][1], is_open=is_open), *orders], key=lambda pair: pair[0]
        )
        current = [schedule for _, schedule in orders[:4]]
        results = list(orders)
        while self.effort.spent < _INSERTION_UNTIL:
            task = partial(improve_by_insertion, problem=self.problem, target=self.effort.goal_s)
            outcome = self.round(current, self.insert_rate, _INSERTION_UNTIL, task)
            if not outcome:
                break
            results = sorted([*results, *(best for best, _ in outcome)], key=lambda pair: pair[0])[:12]
            self.effort.reached(results[0][0])
            current = [last for _, last in outcome]
        return sorted([*results, *orders], key=lambda pair: pair[0])

    def exact_orders(self, schedule: Schedule, *, is_open: bool) -> list[tuple[float, Schedule]]:
        """The optimum of a small order's placement, split and forms of backward, as far as effort allows."""
        if self.effort.spent >= _INSERTION_UNTIL or not is_small(schedule):
            return []
        widths = widths_within(self.effort.evaluations_until(_INSERTION_UNTIL))
        if not widths:
            return []
        seconds = self.effort.seconds_until(_INSERTION_UNTIL)
        exact = exact_order(schedule, self.problem, widths=widths, time_limit_s=seconds)
        self.effort.used += EVALUATIONS_A_WIDTH * widths[-1]
        if exact is None:
            return []
        if exact.proven and not is_open and not self.problem.fused_pays:
            self.effort.goal_s = max(self.effort.goal_s, exact.makespan_s)
            self.effort.reached(exact.makespan_s)
        return [(exact.makespan_s, exact.schedule)]

    def simulated(self, schedule: Schedule) -> tuple[float, Schedule]:
        """A schedule with its score by the simulator, which may run actions earlier than a generator did."""
        result = simulate_costs(schedule, self.problem.costs)
        return (result.period_s if self.problem.want_period else result.makespan_s), schedule

    # The choice.

    def result(self, orders: list[tuple[float, Schedule]], named: list[NamedStart]) -> SearchResult:
        """The best order that also wins under noise, else the best named one."""
        table = tuple(
            NamedResult(
                label=b.label, schedule=replace(b.schedule, layers_per_stage=b.split), score_s=b.score
            )
            for b in named
        )
        if not orders:
            raise InfeasibleError(
                "memory_limit_bytes: no order fits, one microbatch is too much under every split tried; "
                "raise the limit or use more devices"
            )
        chosen = self.best_under_noise(orders, table[0]) if table else orders[0][1]
        return SearchResult(
            schedule=chosen,
            simulation=simulate_costs(chosen, self.problem.costs),
            named_best=table[0] if table else None,
            named=table,
            best_score_s=orders[0][0],
            lower_bound_s=self.effort.goal_s,
            num_evaluations=self.effort.used,
            elapsed_s=self.effort.clock() - self.effort.started_s,
        )

    def best_under_noise(self, orders: list[tuple[float, Schedule]], named: NamedResult) -> Schedule:
        """The first of the distinct best orders that beats `named` plainly and under noise, else `named`."""
        better = [pair for pair in orders if pair[0] < named.score_s * (1 - 1e-9)]
        if not better:
            return named.schedule
        noisy = NoisyCosts.draw(self.problem.costs, self.rng)
        to_beat = noisy.mean_makespan(named.schedule)
        tried: list[float] = []
        for score, schedule in better:
            if any(abs(score - t) <= 1e-12 * t for t in tried):
                continue
            if len(tried) == _PROOFS:
                break
            tried.append(score)
            if noisy.mean_makespan(schedule) < to_beat:
                return schedule
        return named.schedule

    def round[Item: (NamedStart, FamilyCandidate, Schedule), Result](
        self,
        items: Sequence[Item],
        rate: Rate,
        until: float,
        task: Callable[[tuple[Item, int], int], Result],
        *,
        m: int | None = None,
    ) -> list[Result]:
        """Give every item steps by the predicted time of a step, run them, and update that time.

        Empty when `until` of the effort is spent, or a step would take longer than the rest.
        """
        sizes = [_size(item, m or self.problem.costs.num_microbatches) for item in items]
        steps = self.effort.steps(until, [rate.seconds * size for size in sizes])
        if max(steps) == 0:
            return []
        begin = time.perf_counter()
        results = self.each(list(zip(items, steps, strict=True)), task)
        work = sum(size * (n + 1) for size, n in zip(sizes, steps, strict=True))
        rate.seconds = (time.perf_counter() - begin) * min(num_cores(), len(items)) / work
        self.effort.used += sum(steps)
        return results

    def each[Item, Result](self, items: Sequence[Item], task: Callable[[Item, int], Result]) -> list[Result]:
        """Run `task(item, seed)` for all items on all cores; results in the items' order."""
        seeds = self.rng.integers(0, 2**31 - 1, size=len(items)).tolist()
        return list(self.pool.map(task, items, seeds))


def _size(item: NamedStart | FamilyCandidate | Schedule, num_microbatches: int) -> int:
    placement = item.schedule.placement if isinstance(item, NamedStart) else item.placement
    return 3 * len(placement) * num_microbatches


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
