"""What a calibrated study tries next: the plan with the largest expected improvement, ranked anew each time.

Nothing is remembered but what was told: the ranker learns the told records in their order, every candidate is
predicted anew, and one point is put before the study just before it is asked. Every few trials the sampler is
left its own choice, so that a cost model that is wrong in a way no correction can mend does not trap the
study.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quartet_plugin.calibration.machine_prior import machine_model_of
from quartet_plugin.calibration.predictor import PlanPrediction, PlanPredictor
from quartet_plugin.model.measurement import Objective, Prediction
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.score import score_of_median
from quartet_plugin.model.trial_record import FinishedTrial
from quartet_plugin.planner.candidate_plans import Candidate, PlanCandidates
from quartet_plugin.space.plan_space import Space
from quartet_plugin.study.tune_study import Proposal, TuneStudy
from quartet_plugin.tuner.known_machine import kept_machine
from quartet_plugin.tuner.run_folder import TuningRun

# A plan counts as an improvement only beyond this part of the best one.
LEAST_GAIN = 0.002


def proposer_of(space: Space, *, run: TuningRun, objective: Objective) -> "Proposer | None":
    """The proposer of a run; None where its sampler is to be left alone."""
    config = run.config
    if config.study.starts == "none":
        return None
    ranker = PlanPredictor(
        machine_model_of(space.nodes, precision=space.job.precision, machine=kept_machine(run.folder)),
        num_iterations=config.trial.measure,
        folder_of=run.folder.trial,
    )
    return Proposer(space, ranker=ranker, objective=objective, explore=config.study.explore)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPlan:
    """A candidate with what is expected of it: `gain` is the expected improvement of the logarithm of the
    objective over the best plan measured, times the chance that it fits."""

    candidate: Candidate
    forecast: PlanPrediction
    gain: float


class Proposer:
    """Puts the most promising plan before the study. `explore`: every so many trials the sampler's turn, 0
    never."""

    def __init__(self, space: Space, *, ranker: PlanPredictor, objective: Objective, explore: int) -> None:
        self._ranker = ranker
        self._objective = objective
        self._explore = explore
        self._candidates = PlanCandidates(space, knows=ranker.knows)

    @property
    def ranker(self) -> PlanPredictor:
        """What predicts the plans."""
        return self._ranker

    def prepare(
        self,
        study: TuneStudy,
        trials: Sequence[FinishedTrial],
        *,
        is_known: Callable[[Plan], bool],
        pending: Sequence[Plan] = (),
    ) -> ScoredPlan | None:
        """Put a point before the study where it is the ranker's turn and none waits; the point, if any.

        `is_known` plans were told, are under way, or are refused: they are not proposed. Plans like the
        `pending` ones promise less: what those measure will be known soon.
        """
        self._ranker.learn(trials)
        if study.has_waiting or not self._ranker.is_ready or self._is_samplers_turn(trials):
            return None
        best = next((one for one in self.scored_plans(pending) if not is_known(one.candidate.plan)), None)
        if best is not None:
            study.enqueue(best.candidate.params)
        return best

    def scored_plans(self, pending: Sequence[Plan] = ()) -> list[ScoredPlan]:
        """Every candidate, the most promising first. Something must have been measured."""
        found = self._candidates.best(rate=self._rates, ends_of=self._ranker.end_loads)
        forecasts = self._ranker.predict([one.plan for one in found])
        best = self._best()
        new = 1.0 - self._ranker.similarity([one.plan for one in found], pending)
        promises = [
            ScoredPlan(
                candidate=one, forecast=forecast, gain=share * self._gain(one.plan, forecast, best=best)
            )
            for one, forecast, share in zip(found, forecasts, new.tolist(), strict=True)
        ]
        order = sorted(range(len(promises)), key=lambda at: (-promises[at].gain, at))
        return [promises[at] for at in order]

    def predict(self, proposal: Proposal, trials: Sequence[FinishedTrial]) -> Proposal:
        """The proposal with its predicted iteration in its plan, and how sure that is."""
        self._ranker.learn(trials)
        if not (self._ranker.is_ready and self._ranker.knows(proposal.plan)):
            return proposal
        forecast = self._ranker.predict([proposal.plan])[0]
        before = proposal.plan.prediction
        plan = replace(
            proposal.plan,
            prediction=Prediction(
                iteration_s=forecast.iteration_s,
                relative_cost=None if before is None else before.relative_cost,
                peak_memory_bytes=self._ranker.feasibility.peak_bytes(proposal.plan),
            ),
        )
        return replace(
            proposal, plan=plan, predicted_s=forecast.iteration_s, predicted_spread=forecast.spread
        )

    def posterior_means(self, trials: Sequence[FinishedTrial]) -> dict[int, float]:
        """The objective of every measured plan by its trial's number, as the posterior has it."""
        self._ranker.learn(trials)
        return {number: math.exp(value) for number, value in self._believed().items()}

    def _is_samplers_turn(self, trials: Sequence[FinishedTrial]) -> bool:
        """Every `explore`-th trial of the study's own; one that repeated a plan used its turn up."""
        if not self._explore:
            return False
        own = [one for one in trials if one.number > 0 and one.record.source is None]
        spent = sum(one.record.repeats is None for one in own)
        repeated = bool(own) and own[-1].record.repeats is not None
        return spent % self._explore == self._explore - 1 and not repeated

    def lead(self, plan: Plan, forecast: PlanPrediction) -> float:
        """How far the plan is before the best measured one, in the objective's logarithm."""
        return self._log_value(plan, forecast.iteration_s) - self._best()

    def _best(self) -> float:
        """The logarithm of the best measured plan's objective, as the posterior has it: without its luck."""
        return max(self._believed().values())

    def _believed(self) -> dict[int, float]:
        """The logarithm of every measured plan's objective by its trial."""
        plans = self._ranker.measured
        forecasts = self._ranker.predict(list(plans.values()))
        return {
            number: self._log_value(plan, forecast.iteration_s)
            for (number, plan), forecast in zip(plans.items(), forecasts, strict=True)
        }

    def _gain(self, plan: Plan, forecast: PlanPrediction, *, best: float) -> float:
        """The mean over what the measurements may mean."""
        found = 0.0
        for weight, log_s, spread in forecast.posterior_samples:
            lead = self._log_value(plan, math.exp(log_s)) - best - LEAST_GAIN
            found += weight * expected_improvement(lead, spread)
        return found * self._ranker.feasibility.chance(plan)

    def _rates(self, plans: Sequence[Plan]) -> list[float]:
        found = self._ranker.most_likely_s(plans)
        return [-self._log_value(plan, seconds) for plan, seconds in zip(plans, found, strict=True)]

    def _log_value(self, plan: Plan, iteration_s: float) -> float:
        return math.log(score_of_median(plan, iteration_s=iteration_s).value(self._objective))


def expected_improvement(lead: float, spread: float) -> float:
    """The mean of what is above 0 of a normal variable around `lead` (Mockus 1974, Jones et al. 1998)."""
    at = lead / spread
    density = math.exp(-0.5 * at * at) / math.sqrt(2.0 * math.pi)
    return lead * 0.5 * math.erfc(-at / math.sqrt(2.0)) + spread * density
