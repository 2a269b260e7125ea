"""The next trial of a study: the plan with the largest expected improvement, computed again for each trial.

Until something is measured it is the best of `quartet plan` that was not tried.

Nothing is remembered but the finished trials: the predictor learns them in their order, every candidate is
predicted anew, and one point is put before the study just before it is asked. Every few trials the choice is
left to the sampler, so that a cost model that is wrong in a way no correction can mend does not trap the
study.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from quartet_plugin.calibration.constants_fit import read_calibration
from quartet_plugin.calibration.machine_prior import KnownMachine, machine_model_of_space
from quartet_plugin.calibration.predictor import PlanPredictor
from quartet_plugin.cost.constants import Constants
from quartet_plugin.model.cluster import read_cluster
from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.model.measurement import Objective, Prediction
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial, objective_of
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.plan_scorer import PlanScorer, ScoredPlan, is_samplers_turn
from quartet_plugin.planner.space_request import request_of_space
from quartet_plugin.space.plan_space import Space
from quartet_plugin.study.tune_study import Proposal, TuneStudy
from quartet_plugin.tuner.config import MachineConfig
from quartet_plugin.tuner.run_folder import RunFolder, TuningRun


def proposer_of(space: Space, *, run: TuningRun, objective: Objective) -> "Proposer | None":
    """The proposer of a run; None where its sampler is to be left alone."""
    if run.config.study.starts == "none":
        return None
    machine = kept_machine(run.folder)
    return Proposer(
        space,
        predictor=predictor_of(space, run=run, machine=machine),
        objective=objective,
        request=request_of_space(space, machine=machine),
        constants=machine.constants,
        explore=run.config.study.explore,
    )


def objective_in(space: Space, *, run: TuningRun) -> Objective:
    """The objective by which the plans of a run's space are compared."""
    shapes = {space.baseline.shape, *space.shapes}
    return objective_of(run.config.study.objective, num_shapes=len(shapes))


def predictor_of(space: Space, *, run: TuningRun, machine: KnownMachine) -> PlanPredictor:
    """The predictor of a run on `machine` that has learned nothing yet."""
    return PlanPredictor(
        machine_model_of_space(space, machine),
        num_iterations=run.config.trial.least_measured,
        folder_of=run.folder.trial,
    )


class Proposer(PlanScorer):
    """Puts the most promising plan before the study; every `explore`-th trial (0: none) is the sampler's."""

    def __init__(
        self,
        space: Space,
        *,
        predictor: PlanPredictor,
        objective: Objective,
        request: PlanRequest,
        constants: Constants | None,
        explore: int,
    ) -> None:
        super().__init__(
            space, predictor=predictor, objective=objective, request=request, constants=constants
        )
        self._explore = explore
        self._said: set[str] = set()

    def prepare(
        self,
        study: TuneStudy,
        trials: Sequence[FinishedTrial],
        *,
        is_known: Callable[[Plan], bool],
        pending: Sequence[Plan] = (),
    ) -> ScoredPlan | None:
        """Put a point before the study where it is the planner's turn and none waits; its score, if any.

        Plans that `is_known` were tried, are under way, or are refused: they are not proposed. Plans like
        the `pending` ones score less: what those measure will be known soon. The sampler has its turns once
        something is measured.
        """
        self.predictor.learn(trials)
        is_explored = self.predictor.is_ready and is_samplers_turn(trials, explore=self._explore)
        if study.has_waiting or is_explored:
            return None
        best = next((point for point in self.plans_to_try(pending) if not is_known(point.plan)), None)
        if best is None:
            return None
        study.enqueue(best.params, best.plan)
        return best.scored

    def unsaid_limits(self) -> list[str]:
        """Which layouts are never proposed, for the user to read once."""
        lines = [line for line in self.limits_of_layouts if line not in self._said]
        self._said.update(lines)
        return lines

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
