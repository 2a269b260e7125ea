"""Why a knob that was asked for stayed as the command has it."""

from dataclasses import replace

from quartet_plugin.model.plan import Plan
from quartet_plugin.report.kept_knobs import kept_lines
from quartet_plugin.report.page import Extras, page
from quartet_plugin.report.status import status_lines
from quartet_plugin.space.knobs.recompute import RECOMPUTE
from quartet_plugin.space.knobs.sequence_parallel import SEQUENCE_PARALLEL
from tests.model.plans import PLAN, plan_with
from tests.report.histories import history, row

RECOMPUTED = plan_with(layout=RECOMPUTE.put(PLAN.layout, "full"))


def tried(other: Plan, *, other_s: float, winner: Plan | None = None) -> list[str]:
    trials = (row(0, 0.5), row(1, 0.4), row(2, other_s, plan=other), row(3, 2.0, plan=other))
    return kept_lines(history(trials=trials, winner=winner))


def test_a_knob_that_gained_nothing_names_the_best_trial_that_changed_it() -> None:
    line = "kept      recompute none: with full, trial 2 reached 80 % of the speed of trial 1"
    assert tried(RECOMPUTED, other_s=0.5) == [line]
    assert tried(RECOMPUTED, other_s=0.5, winner=PLAN) == [line]


def test_nothing_is_said_of_a_knob_that_the_winner_changes_or_the_best_trial_has() -> None:
    assert tried(RECOMPUTED, other_s=0.5, winner=RECOMPUTED) == []
    assert tried(RECOMPUTED, other_s=0.3) == []


def test_nothing_is_said_where_no_trial_changed_a_knob_that_its_layout_leaves_free() -> None:
    assert tried(PLAN, other_s=0.5) == []
    assert PLAN.layout.tensor_parallel == 1
    assert tried(plan_with(layout=SEQUENCE_PARALLEL.put(PLAN.layout, True)), other_s=0.5) == []
    assert kept_lines(history(trials=())) == []


def test_a_status_has_the_line_once_the_search_has_ended() -> None:
    trials = (row(0, 0.5), row(1, 0.4), row(2, 0.5, plan=RECOMPUTED))
    ended = history(trials=trials, winner=None)
    assert any(line.startswith("kept ") for line in status_lines(ended))
    assert "What stayed as in your command" in page(ended, Extras())
    running = replace(ended, state="running")
    assert not any(line.startswith("kept ") for line in status_lines(running))
    assert "What stayed as in your command" not in page(running, Extras())
