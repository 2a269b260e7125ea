"""A launch that runs, in the words of the live table, of plain lines and of `quartet status`."""

from quartet_plugin.model.history import RunHistory
from quartet_plugin.model.launch import LaunchPosition, Phase

_USERS = "the baseline"
# What the final rounds compare plans with.
COMMAND, STAND_IN = "your command", "the best stock plan that fits"


def baseline_words(history: RunHistory) -> str:
    """The final rounds' baseline: the command, or the stock plan in its place where it does not fit."""
    return STAND_IN if history.baseline_note else COMMAND


def launch_words(phase: Phase, *, number: int, position: LaunchPosition | None) -> str:
    """The launch's name and its place in the run; `number` is its trial's, 0 where it belongs to none."""
    if phase in ("baseline", "control"):
        return _USERS if phase == "baseline" else f"{_USERS} again"
    name = f"trial {number}"
    if phase in ("cropped", "parity"):
        kind = "a depth proxy" if phase == "cropped" else "a parity check"
        return f"{kind} of {name}" if number else kind
    place = "" if position is None else f"{position.index} of {position.count}"
    if phase == "final":
        return f"final round {place}, {name if number else _USERS}" if place else f"final, {name}"
    return f"{name}, {place}" if place else name
