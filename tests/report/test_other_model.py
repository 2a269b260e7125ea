"""A winner of another model: what it costs, the way back, and the best plan of the user's own model."""

from dataclasses import replace
from html import escape

from quartet_plugin.model.history import Finalist
from quartet_plugin.report.other_model import NO_PAYBACK, other_model_words
from quartet_plugin.report.page import Extras, page
from quartet_plugin.report.search_expense import expense_of
from quartet_plugin.report.status import status_lines
from quartet_plugin.report.tables import plan_lines
from tests.report.histories import WINNER, comparison, history, row

DEEPER = replace(
    WINNER,
    shape=replace(WINNER.shape, num_layers=12),
    split=replace(WINNER.split, transformer_layers_per_stage=(6, 6)),
)
TRIALS = (
    row(0, 0.5, plan=None),
    row(1, 0.45),
    row(2, 0.4, plan=DEEPER),
    row(3, 0.425),
    row(4, 0.41, plan=DEEPER),
    row(5, 0.3, repeats=3),
)
OTHER = history(winner=DEEPER, trials=TRIALS, finalists=(), launch_s=1800.0, search_s=3600.0)
COST = (
    "another model (class D): it cannot load checkpoints of your own model, and how well it learns "
    "was not measured"
)


def test_status_and_page_warn_and_name_the_best_plan_of_the_users_model() -> None:
    lines = status_lines(OTHER)
    first = lines.index(f"model     {COST}")
    assert lines[first + 1] == (
        "          a search without `scaling` keeps your own model; best plan of your own model: trial 3, "
        "0.425 s/iteration, 1.18x as fast as the baseline in one launch: "
        "/runs/heavy-head/trials/000003/attempt-1/plan.json"
    )
    text = page(OTHER, Extras())
    for words in other_model_words(OTHER):
        assert escape(words[1:]) in text


def test_a_plan_of_the_final_rounds_goes_before_a_single_launch() -> None:
    run = replace(
        OTHER,
        finalists=(
            Finalist(number=2, comparison=comparison(1.25, ratios=(1.25, 1.25, 1.25))),
            Finalist(number=1, comparison=comparison(1.1, ratios=(1.1, 1.1, 1.1))),
        ),
    )
    words = "trial 1, 0.455 s/iteration, 1.10x (1.04x to 1.16x), measured in turns, paid back after "
    assert words in other_model_words(run)[1]


def test_no_plan_of_the_users_model_is_said() -> None:
    run = replace(OTHER, trials=(TRIALS[0], TRIALS[2]))
    assert other_model_words(run)[1].endswith("no other plan of your own model was measured")


def test_why_nothing_is_paid_back_is_said_once() -> None:
    assert expense_of(OTHER).payback_iterations is None
    assert sum(NO_PAYBACK in line for line in status_lines(OTHER)) == 1
    assert escape(NO_PAYBACK) in page(OTHER, Extras())


def test_the_users_own_model_has_no_such_words() -> None:
    run = history(launch_s=1800.0, search_s=3600.0)
    assert other_model_words(run) == ()
    assert not any("another model" in line or NO_PAYBACK in line for line in status_lines(run))
    assert not any(line.startswith("model ") for line in plan_lines(WINNER))


def test_a_plan_alone_sends_to_the_status_of_its_run() -> None:
    lines = plan_lines(DEEPER)
    first = lines.index(f"model     {COST}")
    assert f"`quartet status {DEEPER.provenance.run}`" in lines[first + 1]
    assert not any("quartet status" in line for line in plan_lines(replace(DEEPER, measurement=None)))
