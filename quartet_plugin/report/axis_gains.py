"""What each axis of the winner gave: a line for a terminal and a section of the report."""

from quartet_plugin.model.axis_gains import AxisGain, AxisGains
from quartet_plugin.report import markup
from quartet_plugin.report.formatting import clean

NAMES = {
    "shape": "width and depth",
    "degrees": "degrees of parallelism",
    "micro-batch": "micro-batch",
    "schedule": "pipeline schedule",
    "split": "layers per stage",
    "mapping": "ranks on devices",
    "options": "recompute and other options",
}
_LEAST = 1.005


def axis_lines(gains: AxisGains) -> list[str]:
    """A line each axis, the largest gain first."""
    width = max(len(NAMES[gain.axis]) for gain in gains.gains)
    lines = []
    for row, gain in enumerate(_sorted(gains)):
        head = "axes" if row == 0 else ""
        lines.append(
            f"{head:<10}{NAMES[gain.axis]:<{width}}  {_words(gain)} predicted; "
            f"best without it {clean(gain.best_without, limit=200)}"
        )
    return lines


def axis_section(gains: AxisGains | None) -> str:
    """The section of the page; nothing without gains."""
    if gains is None:
        return ""
    rows = [[NAMES[gain.axis], _words(gain), clean(gain.best_without, limit=200)] for gain in _sorted(gains)]
    table = markup.table(
        ["axis", "gives", "best plan with the axis as in your command"], rows, label="What each axis gave"
    )
    note = markup.note(
        "The winner over the best plan known that has the axis as your own command has it, both predicted "
        "by the cost model as the trials calibrated it. Axes help one another: their gains do not multiply "
        "to the speedup."
    )
    return markup.section("What each axis gave", f"{table}\n{note}")


def _sorted(gains: AxisGains) -> list[AxisGain]:
    return sorted(gains.gains, key=lambda gain: -gain.gain)


def _words(gain: AxisGain) -> str:
    """The gain in percent: a status has one speedup, the winner's as it was measured."""
    return f"{100 * (gain.gain - 1):.0f} %" if gain.gain >= _LEAST else "nothing"
