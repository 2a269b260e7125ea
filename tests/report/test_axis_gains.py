"""The gain of each axis, where it is shown."""

import html
from dataclasses import replace

import pytest

from quartet_plugin.model.axis_gains import AxisGain, AxisGains
from quartet_plugin.model.history import RunHistory
from quartet_plugin.model.measurement import FinalChoice
from quartet_plugin.report.axis_gains import axis_lines
from quartet_plugin.report.page import Extras, page
from quartet_plugin.report.status import status_lines, status_record
from quartet_plugin.report.trial_table import label_of
from tests.model.plans import PLAN
from tests.report.histories import comparison, history

GAINS = AxisGains(
    objective="tokens_per_s",
    gains=(
        AxisGain(axis="micro-batch", gain=0.97, best_without="PP 2 · split 6+2 · zb-h1"),
        AxisGain(axis="split", gain=1.214, best_without="PP 2 · <zb-h1>"),
    ),
)


def test_the_axis_that_gave_most_comes_first_and_no_gain_is_said() -> None:
    first, second = axis_lines(replace(history(), axis_gains=GAINS))
    assert first.startswith("axes      layers per stage")
    assert first.endswith(
        "21 % faster than the best plan that keeps your value, predicted: PP 2 · <zb-h1>, not tried"
    )
    assert second.split()[:5] == ["micro-batch", "less", "than", "0.5", "%"]
    assert not second.startswith("axes")


def test_the_trial_without_the_axis_and_its_final_rounds_are_named() -> None:
    trial = next(row for row in history().trials if row.number == 1)
    gains = replace(GAINS, gains=(AxisGain(axis="split", gain=1.1, best_without=label_of(trial)),))
    assert axis_lines(replace(history(), axis_gains=gains))[0].endswith(f"{label_of(trial)}, trial 1")
    choice = FinalChoice(rule="the faster", runner_up=1, gain=1.148)
    won = replace(PLAN, measurement=replace(comparison(1.2), choice=choice))
    (line,) = axis_lines(replace(history(winner=won), axis_gains=gains))
    assert line.endswith(", trial 1; 15 % in the final rounds")


def test_status_and_page_have_it_where_a_plan_won() -> None:
    ended = replace(history(), axis_gains=GAINS)
    assert axis_lines(ended)[0] in status_lines(ended)
    assert status_record(ended)["axes"]["gains"][1]["gain"] == 1.214
    text = page(ended, Extras())
    assert "Gain of each axis" in text
    assert "&lt;zb-h1&gt;" in text
    assert status_record(history())["axes"] is None


def winning() -> RunHistory:
    """A run that has ended with a winner, without gains."""
    won = replace(PLAN, measurement=comparison(1.2), provenance=replace(PLAN.provenance, trial=1))
    return replace(history(), winner=won, state="finished", axis_gains=None)


NO_WINNER = replace(winning(), winner=None)
NO_MODEL = AxisGains(objective="tokens_per_s", gains=(), why_none="the model <is> left out")


@pytest.mark.parametrize(
    ("ended", "reason", "is_in_status"),
    [
        (replace(winning(), axis_gains=NO_MODEL), "no figures: the model <is> left out", True),
        (winning(), "no figures: best/axes.json is missing or cannot be read", True),
        (NO_WINNER, "no plan was proven faster than the baseline, so there are no gains to show", False),
        (replace(NO_WINNER, state="stopped"), "the search has not ended; the figures are computed", False),
        (replace(NO_WINNER, winner=PLAN), "no plan was proven faster than the baseline", False),
    ],
    ids=["the run says it", "no file", "no winner", "stopped", "a stand-in"],
)
def test_without_gains_one_line_says_why(ended: RunHistory, reason: str, is_in_status: bool) -> None:
    text = page(ended, Extras())
    section = text.partition("<h2>Gain of each axis</h2>")[2].partition("</section>")[0]
    assert section.count("<p") == 1
    assert html.escape(reason[1:], quote=False) in section
    assert "<table" not in section
    lines = [line for line in status_lines(ended) if line.startswith("axes")]
    assert lines == ([f"axes      {reason}"] if is_in_status else [])
