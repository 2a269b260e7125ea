"""A study read back: the record of every trial, and which parameters mattered."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from quartet_plugin.model.measurement import Objective
from quartet_plugin.study.storage import StudyStorage, close
from quartet_plugin.study.tune_study import PLAN, TOLD

MIN_TRIALS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRow:
    """A trial as the study has it: its record and the plan's labels, both as they were written."""

    number: int
    is_finished: bool
    record: Mapping[str, Any]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyView:
    """All trials of a study, and how much of the objective each parameter decides (they sum to 1)."""

    objective: Objective | None
    rows: tuple[StudyRow, ...]
    importance: Mapping[str, float]


def read_study(storage: StudyStorage) -> StudyView | None:
    """The study in `storage`; None where it was not made yet. Importance needs MIN_TRIALS.

    Raises StorageError where it cannot be read.
    """
    import optuna

    if not storage.exists:
        return None
    with storage.errors():
        connected = storage.connect()
        try:
            try:
                study = optuna.load_study(study_name=storage.study_name, storage=connected)
            except KeyError:
                return None
            trials = study.get_trials(deepcopy=False)
            rows = tuple(_study_row(trial) for trial in trials)
            objective = study.user_attrs.get("objective")
            return StudyView(
                objective=objective if objective in get_args(Objective) else None,
                rows=rows,
                importance=_importance(study, trials),
            )
        finally:
            close(connected)


def _study_row(trial: Any) -> StudyRow:
    record, labels = trial.user_attrs.get(TOLD), trial.user_attrs.get(PLAN)
    return StudyRow(
        number=trial.number,
        is_finished=trial.state.is_finished(),
        record=record if isinstance(record, dict) else {},
        labels=labels if isinstance(labels, dict) else {},
    )


def _importance(study: Any, trials: list[Any]) -> dict[str, float]:
    """PED-ANOVA (Watanabe et al. 2023), which knows conditional parameters; empty where nothing is said."""
    import warnings

    import optuna

    values = [trial.value for trial in trials if trial.state.name == "COMPLETE" and trial.params]
    if len(values) < MIN_TRIALS or len(set(values)) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importances = optuna.importance.get_param_importances(study)
        except (ValueError, RuntimeError):
            return {}  # too few trials share a parameter
    return {name: float(value) for name, value in importances.items() if value > 0}
