"""A plan in one line: each part with its label, and none that does nothing."""

from dataclasses import replace

from quartet_plugin.model.frameworks import DEEPSPEED
from quartet_plugin.model.plan import Split
from quartet_plugin.space.plan_label import plan_label
from tests.model.plans import MADE_FOR, PLAN, SHAPE
from tests.space.jobs import make_layout, make_shape


def test_parts_have_labels() -> None:
    assert plan_label(PLAN) == "PP 2 · MB 4 · split 6+2 · 1f1b · ranks 1,0"
    wider = make_shape(num_layers=10)
    other = replace(PLAN, shape=wider, split=Split(transformer_layers_per_stage=(5, 5)))
    assert plan_label(other).startswith(f"model {wider.label} · PP 2 · MB 4 · split 5+5")
    assert SHAPE.label not in plan_label(PLAN)


def test_multi_token_prediction_has_its_stage() -> None:
    made_for = replace(MADE_FOR, mtp_layers=1)
    for is_before_last, stage in ((None, "the last stage"), (True, "the stage before the last one")):
        split = Split(transformer_layers_per_stage=(8, 0), mtp_before_last=is_before_last)  # type: ignore[arg-type]
        plan = replace(PLAN, made_for=made_for, split=split)
        assert plan_label(plan) == f"PP 2 · MB 4 · split 8+0 · MTP 1 on {stage} · 1f1b · ranks 1,0"


def test_what_does_nothing_is_left_out() -> None:
    made_for = replace(MADE_FOR, world_size=1, nodes=(replace(MADE_FOR.nodes[0], num_slots=1),))
    alone = replace(
        PLAN,
        made_for=made_for,
        layout=make_layout(pipeline_parallel=1, micro_batch_size=2),
        split=Split(transformer_layers_per_stage=(8,)),
        schedule=replace(PLAN.schedule, name="no-pipelining"),
        mapping=replace(PLAN.mapping, slots=PLAN.mapping.slots[1:]),
    )
    assert plan_label(alone) == "MB 2"


def test_switches_words_and_settings() -> None:
    layout = replace(PLAN.layout, recompute="full", distributed_optimizer=True)
    megatron = replace(PLAN, layout=layout.with_setting("overlap_grad_reduce", False))
    assert plan_label(megatron) == (
        "PP 2 · MB 4 · distributed optimizer · recompute full · overlap_grad_reduce off · "
        "split 6+2 · 1f1b · ranks 1,0"
    )
    deepspeed = replace(
        PLAN,
        made_for=replace(MADE_FOR, framework=DEEPSPEED.framework),
        layout=replace(layout, recompute="none"),
    )
    assert plan_label(deepspeed) == "PP 2 · MB 4 · ZeRO 1 · split 6+2 · 1f1b · ranks 1,0"
