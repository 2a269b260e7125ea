"""The gain of each axis of the winner: lines for a terminal and a section of the report."""

from quartet_plugin.model.axis_gains import FILE_NAME, AxisGain, AxisGains
from quartet_plugin.model.history import RunHistory
from quartet_plugin.report import markup
from quartet_plugin.report.formatting import clean
from quartet_plugin.report.trial_table import label_of

NAMES = {
    "shape": "width and depth",
    "degrees": "degrees of parallelism",
    "micro-batch": "micro-batch",
    "schedule": "pipeline schedule",
    "split": "layers per stage",
    "mapping": "ranks on devices",
    "options": "recompute and other options",
}
_HEADING = "Gain of each axis"
_LEAST = 1.005


def axis_lines(history: RunHistory) -> list[str]:
    """A line each axis of a winner, the largest gain first, or one line that says why there is none."""
    gains = history.axis_gains
    if gains is None or not gains.gains:
        reason = _why_none(history) if _has_winner(history) else ""
        return [f"{'axes':<10}{reason}"] if reason else []
    width = max(len(NAMES[gain.axis]) for gain in gains.gains)
    lines = []
    for row, gain in enumerate(_sorted(gains)):
        head = "axes" if row == 0 else ""
        lines.append(
            f"{head:<10}{NAMES[gain.axis]:<{width}}  {_words(gain)} faster than the best plan that keeps "
            f"your value, {_best_without(gain, history)}"
        )
    return lines + [f"{'':<10}{words}" for words in _without_row(history)]


def axis_section(history: RunHistory) -> str:
    """The section of the page: a table, or one line that says why there is none."""
    gains = history.axis_gains
    if gains is None or not gains.gains:
        reason = _why_none(history)
        return markup.section(_HEADING, markup.note(f"{reason[0].upper()}{reason[1:]}."))
    rows = [[NAMES[gain.axis], _words(gain), _best_without(gain, history)] for gain in _sorted(gains)]
    table = markup.table(["axis", "gain", "best plan with the axis as in your command"], rows, label=_HEADING)
    note = markup.note(
        "The winner over the best known plan that keeps your command's value of the axis, both predicted by "
        "the cost model, calibrated with the trials. Axes interact: their gains do not multiply "
        "to the speedup, and none is a share of it."
    )
    note += "".join(markup.note(f"{words[0].upper()}{words[1:]}.") for words in _without_row(history))
    return markup.section(_HEADING, f"{table}\n{note}")


def _best_without(gain: AxisGain, history: RunHistory) -> str:
    """The best plan without the axis, the trial that measured it, and the gain that the final rounds gave."""
    label = clean(gain.best_without, limit=200)
    number = next((row.number for row in history.trials if label_of(row) == gain.best_without), None)
    if number is None:
        return f"predicted: {label}, not tried"
    measured = None if history.winner is None else history.winner.measurement
    choice = None if measured is None else measured.choice
    if choice is None or choice.gain is None or choice.runner_up != number or choice.gain < 1.0:
        return f"fitted: {label}, trial {number}"
    return f"fitted: {label}, trial {number}; {100 * (choice.gain - 1):.0f} % in the final rounds"


def _without_row(history: RunHistory) -> list[str]:
    """Why the split and the schedule, which a plan without a pipeline changes too, have no row."""
    winner = history.winner
    if winner is None or not winner.layout.num_stages == 1 < winner.made_for.baseline.layout.num_stages:
        return []
    return ["split and schedule have no row: they follow from PP 1, a degree of parallelism"]


def _has_winner(history: RunHistory) -> bool:
    """Whether a plan won; a stand-in for the user's command has no measurement in turns."""
    return history.winner is not None and history.winner.measurement is not None


def _why_none(history: RunHistory) -> str:
    """Why a run has no gains, in words that begin and end a sentence."""
    gains = history.axis_gains
    if gains is not None and gains.why_none:
        return f"no figures: {clean(gains.why_none, limit=200)}"
    if _has_winner(history):
        return f"no figures: best/{FILE_NAME} is missing or cannot be read"
    if history.state == "finished":
        return "no plan was proven faster than the baseline, so there are no gains to show"
    return "the search has not ended; the figures are computed at its end"


def _sorted(gains: AxisGains) -> list[AxisGain]:
    return sorted(gains.gains, key=lambda gain: -gain.gain)


def _words(gain: AxisGain) -> str:
    """The gain in percent: a status has one speedup, the winner's as it was measured."""
    return f"{100 * (gain.gain - 1):.0f} %" if gain.gain >= _LEAST else "less than 0.5 %"
