"""The search of schedules, in rounds: named schedules, the family, insertion, then a test under noise.

Rounds grow; the sequence of all rounds depends on the problem and the seed alone, not on the number of
threads, the clock or the budget. The result is the incumbent after the last whole round, and an incumbent is
only replaced by an order that is shorter: more evaluations or more seconds never make the result worse.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Literal

import numpy as np

from quartet_plugin.errors import ConfigError, InfeasibleError
from quartet_plugin.model.costs import Costs
from quartet_plugin.schedule.compilation import compilation_time
from quartet_plugin.schedule.placement import Placement
from quartet_plugin.schedule.search.effort import (
    FIRST_ROUND,
    GROWTH,
    Effort,
    OutOfTimeError,
    num_cores,
    stop_check,
)
from quartet_plugin.schedule.search.limits import FREE, FamilyLimits
from quartet_plugin.schedule.search.named_starts import NamedStart
from quartet_plugin.schedule.search.pairing import PairedRounds
from quartet_plugin.schedule.search.pools import (
    MOVES_AN_EVALUATION,
    FamilyPool,
    NamedPool,
    OrderPool,
    ScoredOrder,
    TaskPool,
    ranked_starts,
)
from quartet_plugin.schedule.search.problem import NamedResult, ScheduleProblem, SearchResult
from quartet_plugin.schedule.search.refinement import NoisyCosts
from quartet_plugin.schedule.search.space import AUTO, placements_for, splits_for
from quartet_plugin.schedule.simulate import simulate_costs
from quartet_plugin.split.entries import Entries

# The work of a search without a limit, in actions of evaluated orders: 5 to 10 s on two idle cores.
_DEFAULT_WORK = 8_000_000
_MAX_DEFAULT_EVALUATIONS = 10_000
_PROOFS = 8
_PROMOTED = 12
_FIRST_STARTS = 32
# Parts of a round's work.
_NAMED_SHARE, _INSERTION_SHARE = 0.1, 0.35

OnRound = Callable[[SearchResult], None]


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
    limits: FamilyLimits = FREE,
    clock: Callable[[], float] = time.monotonic,
    on_round: OnRound | None = None,
) -> SearchResult:
    """Search placement, split and order for `costs`; never worse than the best named schedule.

    `evaluations` (`default_evaluations` if no limit is given) are the work: the result depends on them and
    `seed` alone, however busy the machine is. `time_limit_s`, for everything but compilation, only cuts it
    off, between tasks of a tenth of a second, with `is_cut` in the result; named schedules are scored
    whatever it is. More of either never gives a worse result. The search stops early at
    `lower_bound_s`, a proven bound on the makespan. `on_round` is called with the result so far. What
    `effort.stopped_by` raises ends the search without a result.
    With the period as the objective, insertion and the exact optimum of small orders, which shorten
    makespans, are left out. Another order replaces the best named one of its round only if its mean
    makespan over 64 paired draws of the costs is lower too. Where the costs have all-to-all, neighbours of
    the result become overlapped pairs if that makes it shorter (`pairing`). `limits` restrict the family's
    parameters. Raises ConfigError for impossible
    arguments and InfeasibleError when the memory limit does not hold one microbatch under any split.
    """
    if objective not in ("makespan", "period"):
        raise ConfigError(f"objective: {objective[:40]!r}; expected makespan or period")
    problem = ScheduleProblem.of(
        costs,
        has_period_objective=objective == "period",
        allow_empty=allow_empty,
        has_free_split=split == AUTO,
        limits=limits,
    )
    shapes = placements_for(costs, placement=placement, chunks=chunks, split=split, allow_empty=allow_empty)
    if evaluations is None and time_limit_s is None:
        evaluations = default_evaluations(costs)
    begin = clock()
    with compilation_time() as compiling:
        effort = Effort(
            clock=clock,
            started_s=begin,
            time_limit_s=time_limit_s,
            evaluations=evaluations,
            compiling=compiling,
            check_stop=stop_check(),
            goal_s=0.0 if problem.has_period_objective else lower_bound_s,
        )
        options = {shape: splits_for(costs, shape, split, allow_empty=allow_empty) for shape in shapes}
        if costs.exchange_s is None:
            return _run(problem, effort, options, seed, on_round)
        paired = PairedRounds(
            problem,
            options,
            lower_bound_s=effort.goal_s,
            seed=seed,
            time_left_s=lambda: effort.left_s,
            on_round=on_round,
        )
        return paired.finished(_run(problem, effort, options, seed, paired.take))


def default_evaluations(costs: Costs) -> int:
    """The evaluations of a search that no limit is given: fewer where orders are long."""
    typical = 3 * 2 * costs.num_devices * costs.num_microbatches
    return max(1, min(_MAX_DEFAULT_EVALUATIONS, _DEFAULT_WORK // typical))


def _run(
    problem: ScheduleProblem,
    effort: Effort,
    options: dict[Placement, list[Entries]],
    seed: int,
    on_round: OnRound | None = None,
) -> SearchResult:
    with ThreadPoolExecutor(max_workers=num_cores()) as threads:
        tasks = TaskPool(problem=problem, effort=effort, threads=threads, rng=np.random.default_rng(seed))
        return _ScheduleSearch(tasks, options, noise=np.random.default_rng([seed, 1])).run(on_round)


class _ScheduleSearch:
    """One search: what it improves, and the incumbent that its rounds have led to."""

    def __init__(
        self, tasks: TaskPool, options: dict[Placement, list[Entries]], *, noise: np.random.Generator
    ) -> None:
        self._tasks = tasks
        self._options = options
        problem, m = tasks.problem, tasks.problem.costs.num_microbatches
        self._noise = noise
        self._named_share = _NAMED_SHARE if problem.has_free_split else 0.0
        self._draws: NoisyCosts | None = None
        self._to_beat: tuple[NamedStart, float] | None = None  # the best named one, its mean under noise
        self._named = NamedPool(tasks=tasks, options=options)
        short = min(m, max(16, 4 * problem.costs.num_devices))
        self._family = FamilyPool(tasks=tasks, num_microbatches=m)
        # Long pipelines are climbed with few microbatches first; the best candidates go on with all.
        self._short = FamilyPool(tasks=tasks, num_microbatches=short) if short < m else None
        self._promoted: set[tuple[float, Entries]] = set()
        self._orders = OrderPool(tasks=tasks, is_open=len(options) > 1 or problem.has_free_split)
        self._incumbent: ScoredOrder | None = None

    def run(self, on_round: OnRound | None) -> SearchResult:
        """All rounds that the budget allows."""
        with suppress(OutOfTimeError):
            self._improve(on_round)
        return self._finished()

    def _improve(self, on_round: OnRound | None) -> None:
        """Run the start and the rounds. Raises OutOfTimeError where the time ends in the middle of either."""
        effort = self._tasks.effort
        evaluations = FIRST_ROUND
        self._start()
        self._report(on_round)
        # Moves of layers under a fixed order are cheap: a round has more of them for its part of the work.
        steps = 1.0 + self._named_share * (MOVES_AN_EVALUATION - 1)
        while effort.allows(evaluations * steps):
            self._round(evaluations)
            self._accept()
            self._report(on_round)
            evaluations *= GROWTH

    def _report(self, on_round: OnRound | None) -> None:
        if on_round is not None and self._incumbent is not None:
            on_round(self._finished())

    def _start(self) -> None:
        """Score named schedules and the first starts of the family, whatever the evaluations.

        Without a named schedule that fits, the time limit does not count either.
        """
        self._named.start()
        self._replace([(item.score, item.order) for item in self._named.fitting[:1]])
        pool = self._short or self._family
        pool.starts = ranked_starts(self._tasks.problem, self._options, self._named.items)
        fresh, pool.starts = pool.starts[:_FIRST_STARTS], pool.starts[_FIRST_STARTS:]
        pool.add(fresh)
        self._collect()
        self._accept()

    def _round(self, evaluations: float) -> None:
        """Run one round, which gives each kind of work a part of its evaluations."""
        problem = self._tasks.problem
        named = self._named_share
        insertion = (
            0.0 if problem.has_period_objective or problem.limits.is_family_alone else _INSERTION_SHARE
        )
        family = 1.0 - named - insertion
        best = [(item.placement, item.split) for item in self._family.items[:3]]
        self._named.improve(named * evaluations, best)
        if self._short is not None:
            self._short.improve(0.8 * family * evaluations)
            self._promote(max(1, int(0.05 * family * evaluations)))
            family *= 0.2
        self._family.improve(family * evaluations)
        self._collect()
        if insertion > 0.0:
            self._orders.improve(insertion * evaluations)

    def _promote(self, num_candidates: int) -> None:
        """Score the best candidates of short pipelines, at most `num_candidates`, with all microbatches."""
        assert self._short is not None
        fresh = [x for x in self._short.items[:_PROMOTED] if (x.score, x.split) not in self._promoted]
        self._promoted |= {(x.score, x.split) for x in fresh[:num_candidates]}
        self._family.add(fresh[:num_candidates])

    def _collect(self) -> None:
        """Take the best candidates' orders."""
        if self._short is not None and not self._family.items:
            self._promote(_PROMOTED)
        self._orders.add(self._family.items[:6], self._named.fitting[:2])

    def _accept(self) -> None:
        """Make the shortest order the incumbent that also beats the best named one under noise."""
        fitting = self._named.fitting
        if not fitting:
            self._replace(self._orders.items[:1])
            return
        named = fitting[0]
        self._replace([(named.score, named.order)])
        assert self._incumbent is not None
        better = [pair for pair in self._orders.items if pair[0] < self._incumbent[0] * (1 - 1e-9)]
        if not better:
            return
        if self._draws is None:
            self._draws = NoisyCosts.draw(self._tasks.problem.costs, self._noise)
        if self._to_beat is None or self._to_beat[0] is not named:
            self._to_beat = named, self._draws.mean_makespan(named.order)
        for pair in better[:_PROOFS]:
            self._tasks.effort.check()
            if self._draws.mean_makespan(pair[1]) < self._to_beat[1]:
                self._replace([pair])
                return

    def _replace(self, orders: Sequence[ScoredOrder]) -> None:
        for order in orders:
            if self._incumbent is None or order[0] < self._incumbent[0]:
                self._incumbent = order
                self._tasks.effort.has_result = True

    def _finished(self) -> SearchResult:
        """The incumbent, with what it is compared to."""
        effort, costs = self._tasks.effort, self._tasks.problem.costs
        if self._incumbent is None:
            raise InfeasibleError(
                "memory_limit_bytes: no order fits: one microbatch exceeds it under every split tried; "
                "raise the limit or use more devices"
            )
        table = tuple(
            NamedResult(label=item.label, schedule=item.order, score_s=item.score)
            for item in self._named.fitting
        )
        score, schedule = self._incumbent
        return SearchResult(
            schedule=schedule,
            simulation=simulate_costs(schedule, costs),
            named_best=table[0] if table else None,
            named=table,
            best_score_s=min([score, *(pair[0] for pair in self._orders.items[:1])]),
            lower_bound_s=effort.goal_s,
            num_evaluations=effort.used,
            elapsed_s=effort.elapsed_s,
            is_cut=effort.is_cut,
        )
