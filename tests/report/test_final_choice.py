"""The words of the winner's choice: the same in `quartet show`, `quartet status` and the report."""

import json
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest

from quartet_plugin.model.measurement import FinalChoice
from quartet_plugin.model.plan import Plan, read_plan, write_plan
from quartet_plugin.report.final_choice import choice_lines, choice_paragraph
from quartet_plugin.report.page import Extras, page
from quartet_plugin.report.status import status_lines, status_record
from quartet_plugin.report.tables import plan_lines
from quartet_plugin.space.plan_label import plan_label
from tests.report.histories import WINNER, comparison, history

CHOICE = FinalChoice(
    rule="the faster in the same rounds",
    runner_up=9,
    gain=1.088,
    chance_better=0.942,
    num_rounds=5,
    is_runner_up_win=True,
    is_runner_up_other_model=True,
)
LINES = [
    "chosen    the faster in the same rounds",
    "runner-up trial 9, another model: trial 2 is 1.088x as fast as trial 9, the median ratio of the "
    "same 5 rounds, probability of being faster 94 %",
]


def chosen(choice: FinalChoice) -> Plan:
    return replace(WINNER, measurement=replace(comparison(1.25), choice=choice))


def test_the_same_words_stand_wherever_the_winner_does() -> None:
    plan = chosen(CHOICE)
    run = history(winner=plan)
    assert choice_lines(plan) == LINES
    assert plan_lines(plan)[-2:] == LINES
    lines = status_lines(run)
    first = lines.index(LINES[0])
    assert lines[first - 2].startswith("winner    trial 2")
    assert lines[first - 1].strip() == plan_label(plan)
    assert lines[first + 1] == LINES[1]
    assert escape(choice_paragraph(plan)) in page(run, Extras())
    assert all(line[10:] in choice_paragraph(plan) for line in LINES)
    assert status_record(run)["choice"]["runner_up"] == 9


def test_a_runner_up_that_is_faster_is_said_with_the_reason() -> None:
    other_model = replace(CHOICE, gain=1 / 1.03, chance_better=0.1)
    assert choice_lines(chosen(other_model))[1] == (
        "runner-up trial 9, another model: trial 9 is 1.030x as fast as trial 2, the median ratio of the "
        "same 5 rounds, probability of being faster 90 %; the gain is too small or too uncertain to "
        "prefer another model"
    )
    unsure = replace(other_model, is_runner_up_other_model=False, is_runner_up_win=False)
    assert choice_lines(chosen(unsure))[1].endswith("; trial 9 is not proven faster than your command")
    assert choice_lines(chosen(replace(unsure, proof_level=0.00803)))[1].endswith(
        "your command: a proof requires an error probability of at most 0.8 %; "
        "a 95 % interval above 1.00x corresponds to 2.5 %"
    )


def test_the_selection_and_a_chance_that_cannot_be_larger_are_said() -> None:
    sure = replace(CHOICE, chance_better=0.96875, selection="2 finalists of 3 plans")
    first, second, third = choice_lines(chosen(sure))
    assert first == "selected  2 finalists of 3 plans"
    assert second == LINES[0]
    assert third.endswith("probability of being faster 97 % (the maximum for 5 rounds)")
    assert "Selected: 2 finalists of 3 plans. Chosen: " in choice_paragraph(chosen(sure))


def test_few_shared_rounds_and_no_runner_up_are_said() -> None:
    few = replace(CHOICE, chance_better=None, num_rounds=2)
    assert "by the ratio of their speedups: they share only 2 rounds" in choice_lines(chosen(few))[1]
    unproven = replace(few, is_runner_up_win=False)
    assert choice_lines(chosen(unproven))[1].endswith(
        "; trial 9 was dropped after 2 rounds, not proven faster than your command"
    )
    assert "is not proven" not in choice_lines(chosen(unproven))[1]
    assert choice_lines(chosen(FinalChoice(rule="x")))[1].startswith("runner-up none")


def test_a_plan_of_an_earlier_release_has_no_such_lines() -> None:
    assert WINNER.measurement is not None
    assert choice_lines(WINNER) == []
    assert choice_paragraph(WINNER) == ""
    assert choice_lines(replace(WINNER, measurement=None)) == []
    assert "Chosen" not in page(history(), Extras())
    assert status_record(history())["choice"] is None


def test_the_choice_is_in_the_plans_file(tmp_path: Path) -> None:
    plan, path = chosen(CHOICE), tmp_path / "plan.json"
    write_plan(plan, path=path)
    assert read_plan(path) == plan
    assert plan.key == WINNER.key
    content = json.loads(path.read_text())
    assert content["measurement"]["choice"]["runner_up"] == 9
    write_plan(WINNER, path=path)
    assert "choice" not in json.loads(path.read_text())["measurement"]


@pytest.mark.parametrize("rule", ["a\x1b[31m\nb", "<b>x</b>"])
def test_a_rule_from_a_file_stays_text(rule: str) -> None:
    plan = chosen(replace(CHOICE, rule=rule))
    assert all(line.isprintable() for line in choice_lines(plan))
    assert "<b>x" not in page(history(winner=plan), Extras())
