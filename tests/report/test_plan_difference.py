"""The words for what a plan changes: every part that differs, another model first."""

from dataclasses import fields, replace
from typing import Any

import pytest

from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Mapping, ScheduleChoice, Slot, Split
from quartet_plugin.report.page import Extras, page
from quartet_plugin.report.plan_difference import (
    difference_lines,
    difference_sentence,
    difference_words,
)
from quartet_plugin.space.knobs.knob import SettingKnob
from quartet_plugin.space.knobs.registry import LAYOUT_KNOBS
from tests.model.plans import LAYOUT, PLAN, SHAPE
from tests.report.histories import INTERLEAVED, WINNER, history

STOCK = Mapping(slots=(Slot(node=0, local=0), Slot(node=0, local=1)))
BASELINE = replace(PLAN, split=PLAN.made_for.baseline.split, mapping=STOCK)


def test_parts_that_differ_are_said_and_no_others() -> None:
    assert difference_words(BASELINE) == ()
    assert difference_lines(BASELINE) == []
    assert difference_lines(PLAN) == ["differs   layers per stage 4+4 become 6+2; ranks 1,0"]
    assert difference_sentence(BASELINE) == "no setting differs from your command"
    assert difference_sentence(PLAN) == "layers per stage 4+4 become 6+2; ranks 1,0"
    assert difference_words(INTERLEAVED) == (
        "virtual stages 1 becomes 2",
        "1F1B becomes interleaved g2",
        "layers per stage 4+4 become 3+2+2+1",
        "ranks 1,0",
    )


def test_another_stage_of_multi_token_prediction_is_said() -> None:
    made_for = replace(BASELINE.made_for, mtp_layers=1)
    plan = replace(BASELINE, made_for=made_for, split=Split.of((8, 0), is_mtp_before_last=True))
    assert difference_words(plan) == (
        "layers per stage 4+4 become 8+0",
        "multi-token prediction moves to the stage before the last one",
    )
    command = replace(made_for, baseline=replace(made_for.baseline, split=plan.split))
    last = replace(plan, made_for=command, split=Split.of((8, 0)))
    assert difference_words(last) == ("multi-token prediction moves to the last stage",)


def test_without_a_pipeline_no_layers_per_stage_are_said() -> None:
    layout = replace(
        LAYOUT, pipeline_parallel=1, data_parallel=2, recompute="full", distributed_optimizer=True
    )
    plan = replace(
        BASELINE,
        layout=layout,
        split=Split(transformer_layers_per_stage=(8,)),
        schedule=ScheduleChoice(name="no-pipelining"),
    )
    assert difference_sentence(plan) == (
        "pipeline parallel 2 becomes 1; data parallel 1 becomes 2; distributed optimizer off becomes on; "
        "recompute none becomes full; 1F1B becomes no pipeline"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"num_layers": 6, "hidden_size": 320},
            "ANOTHER MODEL of another width and depth: 8 layers, hidden 256, 4 heads, FFN 1024 become "
            "6 layers, hidden 320, 4 heads, FFN 1024, at +",
        ),
        ({"num_layers": 6}, "ANOTHER MODEL of another depth: "),
        ({"hidden_size": 320}, "ANOTHER MODEL of another width: "),
        ({"num_query_groups": 2}, "ANOTHER MODEL of another shape: "),
    ],
)
def test_another_model_is_said_first(changes: dict[str, Any], words: str) -> None:
    shape = replace(SHAPE, **changes)
    half = shape.num_layers // 2
    plan = replace(PLAN, shape=shape, split=Split(transformer_layers_per_stage=(half + 1, half - 1)))
    assert difference_words(plan)[0].startswith(words)
    lines = difference_lines(plan)
    assert len(lines) == 2
    assert lines[0].startswith(f"differs   {words}")
    assert lines[1].startswith("          layers per stage 4+4 become ")


def test_equal_flops_are_called_equal() -> None:
    # Half of the layers, each with twice the FFN and twice the heads.
    shape = replace(
        SHAPE, num_layers=4, ffn_hidden_size=2048, num_attention_heads=8, num_query_groups=8, kv_channels=64
    )
    plan = replace(BASELINE, shape=shape, split=Split(transformer_layers_per_stage=(2, 2)))
    assert shape.model_flops_per_sequence == SHAPE.model_flops_per_sequence
    assert "at equal FLOPs and +0.0 % parameters" in difference_words(plan)[0]


def test_every_part_of_a_layout_is_a_knob() -> None:
    known = {"settings" if isinstance(knob, SettingKnob) else knob.name for knob in LAYOUT_KNOBS} - {
        "zero_stage"
    }
    assert known == {field.name for field in fields(Layout)}


def test_a_setting_that_a_plan_changes_is_said() -> None:
    plan = replace(BASELINE, layout=BASELINE.layout.with_setting("overlap_grad_reduce", True))
    assert difference_words(plan) == ("overlap grad reduce the command's becomes on",)


def test_the_report_says_it_in_its_head() -> None:
    text = page(history(winner=WINNER), Extras())
    assert f"Against your command: {difference_sentence(WINNER)}." in text
    assert text.index("Against your command") < text.index('class="cards"')
