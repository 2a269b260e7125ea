"""The score of every plan that is worth trying: its expected improvement over the best measured plan.

The predictor learns the finished trials in their order, and every candidate is predicted anew, so that a
score follows from the finished trials alone. Until something is measured, the plans are those of `quartet
plan`. The tuner's proposer and Optuna's sampler of plans share it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from quartet_plugin.calibration.predictor import PlanPrediction, PlanPredictor
from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.iteration.plan_terms import run_of_plan
from quartet_plugin.model.measurement import Objective
from quartet_plugin.model.plan import Plan, PlanIdentity
from quartet_plugin.model.trial_record import FinishedTrial, score_of_median
from quartet_plugin.planner.calibrated_orders import CalibratedOrders
from quartet_plugin.planner.candidate_plans import Candidate, PlanCandidates
from quartet_plugin.planner.described_space import first_plans
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.schedule.search.effort import stopped_by
from quartet_plugin.space.param_sources import Params
from quartet_plugin.space.plan_space import Space

# A plan counts as an improvement only beyond this part of the best one.
LEAST_GAIN = 0.002
# Plans that fit in memory with a smaller chance get no search of splits and mappings.
LEAST_CHANCE_TO_MOVE = 0.1
# How far below the measured plans, of which none fits, the objective lies that others are compared with: a
# difference of logarithms.
FAR_BELOW = 1.0
# Plans that are tried while nothing is measured.
NUM_FIRST = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPlan:
    """A candidate with its prediction and score.

    `expected_improvement` is that of the objective's logarithm over the best plan measured, times the chance
    that the plan fits.
    """

    candidate: Candidate
    prediction: PlanPrediction
    expected_improvement: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanToTry:
    """A plan and the parameters that lead to it; `scored` is None where nothing was measured yet."""

    params: Params
    plan: Plan
    scored: ScoredPlan | None = None


class _StoppedError(Exception):
    """Raised to end the preparation of candidates."""


class PlanScorer:
    """Scores the candidates of a space by what `predictor` has learned.

    `request` is what `quartet plan` would be asked for the space, under `constants` (None: the fitted ones).
    """

    def __init__(
        self,
        space: Space,
        *,
        predictor: PlanPredictor,
        objective: Objective,
        request: PlanRequest,
        constants: Constants | None = None,
    ) -> None:
        self.predictor = predictor
        self._space = space
        self._objective = objective
        self._request, self._constants = request, constants
        self._candidates = PlanCandidates(
            space, is_predictable=predictor.knows, request=request, constants=constants
        )
        self._orders = CalibratedOrders(
            space,
            splits_of=predictor.split_model,
            run_of=lambda plan: run_of_plan(plan, predictor.machine_model),
            limits_of=predictor.feasibility.activation_limits,
        )
        self._first: list[PlanToTry] | None = None
        # Of the predictor's state when they were made.
        self._means: tuple[int, dict[int, float]] | None = None
        self._final: tuple[int, list[ScoredPlan]] | None = None

    def plans_to_try(self, pending: Sequence[Plan] = ()) -> Iterator[PlanToTry]:
        """The plans in the order in which they are worth a trial; known ones are among them."""
        if not self.predictor.is_ready:
            if self._first is None:
                made = first_plans(self._space, self._request, top=NUM_FIRST, constants=self._constants)
                self._first = [PlanToTry(params=params, plan=plan) for params, plan in made]
            yield from self._first
            return
        for scored in self.scored_plans(pending):
            candidate = scored.candidate
            yield PlanToTry(params=candidate.params, plan=candidate.plan, scored=scored)

    def prepare_candidates(self, *, is_stopped: Callable[[], bool]) -> None:
        """Prepare, without measurements, the candidates that are scored first; no score changes.

        The candidates are those on a machine as it is assumed. Once stopped, it returns at the next plan, or
        in the middle of the search for a plan's order.
        """
        log_costs: dict[PlanIdentity, float] = {}

        def check_stop() -> None:
            if is_stopped():
                raise _StoppedError

        def checked(plan: Plan) -> Plan:
            check_stop()
            return plan

        def cost_of(plan: Plan) -> float:
            key = checked(plan).identity
            if key not in log_costs:
                log_costs[key] = self._log_cost(plan, self.predictor.assumed_s(plan))
            return log_costs[key]

        with suppress(_StoppedError), stopped_by(check_stop):
            self._candidates.prepare(
                costs_of=lambda plans: list(map(cost_of, plans)),
                splits_of=lambda plan: self.predictor.assumed_split_model(checked(plan)),
                may_fit=lambda plan: self._may_fit(checked(plan)),
            )

    def scored_plans(self, pending: Sequence[Plan] = ()) -> list[ScoredPlan]:
        """Every candidate, the most promising first. Something must have been measured."""
        log_costs: dict[PlanIdentity, float] = {}

        def costs_of(plans: Sequence[Plan]) -> list[float]:
            # The candidates are put in order again and again, with few new ones among them.
            new = [plan for plan in plans if plan.identity not in log_costs]
            log_costs.update(zip((plan.identity for plan in new), self._log_costs(new), strict=True))
            return [log_costs[plan.identity] for plan in plans]

        candidates = self._candidates.best(
            costs_of=costs_of,
            splits_of=self.predictor.split_model,
            order_of=self._orders.of,
            may_fit=self._may_fit,
        )
        plans = [candidate.plan for candidate in candidates]
        predictions = self.predictor.predict(plans)
        best = self._best()
        novelty = 1.0 - self.predictor.similarity(plans, pending)
        scored = [
            ScoredPlan(
                candidate=candidate,
                prediction=prediction,
                expected_improvement=new * self._expected_improvement(candidate.plan, prediction, best=best),
            )
            for candidate, prediction, new in zip(candidates, predictions, novelty.tolist(), strict=True)
        ]
        return sorted(scored, key=lambda plan: -plan.expected_improvement)

    def final_plans(self) -> list[ScoredPlan]:
        """The scored plans of a search that has ended: its space does not change any more."""
        num_learned = self.predictor.num_learned
        if self._final is None or self._final[0] != num_learned:
            self._final = (num_learned, self.scored_plans())
        return self._final[1]

    @property
    def limits(self) -> tuple[str, ...]:
        """What limits cut off when the plans were last scored, one line each."""
        return self._candidates.limits

    @property
    def limits_of_layouts(self) -> tuple[str, ...]:
        """Which layouts are never scored, in a line; known once the plans were scored."""
        return self._candidates.limits_of_layouts

    def posterior_means(self, trials: Sequence[FinishedTrial]) -> dict[int, float]:
        """The objective of every measured plan by its trial's number, as the posterior has it."""
        self.predictor.learn(trials)
        return {number: math.exp(value) for number, value in self._log_posterior_means().items()}

    def log_speedup(self, plan: Plan, prediction: PlanPrediction) -> float:
        """The logarithm of the plan's predicted objective over that of the best measured plan."""
        return self._log_value(plan, prediction.iteration_s) - self._best()

    def _best(self) -> float:
        """The logarithm of the best objective of a measured plan that fits, as the posterior has it.

        While no measured plan fits, far below the worst of them: whatever fits is an improvement.
        """
        means, above = self._log_posterior_means(), self.predictor.above_limit
        fitting = [value for number, value in means.items() if number not in above]
        return max(fitting) if fitting else min(means.values()) - FAR_BELOW

    def _log_posterior_means(self) -> dict[int, float]:
        """The logarithm of every measured plan's objective by its trial."""
        num_learned = self.predictor.num_learned
        if self._means is None or self._means[0] != num_learned:
            plans = self.predictor.measured
            predictions = self.predictor.predict(list(plans.values()))
            means = {
                number: self._log_value(plan, prediction.iteration_s)
                for (number, plan), prediction in zip(plans.items(), predictions, strict=True)
            }
            self._means = (num_learned, means)
        return self._means[1]

    def _expected_improvement(self, plan: Plan, prediction: PlanPrediction, *, best: float) -> float:
        """The mean over the posterior's samples, times the chance that the plan fits."""
        total, of_a_second = 0.0, self._log_value(plan, 1.0)
        for weight, log_s, spread in prediction.posterior_samples:
            log_speedup = of_a_second - log_s - best - LEAST_GAIN
            total += weight * expected_improvement(log_speedup, spread)
        return total * self.predictor.feasibility.chance(plan)

    def _log_costs(self, plans: Sequence[Plan]) -> list[float]:
        """The logarithm of each plan's likeliest seconds for equal work over its chance to fit in memory."""
        likeliest = self.predictor.most_likely_s(plans)
        return [self._log_cost(plan, seconds) for plan, seconds in zip(plans, likeliest, strict=True)]

    def _log_cost(self, plan: Plan, seconds: float) -> float:
        """The logarithm of a plan's seconds for equal work over its chance to fit in memory."""
        return -self._log_value(plan, seconds) - math.log(self.predictor.feasibility.chance_of_memory(plan))

    def _may_fit(self, plan: Plan) -> bool:
        return self.predictor.feasibility.chance_of_memory(plan) >= LEAST_CHANCE_TO_MOVE

    def _log_value(self, plan: Plan, iteration_s: float) -> float:
        return math.log(score_of_median(plan, iteration_s=iteration_s).value(self._objective))


def is_samplers_turn(trials: Sequence[FinishedTrial], *, explore: int) -> bool:
    """Every `explore`-th trial (0: none) of the study's own; one that repeated a plan used its turn up."""
    if not explore:
        return False
    asked = [trial for trial in trials if trial.number > 0 and trial.record.source is None]
    spent = sum(trial.record.repeats is None for trial in asked)
    repeated = bool(asked) and asked[-1].record.repeats is not None
    return spent % explore == explore - 1 and not repeated


def expected_improvement(mean: float, spread: float) -> float:
    """The mean of the part above 0 of a normal variable around `mean` (Mockus 1974, Jones et al. 1998)."""
    deviations = mean / spread
    density = math.exp(-0.5 * deviations * deviations) / math.sqrt(2.0 * math.pi)
    return mean * 0.5 * math.erfc(-deviations / math.sqrt(2.0)) + spread * density
