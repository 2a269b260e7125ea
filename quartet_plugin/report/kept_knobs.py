"""Why a knob that the user asked for stayed as the command has it: the best trial that changed it."""

from collections.abc import Iterator

from quartet_plugin.model.history import RunHistory, TrialRow
from quartet_plugin.report import markup
from quartet_plugin.report.formatting import clean
from quartet_plugin.space.knobs.knob import LayoutKnob, Value
from quartet_plugin.space.knobs.registry import LAYOUT_KNOBS

# A search leaves them as the command has them unless it is asked.
_ASKED = tuple(knob for knob in LAYOUT_KNOBS if knob.default == "stock")


def kept_lines(history: RunHistory) -> list[str]:
    """A line for each such knob, once the search has ended.

    Nothing where trials measured no other value, and of a knob that the outcome of the run changes.
    """
    rows = [": ".join(row) for row in _rows(history)]
    return [f"{'' if index else 'kept':<10}{clean(words)}" for index, words in enumerate(rows)]


def kept_section(history: RunHistory) -> str:
    """The same as a section of the page; nothing where there is no such knob."""
    rows = [[clean(cell) for cell in row] for row in _rows(history)]
    if not rows:
        return ""
    return markup.section("What stayed as in your command", markup.table(["knob", "why"], rows))


def _rows(history: RunHistory) -> list[tuple[str, str]]:
    """Each knob with its value, and the best trial that changed it."""
    measured = [trial for trial in history.trials if trial.is_measured and trial.plan is not None]
    if history.state != "finished" or not measured or measured[0].number > 0:
        return []
    return [row for knob in _ASKED for row in _row_of(knob, history, measured)]


def _row_of(knob: LayoutKnob, history: RunHistory, measured: list[TrialRow]) -> Iterator[tuple[str, str]]:
    command = _value(knob, measured[0])
    if history.winner is not None and knob.value_of(history.winner) != command:
        return
    others = [trial for trial in measured if _applies(knob, trial) and _value(knob, trial) != command]
    if not others:
        return
    other, best = max(others, key=_speed), max(measured, key=_speed)
    if other is best:
        return
    share = 100 * _speed(other) / _speed(best)
    yield (
        f"{knob.title} {knob.text(command)}",
        f"with {knob.text(_value(knob, other))}, trial {other.number} reached {share:.0f} % of the speed of "
        f"trial {best.number}",
    )


def _value(knob: LayoutKnob, trial: TrialRow) -> Value | None:
    return None if trial.plan is None else knob.value_of(trial.plan)


def _applies(knob: LayoutKnob, trial: TrialRow) -> bool:
    """Whether the trial's layout leaves the knob a choice."""
    return trial.plan is not None and knob.applies(trial.plan.layout)


def _speed(trial: TrialRow) -> float:
    return trial.value or 0.0
