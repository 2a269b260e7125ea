"""The cost model as a run's trials calibrated it, read from its folder and its study, without a launch."""

from dataclasses import dataclass
from pathlib import Path

from quartet_plugin.calibration.predictor import PlanPredictor
from quartet_plugin.cost.constants import Constants
from quartet_plugin.model.history import RunHistory
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.space_request import request_of_space
from quartet_plugin.study.view import StudyView
from quartet_plugin.tuner.finalists import BASELINE
from quartet_plugin.tuner.history import open_run
from quartet_plugin.tuner.proposer import kept_machine, predictor_of
from quartet_plugin.tuner.run_space import space_of_run


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedRun:
    """A run's predictor that has learned its trials, and the request to plan that stands for the run.

    `constants` are those of the run's calibration file, None without one.
    """

    predictor: PlanPredictor
    request: PlanRequest
    constants: Constants | None


def learned_run(path: Path, *, history: RunHistory, study: StudyView) -> LearnedRun | None:
    """The run in `path` with what its finished trials taught; None where none was measured.

    A trial whose plan is lost teaches nothing. Raises ConfigError where the run has no baseline.
    """
    run, space = open_run(path), space_of_run(path)
    machine = kept_machine(run.folder)
    predictor = predictor_of(space, run=run, machine=machine)
    plans = {row.number: row.plan for row in history.trials if row.plan is not None}
    plans[BASELINE] = space.baseline
    predictor.learn(
        [
            FinishedTrial(number=row.number, plan=plans[row.number], record=TrialRecord(**row.record))
            for row in study.rows
            if row.is_finished and row.record and row.number in plans
        ]
    )
    if not predictor.is_ready:
        return None
    request = request_of_space(space, machine=machine)
    return LearnedRun(predictor=predictor, request=request, constants=machine.constants)
