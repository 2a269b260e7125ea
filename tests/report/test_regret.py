"""What a search may have missed, where it is shown."""

import json
from dataclasses import replace

from quartet_plugin.model.history import DriftMeasurement
from quartet_plugin.model.measurement import Interval, Regret
from quartet_plugin.report.launch_words import COMMAND
from quartet_plugin.report.page import Extras, page
from quartet_plugin.report.status import (
    WINNER,
    regret_lines,
    regret_words,
    status_lines,
    status_record,
)
from tests.model.test_measurement import REGRET
from tests.report.histories import history

MOVED = (DriftMeasurement(num_tried=5, ratio=1.02), DriftMeasurement(num_tried=10, ratio=2.11))
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
    first, second, third, fourth = regret_lines(REGRET, compared_with=WINNER, checks=MOVED)
    assert first == (
        "regret    an untried plan may be faster than the winner by about 1.0 % (0.0 to 6.0 %), "
        "by more than 2 % with probability 30 %"
    )
    assert "pp2 mb2, 6+2, zb-h1: the best untried plan in 25 % of random samples" in second
    assert "160 of the 173 plans compared are untried; their times are predicted" in third
    assert third.endswith("; 12 trials and your command were measured")
    assert fourth.strip() == (
        "only untried plans are covered: a tried plan that was not a finalist was measured once, and may be "
        "faster than that single trial"
    )
    paragraph = regret_words(REGRET, compared_with=WINNER)
    assert paragraph.endswith(f"were measured. O{fourth.strip()[1:]}.")
    assert regret_lines(EVERY, compared_with=WINNER) == ["regret    none: every plan of the space was tried"]


def test_without_a_winner_the_figure_is_over_the_own_command_and_its_doubt_is_said() -> None:
    lines = regret_lines(REGRET, compared_with=COMMAND, checks=MOVED)
    assert lines[0].startswith("regret    an untried plan may be faster than your command by about 1.0 %")
    assert lines[4] == (
        "          the regret is based on the first measurement of your command, which later ran at "
        "2.11x of it; the estimate may be off by that ratio"
    )
    steady = (DriftMeasurement(num_tried=10, ratio=1.08),)
    assert len(regret_lines(REGRET, compared_with=COMMAND, checks=steady)) == 4
    assert "2.11x of it; the estimate may be" in regret_words(REGRET, compared_with=COMMAND, checks=MOVED)


def test_status_shows_it_once_it_is_known() -> None:
    ended = replace(history(), regret=REGRET)
    assert regret_lines(REGRET, compared_with=WINNER)[0] in status_lines(ended)
    lost = replace(ended, winner=None)
    assert regret_lines(REGRET, compared_with=COMMAND)[0] in status_lines(lost)
    assert json.loads(json.dumps(status_record(ended)))["regret"]["gain"]["high"] == 0.06
    assert not any(line.startswith("regret") for line in status_lines(history()))
    assert status_record(history())["regret"] is None


def test_the_page_shows_it_as_text() -> None:
    hostile = replace(REGRET, likely="<script>alert(1)</script>")
    text = page(replace(history(), regret=hostile), Extras())
    assert "Regret" in text
    assert "about 1.0 % (0.0 to 6.0 %)" in text
    assert "<script>" not in text
    assert "Regret" not in page(history(), Extras())
    assert regret_words(EVERY, compared_with=WINNER).startswith("Every plan")
