"""The next trial of a calibrated study: the plan with the largest expected improvement, ranked anew always.

Nothing is remembered but the finished trials: the predictor learns them in their order, every candidate is
predicted anew, and one point is put before the study just before it is asked. Every few trials the choice is
left to the sampler, so that a cost model that is wrong in a way no correction can mend does not trap the
study.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quartet_plugin.calibration.constants_fit import read_calibration
from quartet_plugin.calibration.machine_prior import KnownMachine, machine_model_of
from quartet_plugin.calibration.predictor import PlanPrediction, PlanPredictor
from quartet_plugin.model.cluster import read_cluster
from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.model.measurement import Objective, Prediction
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial, score_of_median
from quartet_plugin.planner.candidate_plans import Candidate, PlanCandidates
from quartet_plugin.space.plan_space import Space
from quartet_plugin.study.tune_study import Proposal, TuneStudy
from quartet_plugin.tuner.config import MachineConfig
from quartet_plugin.tuner.run_folder import RunFolder, TuningRun

# A plan counts as an improvement only beyond this part of the best one.
LEAST_GAIN = 0.002


def proposer_of(space: Space, *, run: TuningRun, objective: Objective) -> "Proposer | None":
    """The proposer of a run; None where its sampler is to be left alone."""
    config = run.config
    if config.study.starts == "none":
        return None
    predictor = PlanPredictor(
        machine_model_of(space.nodes, precision=space.job.precision, machine=kept_machine(run.folder)),
        num_iterations=config.trial.measure,
        folder_of=run.folder.trial,
    )
    return Proposer(space, predictor=predictor, objective=objective, explore=config.study.explore)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPlan:
    """A candidate with its prediction and score.

    `expected_improvement` is that of the objective's logarithm over the best plan measured, times the chance
    that the plan fits.
    """

    candidate: Candidate
    prediction: PlanPrediction
    expected_improvement: float


class Proposer:
    """Puts the most promising plan before the study; every `explore`-th trial (0: none) is the sampler's."""

    def __init__(self, space: Space, *, predictor: PlanPredictor, objective: Objective, explore: int) -> None:
        self.predictor = predictor
        self._objective = objective
        self._explore = explore
        self._candidates = PlanCandidates(space, knows=predictor.knows)

    def prepare(
        self,
        study: TuneStudy,
        trials: Sequence[FinishedTrial],
        *,
        is_known: Callable[[Plan], bool],
        pending: Sequence[Plan] = (),
    ) -> ScoredPlan | None:
        """Put a point before the study where it is the predictor's turn and none waits; the point, if any.

        Plans that `is_known` were tried, are under way, or are refused: they are not proposed. Plans like
        the `pending` ones score less: what those measure will be known soon.
        """
        self.predictor.learn(trials)
        if study.has_waiting or not self.predictor.is_ready or self._is_samplers_turn(trials):
            return None
        scored = self.scored_plans(pending)
        best = next((plan for plan in scored if not is_known(plan.candidate.plan)), None)
        if best is not None:
            study.enqueue(best.candidate.params)
        return best

    def scored_plans(self, pending: Sequence[Plan] = ()) -> list[ScoredPlan]:
        """Every candidate, the most promising first. Something must have been measured."""
        candidates = self._candidates.best(rate=self._rates, ends_of=self.predictor.end_loads)
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

    def predict(self, proposal: Proposal, trials: Sequence[FinishedTrial]) -> Proposal:
        """The proposal with its predicted iteration in its plan, and how sure that is."""
        self.predictor.learn(trials)
        if not (self.predictor.is_ready and self.predictor.knows(proposal.plan)):
            return proposal
        predicted = self.predictor.predict([proposal.plan])[0]
        before = proposal.plan.prediction
        plan = replace(
            proposal.plan,
            prediction=Prediction(
                iteration_s=predicted.iteration_s,
                relative_cost=None if before is None else before.relative_cost,
                peak_memory_bytes=self.predictor.feasibility.peak_bytes(proposal.plan),
            ),
        )
        return replace(
            proposal, plan=plan, predicted_s=predicted.iteration_s, predicted_spread=predicted.spread
        )

    def posterior_means(self, trials: Sequence[FinishedTrial]) -> dict[int, float]:
        """The objective of every measured plan by its trial's number, as the posterior has it."""
        self.predictor.learn(trials)
        return {number: math.exp(value) for number, value in self._log_posterior_means().items()}

    def _is_samplers_turn(self, trials: Sequence[FinishedTrial]) -> bool:
        """Every `explore`-th trial of the study's own; one that repeated a plan used its turn up."""
        if not self._explore:
            return False
        asked = [trial for trial in trials if trial.number > 0 and trial.record.source is None]
        spent = sum(trial.record.repeats is None for trial in asked)
        repeated = bool(asked) and asked[-1].record.repeats is not None
        return spent % self._explore == self._explore - 1 and not repeated

    def log_speedup(self, plan: Plan, prediction: PlanPrediction) -> float:
        """The logarithm of the plan's predicted objective over that of the best measured plan."""
        return self._log_value(plan, prediction.iteration_s) - self._best()

    def _best(self) -> float:
        """The logarithm of the best measured plan's objective, as the posterior has it: without its luck."""
        return max(self._log_posterior_means().values())

    def _log_posterior_means(self) -> dict[int, float]:
        """The logarithm of every measured plan's objective by its trial."""
        plans = self.predictor.measured
        predictions = self.predictor.predict(list(plans.values()))
        return {
            number: self._log_value(plan, prediction.iteration_s)
            for (number, plan), prediction in zip(plans.items(), predictions, strict=True)
        }

    def _expected_improvement(self, plan: Plan, prediction: PlanPrediction, *, best: float) -> float:
        """The mean over the posterior's samples, times the chance that the plan fits."""
        total = 0.0
        for weight, log_s, spread in prediction.posterior_samples:
            log_speedup = self._log_value(plan, math.exp(log_s)) - best - LEAST_GAIN
            total += weight * expected_improvement(log_speedup, spread)
        return total * self.predictor.feasibility.chance(plan)

    def _rates(self, plans: Sequence[Plan]) -> list[float]:
        likeliest = self.predictor.most_likely_s(plans)
        return [-self._log_value(plan, seconds) for plan, seconds in zip(plans, likeliest, strict=True)]

    def _log_value(self, plan: Plan, iteration_s: float) -> float:
        return math.log(score_of_median(plan, iteration_s=iteration_s).value(self._objective))


def expected_improvement(mean: float, spread: float) -> float:
    """The mean of the part above 0 of a normal variable around `mean` (Mockus 1974, Jones et al. 1998)."""
    deviations = mean / spread
    density = math.exp(-0.5 * deviations * deviations) / math.sqrt(2.0 * math.pi)
    return mean * 0.5 * math.erfc(-deviations / math.sqrt(2.0)) + spread * density


# The files that describe the machine, copied when a run begins so that a resumed run reads the same


def machine_of(config: MachineConfig, *, cwd: Path) -> KnownMachine:
    """The contents of the files that `config` names. Raises ConfigError in one line."""
    return KnownMachine(
        cluster=None if config.cluster is None else read_cluster(cwd / config.cluster),
        calibration=None if config.calibration is None else read_calibration(cwd / config.calibration),
    )


def keep_machine(config: MachineConfig, *, cwd: Path, folder: RunFolder) -> None:
    """Copy the files into the run's folder. Raises ConfigError for one that cannot be read."""
    copies = {folder.machine_file: config.cluster, folder.calibration_file: config.calibration}
    for copy, source in copies.items():
        if source is None:
            copy.unlink(missing_ok=True)  # of a run that failed before it measured
        else:
            write_json_atomic(copy, read_json(cwd / source))


def kept_machine(folder: RunFolder) -> KnownMachine:
    """The contents of the copies that the run was begun with."""
    copies = (folder.machine_file, folder.calibration_file)
    cluster, calibration = (copy.name if copy.exists() else None for copy in copies)
    return machine_of(MachineConfig(cluster=cluster, calibration=calibration), cwd=folder.path)
