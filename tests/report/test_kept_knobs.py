"""Why a knob that was asked for stayed as the command has it."""

from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Mapping, Plan, ScheduleChoice, Slot, Split
from quartet_plugin.report.kept_knobs import kept_lines
from quartet_plugin.report.page import Extras, page
from quartet_plugin.report.status import status_lines
from quartet_plugin.schedule.choice import choice_of
from quartet_plugin.schedule.named import named
from quartet_plugin.space.knobs.knob import LayoutKnob
from quartet_plugin.space.knobs.recompute import RECOMPUTE
from quartet_plugin.space.knobs.sequence_parallel import SEQUENCE_PARALLEL
from tests.model.plans import PLAN, plan_with
from tests.report.histories import INTERLEAVED, history, row
from tests.schedule.orders import unit_costs

NOTHING = "kept      the winner changes every searched axis of which a trial measured another value"
RECOMPUTED = plan_with(layout=RECOMPUTE.put(PLAN.layout, "full"))

IN_ORDER = Mapping(slots=(Slot(node=0, local=0), Slot(node=0, local=1)))
ZB_H1 = named("zb-h1", num_devices=2, num_microbatches=PLAN.num_microbatches)
FLAT = plan_with(
    layout=replace(PLAN.layout, pipeline_parallel=1, data_parallel=2),
    split=Split(transformer_layers_per_stage=(8,)),
    schedule=ScheduleChoice(name="no-pipelining"),
)


def tried(other: Plan, *, other_s: float, winner: Plan | None = None) -> list[str]:
    trials = (row(0, 0.5), row(1, 0.4), row(2, other_s, plan=other), row(3, 2.0, plan=other))
    return kept_lines(history(trials=trials, winner=winner))


def test_a_knob_that_gained_nothing_names_the_best_trial_that_changed_it() -> None:
    line = "kept      recompute none: with full, trial 2 reached 80 % of the speed of trial 1"
    assert tried(RECOMPUTED, other_s=0.5) == [line]
    assert tried(RECOMPUTED, other_s=0.5, winner=PLAN) == [line]


def test_only_plans_that_differ_in_the_knob_alone_are_compared() -> None:
    unlike = replace(RECOMPUTED, split=Split(transformer_layers_per_stage=(5, 3)))
    lines = tried(unlike, other_s=0.5)
    words = "recompute none: no two measured plans differ only in this; 2 of 4 plans changed it"
    assert any(line.endswith(words) for line in lines)


def test_many_trials_are_not_compared_each_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    put = LayoutKnob.put

    def counting(self: LayoutKnob, layout: Layout, value: Any) -> Layout:
        calls.append(value)
        return put(self, layout, value)

    monkeypatch.setattr(type(RECOMPUTE), "put", counting)
    trials = [row(number, 0.5 - number / 1000) for number in range(30)]
    trials += [row(number, 1.0 - number / 1000, plan=RECOMPUTED) for number in range(30, 60)]
    assert kept_lines(history(trials=tuple(trials), winner=None)) == [
        "kept      recompute none: with full, trial 59 reached 50 % of the speed of trial 29"
    ]
    assert len(calls) <= len(trials)


def test_nothing_is_said_of_a_knob_that_the_winner_changes_or_the_best_trial_has() -> None:
    assert tried(RECOMPUTED, other_s=0.5, winner=RECOMPUTED) == [NOTHING]
    assert tried(RECOMPUTED, other_s=0.3) == []


def test_the_best_trial_has_what_the_winner_does_not() -> None:
    line = "kept      recompute none: with full, trial 2 was the fastest single trial; the final rounds chose"
    assert tried(RECOMPUTED, other_s=0.3, winner=PLAN) == [f"{line} trial {PLAN.provenance.trial}"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (plan_with(mapping=IN_ORDER), "mapping 1,0: with stock"),
        (plan_with(split=Split(transformer_layers_per_stage=(5, 3))), "split 6+2: with 5+3"),
        (
            plan_with(schedule=ScheduleChoice(name="custom", custom=choice_of(ZB_H1, unit_costs(ZB_H1)))),
            "schedule 1f1b: with zb-h1",
        ),
    ],
)
def test_the_axes_of_a_plan_that_stay_are_listed(other: Plan, words: str) -> None:
    line = f"kept      {words}, trial 2 reached 80 % of the speed of trial 1"
    assert tried(other, other_s=0.5, winner=PLAN) == [line]
    assert tried(other, other_s=0.5, winner=other) == [NOTHING]


def test_other_stages_say_nothing_of_split_and_schedule() -> None:
    assert tried(INTERLEAVED, other_s=0.5) == []
    assert tried(FLAT, other_s=0.5) == []


def test_a_winner_without_a_pipeline_has_neither_split_nor_schedule() -> None:
    line = "split and schedule follow from PP 1: a plan with one stage has neither"
    run = history(trials=(row(0, 0.5), row(1, 0.4, plan=FLAT)), winner=FLAT)
    assert kept_lines(run) == [
        NOTHING,
        f"{'':<10}{line}",
    ]
    assert line[1:] in page(run, Extras())
    assert not any(line in words for words in kept_lines(history()))
    assert kept_lines(replace(run, state="running")) == []


def test_nothing_is_said_where_no_trial_changed_a_knob_that_its_layout_leaves_free() -> None:
    assert tried(PLAN, other_s=0.5) == []
    assert PLAN.layout.tensor_parallel == 1
    assert tried(plan_with(layout=SEQUENCE_PARALLEL.put(PLAN.layout, True)), other_s=0.5) == []
    assert kept_lines(history(trials=())) == []


def test_a_status_has_the_line_once_the_search_has_ended() -> None:
    trials = (row(0, 0.5), row(1, 0.4), row(2, 0.5, plan=RECOMPUTED))
    ended = history(trials=trials, winner=None)
    assert any(line.startswith("kept ") for line in status_lines(ended))
    assert "Unchanged knobs" in page(ended, Extras())
    running = replace(ended, state="running")
    assert not any(line.startswith("kept ") for line in status_lines(running))
    assert "Unchanged knobs" not in page(running, Extras())
