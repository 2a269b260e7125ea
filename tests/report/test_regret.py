"""What a search may have missed, where it is shown."""

import json
from dataclasses import replace

from quartet_plugin.model.measurement import Interval, Regret
from quartet_plugin.report.page import Extras, page
from quartet_plugin.report.status import regret_lines, regret_words, status_lines, status_record
from tests.model.test_measurement import REGRET
from tests.report.histories import history

EVERY = Regret(
    gain=Interval(median=0.0, low=0.0, high=0.0),
    notable=0.0,
    likely=None,
    likely_chance=0.0,
    num_untried=0,
    num_measured=5,
    source="every plan was tried",
)


def test_the_closing_lines_have_the_figure_the_plan_and_the_basis() -> None:
    first, second, third = regret_lines(REGRET)
    assert first == (
        "regret    an untried plan may be faster by about 1.0 % (0.0 to 6.0 %), "
        "by more than 2 % with a chance of 30 %"
    )
    assert "pp2 mb2, 6+2, zb-h1: the best in 25 %" in second
    assert "160 untried plans of the 173 compared" in third
    assert third.endswith("; 12 trials and your own command were measured")
    assert regret_lines(EVERY) == ["regret    none: every plan of the space was tried"]


def test_status_shows_it_once_it_is_known() -> None:
    ended = replace(history(), regret=REGRET)
    assert regret_lines(REGRET)[0] in status_lines(ended)
    assert json.loads(json.dumps(status_record(ended)))["regret"]["gain"]["high"] == 0.06
    assert not any(line.startswith("regret") for line in status_lines(history()))
    assert status_record(history())["regret"] is None


def test_the_page_shows_it_as_text() -> None:
    hostile = replace(REGRET, likely="<script>alert(1)</script>")
    text = page(replace(history(), regret=hostile), Extras())
    assert "What may have been missed" in text
    assert "about 1.0 % (0.0 to 6.0 %)" in text
    assert "<script>" not in text
    assert "What may have been missed" not in page(history(), Extras())
    assert regret_words(EVERY).startswith("Every plan")
