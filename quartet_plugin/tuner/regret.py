"""The regret of a search: how much faster than the winner the best untried plan may be.

Untried plans are drawn together from their posterior; in each draw the best of those that fit is compared
with the winner, whose speed is drawn as well. The spread of these comparisons is the estimate. It says
nothing about plans outside of the space.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.calibration.plan_gp import FAR, GpObservations, PlanFeatures, draw, features_of, joint
from quartet_plugin.calibration.predictor import PlanPredictor
from quartet_plugin.model.canonical import derived_seed
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.measurement import NOTABLE, Interval, Regret
from quartet_plugin.model.plan import Plan
from quartet_plugin.space.config import SEARCHED
from quartet_plugin.space.param_sources import Params, RandomParams
from quartet_plugin.space.plan_label import plan_label
from quartet_plugin.space.plan_space import Space
from quartet_plugin.tuner.tune_result import TuneResult
from quartet_plugin.tuner.winner_choice import FinalistResult

if TYPE_CHECKING:
    from quartet_plugin.tuner.proposer import Proposer

# The least number of measured plans, besides the baseline, for an estimate.
MIN_MEASURED = 3
NUM_DRAWS = 4_000
# Untried plans that are looked at, how many are made to find them, and of those how many whose order is
# searched, which takes tenths of a second.
MAX_UNTRIED, MAX_MADE, MAX_SEARCHED = 160, 240, 16
# Neighbours: how many of the best are varied, how often a choice is another one, how far a number is.
NUM_VARIED, OTHERWISE, STEP = 3, 0.25, 0.08
# A plan that nothing is known of fits; the assumption counts as this number of plans that did.
PRIOR_NUM_FITTING = 0.5
# The normal's error of a median over its error of a mean; no measurement is surer than LEAST.
MEDIAN_ERROR, LEAST = 1.25, 0.003
# No prediction of a plan that was not tried is surer than this.
LEAST_SPREAD = 0.01

# Seconds an iteration and the deviation of their logarithm, for plans in their order.
PredictPlans = Callable[[Sequence[Plan]], Sequence[tuple[float, float]]]
RelativeCost = Callable[[Plan], float | None]


def estimate_regret(
    space: Space,
    search: TuneResult,
    *,
    untried: Sequence[Plan] | None = None,
    relative_cost: RelativeCost = lambda _: None,
    predict: PredictPlans | None = None,
    chance_of_memory: Callable[[Plan], float] = lambda _: 1.0,
) -> Regret | None:
    """The estimate; None where too little was measured.

    `untried` are the plans to look at (the space is walked by chance without them), `predict` gives
    calibrated seconds; without it a process is fitted to what was measured, about `relative_cost`: the time
    for equal model FLOPs over the baseline's, None where it is not predicted. `chance_of_memory` predicts
    whether a plan fits in memory.
    """
    measured = {
        trial.plan.key
        for trial in search.trials
        if trial.record.verdict == "measured" and trial.record.repeats is None
    }
    if len(measured - {search.baseline.key}) < MIN_MEASURED:
        return None
    known = {plan.execution for plan in (search.baseline, *(trial.plan for trial in search.trials))}
    looked_at = untried_plans(space, search) if untried is None else untried
    distinct = {plan.execution: plan for plan in looked_at}
    plans = [plan for execution, plan in distinct.items() if execution not in known][:MAX_UNTRIED]
    if not plans:
        nothing = Interval(median=0.0, low=0.0, high=0.0)
        return Regret(
            gain=nothing,
            notable=0.0,
            likely=None,
            likely_chance=0.0,
            num_untried=0,
            num_measured=len(measured),
            source="every plan was tried",
        )
    generator = np.random.default_rng(derived_seed(search.seed, len(search.trials), "regret"))
    if predict is None:
        draws, best = _by_process(search, plans, relative_cost, generator)
    else:
        draws, best = _by_predictions(search, plans, predict, generator)
    chances = np.array([chance_of_memory(plan) for plan in plans])
    draws = np.where(_fits(search, plans, chances, generator), draws, -np.inf)
    return _summary(
        draws,
        best,
        plans,
        num_measured=len(measured),
        has_model=predict is not None,
    )


def regret_of(
    space: Space, search: TuneResult, *, predictor: PlanPredictor, proposer: "Proposer | None"
) -> Regret | None:
    """The estimate from the calibrated cost model if the search has one, otherwise from the measurements."""
    if proposer is not None:
        predictor.learn(search.trials)
    is_known = all(predictor.knows(plan) for plan in (search.baseline, search.best))
    if proposer is None or not predictor.is_ready or not is_known:
        cost = partial(predictor.relative_cost, baseline=search.baseline)
        return estimate_regret(space, search, relative_cost=cost)
    # The most promising first, so that those that are left out are the least.
    ranked = [scored.candidate.plan for scored in proposer.final_plans()]
    untried = [plan for plan in ranked if predictor.knows(plan)]

    def predict(plans: Sequence[Plan]) -> list[tuple[float, float]]:
        return [(prediction.iteration_s, prediction.spread) for prediction in predictor.predict(plans)]

    return estimate_regret(
        space,
        search,
        untried=untried,
        predict=predict,
        chance_of_memory=predictor.feasibility.chance_of_memory,
    )


def _summary(
    draws: FloatArray,
    best: FloatArray,
    plans: Sequence[Plan],
    *,
    num_measured: int,
    has_model: bool,
) -> Regret:
    gains = np.expm1(np.clip(draws.max(axis=1) - best, 0.0, 50.0))
    low, median, high = (float(quantile) for quantile in np.quantile(gains, (0.025, 0.5, 0.975)))
    leaders = np.bincount(draws.argmax(axis=1), minlength=len(plans))
    leader = int(leaders.argmax())
    return Regret(
        gain=Interval(median=median, low=low, high=high),
        notable=float((gains > NOTABLE).mean()),
        likely=plan_label(plans[leader]),
        likely_chance=float(leaders[leader] / len(draws)),
        num_untried=len(plans),
        num_measured=num_measured,
        source="calibrated cost model" if has_model else "measured trials",
    )


# The posterior of untried plans


def _by_process(
    search: TuneResult, plans: Sequence[Plan], relative_cost: RelativeCost, generator: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """Draws of the untried plans [draws, plans] and of the best [draws], fitted to the measurements."""
    every = {search.baseline.key: search.baseline}
    for trial in search.trials:
        every.setdefault(trial.plan.key, trial.plan)
    measured = list(every.values())
    index_of = {key: index for index, key in enumerate(every)}
    together = [*measured, *plans]
    predicted = np.array([_predicted(plan, search, relative_cost(plan)) for plan in together])
    values = draw(
        features_of(together),
        predicted,
        _observations(search, index_of),
        count=NUM_DRAWS,
        generator=generator,
    )
    return values[:, len(measured) :], values[:, index_of[search.best.key]]


def _predicted(plan: Plan, search: TuneResult, cost: float | None) -> float:
    """The logarithm of the objective over the baseline's by the relative `cost`; 0 where it is not known.

    Costs are for equal model FLOPs; where tokens count, a smaller model has more of them.
    """
    if not cost or search.objective == "model_flops_per_s_per_device":
        return -math.log(cost) if cost else 0.0
    baseline_flops = search.baseline.shape.model_flops_per_sequence
    return -math.log(cost) + math.log(baseline_flops / plan.shape.model_flops_per_sequence)


def _observations(search: TuneResult, index_of: dict[str, int]) -> GpObservations:
    """The measurements of the search and of the final rounds; the baseline is exactly 1 of itself."""
    # A stand-in for a command that does not fit is a trial of the search.
    baseline = next(
        trial
        for trial in search.trials
        if trial.plan.key == search.baseline.key and trial.record.repeats is None
    )
    baseline_value = baseline.record.value
    assert baseline_value is not None, "the baseline of a search was measured"
    rows = [(index_of[search.baseline.key], 0.0, 1e-8, 0.0)]
    for trial in search.trials:
        record = trial.record
        if trial.number == baseline.number or record.value is None or record.repeats is not None:
            continue
        variance = (record.spread or 0.0) ** 2 if record.is_depth_proxy else 0.0
        rows.append((index_of[trial.plan.key], math.log(record.value / baseline_value), variance, 1.0))
    for ranking in search.rankings:
        value = math.log(ranking.comparison.speedup.median)
        rows.append((index_of[ranking.trial.plan.key], value, ranking_error(ranking) ** 2, 0.0))
    top = max(row[1] for row in rows)
    wide = [variance + (0.5 * max(0.0, top - value - FAR)) ** 2 for _, value, variance, _ in rows]
    return GpObservations(
        plan=[row[0] for row in rows],
        value=np.array([row[1] for row in rows]),
        variance=np.array(wide),
        in_search=np.array([row[3] for row in rows]),
        noise=noise_of_rounds(search.rankings),
    )


def ranking_error(ranking: FinalistResult) -> float:
    """The deviation of the logarithm of a final speedup: a median of a few ratios."""
    logs = [math.log(ratio) for ratio in ranking.comparison.round_ratios]
    return max(LEAST, MEDIAN_ERROR * statistics.stdev(logs) / math.sqrt(len(logs)))


def noise_of_rounds(rankings: Sequence[FinalistResult]) -> float | None:
    """The deviation of the logarithm of one launch, from the final rounds; None without them."""
    pooled = [
        statistics.variance([math.log(ratio) for ratio in ranking.comparison.round_ratios])
        for ranking in rankings
    ]
    # A ratio is of two launches.
    return max(LEAST, math.sqrt(statistics.fmean(pooled) / 2.0)) if pooled else None


def _by_predictions(
    search: TuneResult, plans: Sequence[Plan], predict: PredictPlans, generator: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """Draws of the untried plans [draws, plans] and of the best [draws], by the calibrated model.

    The winner's mean is weighted with the final rounds' result.
    """
    every = [search.baseline, search.best, *plans]
    predictions = predict(every)
    baseline_s = predictions[0][0]
    works = [_relative_work(plan, search) for plan in every]
    seconds = [predicted_s for predicted_s, _ in predictions]
    mean = np.array([math.log(baseline_s / s) + work for s, work in zip(seconds, works, strict=True)])
    spread = np.array([max(LEAST_SPREAD, deviation) for _, deviation in predictions])
    spread[0] = LEAST
    if search.winner is not None:
        error, final = ranking_error(search.winner), math.log(search.winner.comparison.speedup.median)
        weights = (spread[1] ** -2, error**-2)
        mean[1] = (weights[0] * mean[1] + weights[1] * final) / sum(weights)
        spread[1] = sum(weights) ** -0.5
    draws = joint(mean, spread, features_of(every), count=NUM_DRAWS, generator=generator)
    return draws[:, 2:], draws[:, 1]


def _relative_work(plan: Plan, search: TuneResult) -> float:
    """The logarithm of the plan's model FLOPs per sequence over the baseline's; 0 where tokens/s count."""
    if search.objective == "tokens_per_s":
        return 0.0
    baseline_flops = search.baseline.shape.model_flops_per_sequence
    return math.log(plan.shape.model_flops_per_sequence / baseline_flops)


def _fits(
    search: TuneResult, plans: Sequence[Plan], chances: FloatArray, generator: np.random.Generator
) -> NDArray[np.bool_]:
    """Whether each plan can run, in each draw [draws, plans]: as often as plans like it could.

    `chances` [plans] are those to fit in memory, where that is predicted. What one layout lacks all of its
    plans do, so they fit together or not at all.
    """
    trials = search.trials
    tried = [trial for trial in trials if trial.record.repeats is None and not trial.record.is_depth_proxy]
    verdicts = [trial.record.verdict for trial in tried]
    could = np.array([verdict == "measured" for verdict in verdicts], dtype=np.float64)
    could_not = np.array([verdict in ("infeasible", "wrong") for verdict in verdicts], dtype=np.float64)
    together = features_of([*(trial.plan for trial in tried), *plans])
    rows = PlanFeatures(codes=together.codes[len(tried) :], end_layers=together.end_layers[len(tried) :])
    columns = PlanFeatures(codes=together.codes[: len(tried)], end_layers=together.end_layers[: len(tried)])
    alike = rows.fit_similarity(columns)
    chance = chances * (PRIOR_NUM_FITTING + alike @ could) / (PRIOR_NUM_FITTING + alike @ (could + could_not))
    layouts: dict[object, int] = {}
    index = [layouts.setdefault((plan.shape, plan.layout), len(layouts)) for plan in plans]
    luck = generator.random((NUM_DRAWS, len(layouts)))
    fits: NDArray[np.bool_] = luck[:, index] < chance
    return fits


# Untried plans


def untried_plans(space: Space, search: TuneResult) -> list[Plan]:
    """Plans of the space that were not tried: neighbours of the best ones and any, in turns."""
    generator = random.Random(derived_seed(search.seed, len(search.trials), "untried"))  # noqa: S311
    known = {plan.execution for plan in (search.baseline, *(trial.plan for trial in search.trials))}
    ranked = sorted(
        (trial for trial in search.trials if trial.record.value is not None and trial.record.repeats is None),
        key=lambda trial: (-(trial.record.value or 0.0), trial.number),
    )
    points = [space.params_of(plan) for plan in (search.best, *(trial.plan for trial in ranked[:NUM_VARIED]))]
    near = [params for params in points if params is not None]
    untried: dict[object, Plan] = {}
    num_searched = 0
    for number in range(MAX_MADE):
        point = near[number // 2 % len(near)] if near and number % 2 else {}
        params = _Neighbour(point, generator=generator, is_searching=num_searched < MAX_SEARCHED)
        plan = space.decode(params, trial=0)
        num_searched += SEARCHED in params.params.values()
        execution = plan.execution
        if execution not in known and space.refusal_of(plan) is None:
            untried.setdefault(execution, plan)
        if len(untried) == MAX_UNTRIED:
            break
    return list(untried.values())


class _Neighbour(RandomParams):
    """Chooses as a point does, but for one choice now and then; of no point, by chance alone.

    Without `is_searching` no order is searched where there is another.
    """

    def __init__(self, params: Params, *, generator: random.Random, is_searching: bool) -> None:
        super().__init__(generator)
        self._near = params
        self._is_searching = is_searching

    def category(self, name: str, choices: Sequence[str]) -> str:
        """The point's choice, or by chance another one."""
        if not self._is_searching:
            choices = [choice for choice in choices if choice != SEARCHED] or choices
        choice = self._near.get(name)
        if choice not in choices or self._generator.random() < OTHERWISE:
            return super().category(name, choices)
        self.params[name] = chosen = str(choice)
        return chosen

    def integer(self, name: str, low: int, high: int) -> int:
        """The point's number, or by chance another one."""
        number = self._near.get(name)
        if isinstance(number, int) and low <= number <= high and self._generator.random() >= OTHERWISE:
            self.params[name] = number
            return number
        return super().integer(name, low, high)

    def unit_float(self, name: str) -> float:
        """A number near the point's."""
        if name not in self._near:
            return super().unit_float(name)
        moved = float(self._near[name]) + self._generator.gauss(0.0, STEP)
        self.params[name] = weight = min(1.0, max(-1.0, moved))
        return weight
