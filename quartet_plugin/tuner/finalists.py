"""The rules of the final rounds: who takes part, the order in a round, and what beats the baseline.

A study's best value is partly luck. Each round launches every candidate and the baseline once, in a random
order, so that slow drift of the machine meets all alike; only the ratio inside a round counts.
`sequential_test` decides after each round who takes part in the next.
"""

import math
import random
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from quartet_plugin.model.canonical import derived_seed
from quartet_plugin.model.measurement import Comparison, Interval, Measurement, Objective
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial, Score, score, score_of_median
from quartet_plugin.trial.request import Outcome, TrialResult
from quartet_plugin.tuner.config import MAX_EXTENDED
from quartet_plugin.tuner.sequential_test import BASELINE as BASELINE
from quartet_plugin.tuner.sequential_test import (
    FIRST_LOOK,
    Effects,
    SequentialTest,
    fit,
    replayed,
)
from quartet_plugin.tuner.winner_choice import (
    CLEAR_CHANCE,
    CLEAR_GAIN,
    NUM_RESAMPLES,
    FinalistResult,
    departure,
    in_order_of_choice,
)

# A candidate this much below the baseline when it was searched is not measured again: between two runs
# of one plan lie a few percent.
CANDIDATE_MARGIN = 0.93
# No final round has a larger number.
MAX_ROUND = 10**6
# That of the interval of a speedup.
CONFIDENCE = 0.95


def candidates(
    trials: Sequence[FinishedTrial],
    *,
    baseline_value: float,
    posterior_means: Mapping[int, float] | None = None,
) -> list[FinishedTrial]:
    """The measured plans, the best first, each once and without the baseline; none clearly slower.

    A trial that was cut short, since it was clearly slower than the best plan then, is none of them.

    `posterior_means` are objectives by trial number that order the plans: the trial's own launch may have
    been lucky.
    """
    means = posterior_means or {}

    def value(trial: FinishedTrial) -> float:
        return means.get(trial.number, trial.record.value or 0.0)

    baseline = next((trial.plan.execution for trial in trials if trial.number == BASELINE), None)
    best: dict[str, FinishedTrial] = {}
    for trial in trials:
        record = trial.record
        is_first = record.verdict == "measured" and record.repeats is None
        is_fast = record.value is not None and record.value >= CANDIDATE_MARGIN * baseline_value
        is_whole = not (record.is_depth_proxy or record.is_cut)
        if is_first and is_whole and is_fast and trial.plan.execution != baseline:
            best.setdefault(trial.plan.execution, trial)
    return sorted(best.values(), key=lambda trial: (-value(trial), trial.number))


def order_of_round(numbers: Sequence[int], *, seed: int, round_number: int) -> list[int]:
    """The launches of one round, trial numbers in random order; the same for the same seed."""
    shuffled = sorted(numbers)
    random.Random(derived_seed(seed, round_number, "final")).shuffle(shuffled)  # noqa: S311
    return shuffled


def first_rounds_of(
    events: Iterable[Mapping[str, Any]], *, launched: Mapping[int, Collection[int]]
) -> dict[int, int]:
    """The final round, from 0, in which each finalist joins: 0 in the first session, by trial.

    Whoever is new in a later session joins behind the rounds that were begun before: their baseline was
    measured at another time, maybe on a machine that differs by now. `launched` are the rounds of every
    finalist that has been launched, by which the log of an earlier version is read.
    """
    first: dict[int, int] = {}
    for event in events:
        if event["kind"] == "finalists" and isinstance(event.get("trials"), list):
            begun = event.get("first_round")
            for number in event["trials"]:
                first.setdefault(number, begun if type(begun) is int and begun > 0 else 0)
    for number, rounds in launched.items():
        first[number] = min(first.get(number, MAX_ROUND), *rounds)
    return first


def sequential_test_of(
    trials: Sequence[FinishedTrial], *, num_rounds: int, first_rounds: Mapping[int, int] | None = None
) -> SequentialTest:
    """The sequential test of these finalists; what departs further from the command has to be clearly faster.

    `first_rounds` has the round, from 0, in which a finalist joins. There are as many rounds more.
    """
    joined = {trial.number: (first_rounds or {}).get(trial.number, 0) for trial in trials}
    latest = max(joined.values(), default=0)
    return SequentialTest(
        finalists=sorted(trial.number for trial in trials),
        num_rounds=latest + num_rounds,
        max_rounds=latest + MAX_EXTENDED * num_rounds,
        first_rounds=joined,
        least_gains={trial.number: math.log(CLEAR_GAIN) for trial in trials if trial.plan.is_other_model},
        departures={trial.number: departure(trial.plan) for trial in trials},
        careful_chance=1.0 - CLEAR_CHANCE,
    )


def log_values(
    plans: Mapping[int, Plan],
    *,
    launches: Mapping[int, Mapping[int, TrialResult]],
    objective: Objective,
) -> dict[int, dict[int, float]]:
    """The logarithm of the objective of every launch, by trial and round."""
    return {
        number: {
            index: math.log(_value(plan, result, objective)) for index, result in launches[number].items()
        }
        for number, plan in plans.items()
        if number in launches
    }


def is_failure(number: int, result: TrialResult) -> bool:
    """Whether a final launch says that its plan fails: not measured, and neither lost nor stopped.

    The baseline, number 0, never does.
    """
    return not (
        number == BASELINE or result.is_measured or result.outcome in (Outcome.INFRA, Outcome.CANCELLED)
    )


def rank(
    trials: Sequence[FinishedTrial],
    *,
    baseline: Plan,
    launches: Mapping[int, Mapping[int, TrialResult]],
    objective: Objective,
    seed: int,
    num_asked: int,
    failed: Mapping[int, int],
    test: SequentialTest | None = None,
    first_rounds: Mapping[int, int] | None = None,
) -> list[FinalistResult]:
    """Every candidate that never failed and was measured in two rounds with the baseline, in order of choice.

    `launches[number][round]` are the final launches' measured results, the baseline's under number 0;
    `num_asked` is `study.rounds`, `failed` has the round in which a finalist failed. `test` has its
    decisions; without it they are made again from the launches, with `first_rounds` as `first_rounds_of` has
    them.
    """
    plans = {BASELINE: baseline, **{trial.number: trial.plan for trial in trials}}
    values = log_values(plans, launches=launches, objective=objective)
    if test is None:
        test = sequential_test_of(trials, num_rounds=num_asked, first_rounds=first_rounds)
        test = replayed(test, values, failed=failed)
    trials = [trial for trial in trials if trial.number not in failed]
    values = {number: by_round for number, by_round in values.items() if number not in failed}
    effects = fit(values)
    ranked = []
    baseline_results = launches.get(BASELINE, {})
    for trial in trials:
        results = launches.get(trial.number, {})
        rounds = sorted(baseline_results.keys() & results.keys())
        if len(rounds) < FIRST_LOOK or effects is None:
            continue
        pairs = [(results[number], baseline_results[number]) for number in rounds]
        ratios = tuple(
            _value(trial.plan, result, objective) / _value(baseline, baseline_result, objective)
            for result, baseline_result in pairs
        )
        comparison = Comparison(
            objective=objective,
            plan=_measurement(trial.plan, [result for result, _ in pairs], seed=seed),
            baseline=_measurement(baseline, [result for _, result in pairs], seed=seed),
            speedup=_speedup(effects, trial.number, ratios),
            confidence=CONFIDENCE,
            round_ratios=ratios,
        )
        result = FinalistResult(
            trial=trial,
            comparison=comparison,
            rounds=tuple(rounds),
            proven_after=test.proven.get(trial.number),
            is_live=trial.number in test.live,
            effects=effects,
        )
        ranked.append(result)
    return in_order_of_choice(ranked, seed=seed)


def _speedup(effects: Effects, number: int, ratios: Sequence[float]) -> Interval:
    """The median of the ratios, with the interval of the test."""
    low, high = effects.interval(number, BASELINE, confidence=CONFIDENCE)
    median = statistics.median(ratios)
    return Interval(median=median, low=min(math.exp(low), median), high=max(math.exp(high), median))


def bootstrap_median(
    values: Sequence[float], *, seed: int, num_resamples: int = NUM_RESAMPLES, level: float = 0.95
) -> Interval:
    """The median of `values`, at least one, with its percentile bootstrap interval (Efron 1979).

    With five values the interval of 95 % reaches from the smallest to the largest (94 %, with three 75 %);
    it is never wider.
    """
    count = len(values)
    *key, position = random.Random(seed).getstate()[1]  # noqa: S311
    generator = np.random.RandomState()
    # The numbers of `random.choices`, a whole array at once.
    generator.set_state(("MT19937", np.array(key, dtype=np.uint32), position, 0, 0.0))
    drawn = np.asarray(values)[(generator.random_sample((num_resamples, count)) * count).astype(int)]
    medians = np.sort(np.median(drawn, axis=1))
    outside = int(0.5 * (1.0 - level) * (num_resamples - 1))
    return Interval(
        median=statistics.median(values),
        low=float(medians[outside]),
        high=float(medians[-1 - outside]),
    )


def _value(plan: Plan, result: TrialResult, objective: Objective) -> float:
    return score(plan, iteration_s=result.iteration_s).value(objective)


def _measurement(plan: Plan, results: Sequence[TrialResult], *, seed: int) -> Measurement:
    medians = [statistics.median(result.iteration_s) for result in results]
    interval: Interval = bootstrap_median(medians, seed=seed)
    typical: Score = score_of_median(plan, iteration_s=interval.median)
    return Measurement(
        iteration_s=interval,
        tokens_per_s=typical.tokens_per_s,
        model_flops_per_s_per_device=typical.model_flops_per_s_per_device,
        peak_memory_bytes=max(result.peak_memory_bytes for result in results),
        num_launches=len(results),
        num_iterations=sum(len(result.iteration_s) for result in results),
    )
