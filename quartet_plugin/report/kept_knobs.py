"""Why a knob that the user asked for stayed as the command has it: the best trial that changed it."""

import math
from collections.abc import Iterator

from quartet_plugin.model.history import RunHistory, TrialRow
from quartet_plugin.model.plan import Plan
from quartet_plugin.report import markup
from quartet_plugin.report.formatting import clean
from quartet_plugin.space.knobs.knob import LayoutKnob
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
    heading = "What stayed as in your command"
    return markup.section(heading, markup.table(["knob", "why"], rows, label=heading))


def _rows(history: RunHistory) -> list[tuple[str, str]]:
    """Each knob with its value, and the best trial that changed it."""
    measured = [
        (trial, trial.plan) for trial in history.trials if trial.is_measured and trial.plan is not None
    ]
    if history.state != "finished" or not measured or measured[0][0].number > 0:
        return []
    return [row for knob in _ASKED for row in _row_of(knob, history, measured)]


def _row_of(
    knob: LayoutKnob, history: RunHistory, measured: list[tuple[TrialRow, Plan]]
) -> Iterator[tuple[str, str]]:
    command = knob.value_of(measured[0][1])
    if history.winner is not None and knob.value_of(history.winner) != command:
        return
    # Only a layout that leaves the knob a choice says something of it.
    others = [
        (trial, plan)
        for trial, plan in measured
        if knob.applies(plan.layout) and knob.value_of(plan) != command
    ]
    if not others:
        return
    (other, plan), (best, _) = max(others, key=_speed), max(measured, key=_speed)
    if other is best:
        return
    share = 100 * (other.value or 0.0) / (best.value or math.inf)
    yield (
        f"{knob.title} {knob.text(command)}",
        f"with {knob.text(knob.value_of(plan))}, trial {other.number} reached {share:.0f} % of the speed of "
        f"trial {best.number}",
    )


def _speed(measured: tuple[TrialRow, Plan]) -> float:
    return measured[0].value or 0.0
