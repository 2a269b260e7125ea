"""The log of a study: what events.jsonl holds of every trial, from which a lost study is made again.

A run with workers, or one that began with another run's measurements, does not propose the same plans again,
so its trials' folders alone cannot say which trial had which number. The events can: `proposed` has the
parameters of a trial, `told` and `repeat` also its record, and `from` has what another run gave.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.schema import parse
from quartet_plugin.model.trial_record import TrialRecord
from quartet_plugin.space.param_sources import Params

MAX_NUMBER = 1_000_000
_FINISHED = ("told", "repeat")
_KINDS = ("proposed", *_FINISHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTrial:
    """The parameters of a trial and its record; None for one that was proposed and not finished."""

    number: int
    params: Params
    record: TrialRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyLog:
    """The trials of a study by number, those with a record in the order in which they finished.

    `earlier_trials` and `starts` are what the study began with; None where it took nothing of another run.
    """

    trials: Mapping[int, LoggedTrial] = field(default_factory=dict)
    earlier_trials: tuple[tuple[Params, TrialRecord], ...] | None = None
    starts: tuple[Params, ...] = ()

    @property
    def finished(self) -> frozenset[int]:
        """The numbers of the trials that have a record."""
        return frozenset(number for number, trial in self.trials.items() if trial.record is not None)


def read_log(events: Sequence[Mapping[str, Any]]) -> StudyLog | None:
    """The log in a run's events; None where they do not hold it: an earlier version wrote less of a trial."""
    proposed: dict[int, LoggedTrial] = {}
    finished: dict[int, LoggedTrial] = {}
    begun_with: StudyLog | None = None
    try:
        for event in events:
            if event["kind"] == "from":
                begun_with = _begun_with(event)
            elif event["kind"] in _KINDS:
                trial = _logged_trial(event)
                (proposed if trial.record is None else finished).setdefault(trial.number, trial)
    except (ConfigError, KeyError, TypeError):
        return None
    rest = {number: trial for number, trial in proposed.items() if number not in finished}
    if begun_with is None:
        return StudyLog(trials={**finished, **rest})
    return StudyLog(
        trials={**finished, **rest}, earlier_trials=begun_with.earlier_trials, starts=begun_with.starts
    )


def _logged_trial(event: Mapping[str, Any]) -> LoggedTrial:
    number = event["trial"]
    if type(number) is not int or not 0 < number <= MAX_NUMBER:
        raise ConfigError(f"events: trial: {number}; must be from 1 to {MAX_NUMBER}")
    record = _record(event["record"]) if event["kind"] in _FINISHED else None
    return LoggedTrial(number=number, params=_params(event["params"]), record=record)


def _begun_with(event: Mapping[str, Any]) -> StudyLog:
    earlier_trials = tuple((_params(trial["params"]), _record(trial["record"])) for trial in event["trials"])
    return StudyLog(earlier_trials=earlier_trials, starts=tuple(map(_params, event["starts"])))


def _record(data: object) -> TrialRecord:
    return parse(TrialRecord, data, where="events: record")


def _params(data: object) -> Params:
    if not isinstance(data, dict) or not all(type(value) in (str, int, float) for value in data.values()):
        raise ConfigError("events: params: must be texts and numbers by name")
    return data
