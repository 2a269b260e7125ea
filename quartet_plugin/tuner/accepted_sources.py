"""The changed functions of the framework that earlier sessions of a run accepted, kept in its event log.

Trials run custom schedules over these functions, under the parity gate. A session without the option
`--accept-changed-source`, and the training by best/command.sh, go on with the same sources, and refuse any
other change anew.
"""

import os

from quartet_plugin.protocol.accepted_sources import accepted_text
from quartet_plugin.protocol.environment import ACCEPT_CHANGED_SOURCE
from quartet_plugin.trial.request import TrialResult
from quartet_plugin.tuner.history_rows import read_events
from quartet_plugin.tuner.run_folder import RunFolder

EVENT = "accepted-source"


def accepted_in(result: TrialResult) -> tuple[str, ...]:
    """The functions whose changed source a launch accepted, as `protocol.accepted_sources` writes them."""
    return _texts((result.job or {}).get("accepted_sources"))


def accepted_before(folder: RunFolder) -> tuple[str, ...]:
    """The functions that launches of all sessions accepted. Raises StorageError."""
    events = (event for event in read_events(folder.events_file) if event["kind"] == EVENT)
    return tuple(dict.fromkeys(text for event in events for text in _texts(event.get("functions"))))


def accept_as_before(folder: RunFolder) -> tuple[str, ...]:
    """Let the ranks accept the changed functions that launches of the run accepted, in their sources then.

    They inherit it from this process. Returns the functions; none where the user has said what is accepted.
    Raises StorageError.
    """
    # Before the event log, which a worker would read anew for each trial.
    if ACCEPT_CHANGED_SOURCE in os.environ:
        return ()
    functions = accepted_before(folder)
    if functions:
        os.environ[ACCEPT_CHANGED_SOURCE] = accepted_text(functions)
    return functions


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        return ()
    return tuple(text for text in value if isinstance(text, str))
