"""What each axis gave, where it is shown."""

from dataclasses import replace

from quartet_plugin.model.axis_gains import AxisGain, AxisGains
from quartet_plugin.report.axis_gains import axis_lines
from quartet_plugin.report.page import Extras, page
from quartet_plugin.report.status import status_lines, status_record
from tests.report.histories import history

GAINS = AxisGains(
    objective="tokens_per_s",
    gains=(
        AxisGain(axis="micro-batch", gain=0.97, best_without="PP 2 · split 6+2 · zb-h1"),
        AxisGain(axis="split", gain=1.214, best_without="PP 2 · <zb-h1>"),
    ),
)


def test_the_axis_that_gave_most_comes_first_and_no_gain_is_nothing() -> None:
    first, second = axis_lines(GAINS)
    assert first.startswith("axes      layers per stage")
    assert first.endswith("21 % predicted; best without it PP 2 · <zb-h1>")
    assert second.split()[:2] == ["micro-batch", "nothing"]
    assert not second.startswith("axes")


def test_status_and_page_have_it_where_a_plan_won() -> None:
    ended = replace(history(), axis_gains=GAINS)
    assert axis_lines(GAINS)[0] in status_lines(ended)
    assert status_record(ended)["axes"]["gains"][1]["gain"] == 1.214
    text = page(ended, Extras())
    assert "What each axis gave" in text
    assert "&lt;zb-h1&gt;" in text
    assert "What each axis gave" not in page(history(), Extras())
    assert status_record(history())["axes"] is None
