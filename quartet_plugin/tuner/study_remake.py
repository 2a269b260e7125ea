"""The sources from which a run's damaged or missing study is restored."""

from dataclasses import replace

from quartet_plugin.space.plan_space import Space
from quartet_plugin.study.storage import StudyStorage
from quartet_plugin.study.study_log import MAX_NUMBER, LoggedTrial, StudyLog, read_log
from quartet_plugin.tuner.attempts import read_launch
from quartet_plugin.tuner.finalists import BASELINE
from quartet_plugin.tuner.history_rows import read_events
from quartet_plugin.tuner.run_folder import RunFolder

# Events of a run that does not propose the same plans again.
_NOT_SELF_CONTAINED = frozenset({"from", "taken", "worker-lost"})


def with_remake(
    storage: StudyStorage, folder: RunFolder, *, is_self_contained: bool = True
) -> tuple[StudyStorage, StudyLog | None]:
    """The storage that knows what its study is made again from, and the log, where it is that.

    A run that is self-contained, without workers and without another run's measurements, proposes the same
    plans again: its trials' folders say more than the log. Any other needs the log.
    """
    events = read_events(folder.events_file)
    if is_self_contained and not _NOT_SELF_CONTAINED & {event["kind"] for event in events}:
        return replace(storage, remake="folders"), None
    log = read_log(events)
    return replace(storage, remake="nothing" if log is None else "log"), log


def with_folders(log: StudyLog, folder: RunFolder, *, space: Space) -> StudyLog:
    """The log with the trials that only their folders name: a tuner was killed before it logged them."""
    first = 1 + len(log.earlier_trials or ())
    trials = dict(log.trials)
    for path in sorted(folder.trials.glob("[0-9]*")):
        number = int(path.name) if path.name.isdecimal() else BASELINE
        if number < first or number in trials or number > MAX_NUMBER:
            continue
        plan = read_launch(path, faults=[]).plan
        params = None if plan is None else space.params_of(plan)
        if params is not None:
            trials[number] = LoggedTrial(number=number, params=params, record=None)
    return replace(log, trials=trials)
