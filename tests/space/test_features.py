"""How far plans may change the training: what features keep, what is asked for, and what is labelled."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.job_description import Experts
from quartet_plugin.model.plan import Plan
from quartet_plugin.report.tables import changes, plan_lines
from quartet_plugin.space.features import Axis, locked_axes
from quartet_plugin.space.knob_table import knob_rows
from quartet_plugin.space.needed_flags import NEEDED_FLAGS, missing_flag_features
from quartet_plugin.space.param_sources import RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes
from tests.tuner.fakes import FakeMachine, Watching, tune
from tests.tuner.fakes import begin_with_journal as begin

BATCHING = ("moe_global_loss", "moe_capacity", "packing", "masked_tokens", "cyclic_data", "external_data")
LAYOUT = make_layout(data_parallel=2, micro_batch_size=2)


def space_of(
    feature: str | None, *, expert_parallel: int = 1, global_batch_size: int = 32, **search: object
) -> Space:
    layout = replace(LAYOUT, expert_parallel=expert_parallel)
    features = (feature,) if feature else ()
    job = make_job(layout=layout, features=features, global_batch_size=global_batch_size)
    config = parse_config({"search": search}, where="q.yaml").search
    return build_space(job, nodes=make_nodes(4), search=config, run="r", seed=0)


def plans_of(space: Space, *, num: int = 150) -> list[Plan]:
    generator = random.Random(0)
    return [space.decode(RandomParams(generator), trial=at + 1) for at in range(num)]


def batching(plan: Plan) -> tuple[int, int]:
    return plan.layout.micro_batch_size, plan.layout.data_parallel


@pytest.mark.parametrize("feature", BATCHING)
def test_what_can_change_the_objective_is_kept_unless_it_is_asked_for(feature: str) -> None:
    kept = plans_of(space_of(feature))
    assert {batching(plan) for plan in kept} == {(2, 2)}
    asked = plans_of(space_of(feature, change_class="C"))
    assert len({batching(plan) for plan in asked}) > 3
    for plan in asked:
        is_other = batching(plan) != (2, 2)
        assert any(change.change_class == "C" for change in changes(plan)) == is_other
        # The parity gate compares with the command as it is, which such a plan need not agree with.
        assert not is_other or plan.schedule.custom is None
    assert any(plan.schedule.custom is not None for plan in asked)
    labelled = next(plan for plan in asked if batching(plan) != (2, 2))
    assert any("class C: may change the training objective" in line for line in plan_lines(labelled))


@pytest.mark.parametrize("change_class", ["B", "C"])
def test_summed_gradients_keep_the_degrees_whatever_is_asked_for(change_class: str) -> None:
    """DeepSpeed's sum over copies of the model has another scale with another DP, which no class allows."""
    space = space_of("summed_gradients", change_class=change_class)
    assert space.locked == {Axis.DEGREES: "summed_gradients"}
    layouts = [plan.layout for plan in plans_of(space)]
    assert {(layout.pipeline_parallel, layout.data_parallel) for layout in layouts} == {(2, 2)}
    assert len({layout.micro_batch_size for layout in layouts}) > 1


def test_without_such_a_feature_class_c_is_class_b() -> None:
    plans = plans_of(space_of(None, change_class="C"))
    assert {change.change_class for plan in plans for change in changes(plan)} == {"A", "B"}


def test_class_a_keeps_what_rounds_reductions_otherwise() -> None:
    space = space_of(None, change_class="A")
    plans = plans_of(space)
    assert {change.change_class for plan in plans for change in changes(plan)} == {"A"}
    assert {plan.layout.label for plan in plans} > {LAYOUT.label}  # virtual stages
    assert len({plan.mapping for plan in plans}) > 1
    assert set(space.locked) == {Axis.DEGREES, Axis.MICRO_BATCH, Axis.OPTIONS}


def test_experts_that_no_plan_describes_keep_their_degrees() -> None:
    plans = plans_of(space_of("moe", expert_parallel=2))
    assert {plan.layout.data_parallel for plan in plans} == {2, 4}
    assert {(plan.layout.tensor_parallel, plan.layout.expert_parallel) for plan in plans} == {(1, 2)}


@pytest.mark.parametrize(
    ("features", "mtp_layers", "is_kept"),
    [
        (("mtp",), 1, False),
        (("mtp", "mtp_tied_head"), 1, True),
        (("hybrid",), None, False),
        (("hybrid", "hybrid_without_pattern"), None, True),
        (("fsdp",), None, True),
        (("cpu_offload",), None, True),
    ],
)
def test_features_that_keep_the_stages_leave_the_other_degrees(
    features: tuple[str, ...], mtp_layers: int | None, is_kept: bool
) -> None:
    layout = make_layout(pipeline_parallel=2, data_parallel=2)
    job = replace(make_job(layout=layout, features=features), mtp_layers=mtp_layers)
    space = build_space(
        job, nodes=make_nodes(4), search=parse_config({}, where="q.yaml").search, run="r", seed=0
    )
    plans = plans_of(space)
    assert {plan.made_for.mtp_layers for plan in plans} == {mtp_layers}
    assert len({plan.layout.tensor_parallel for plan in plans}) > 1
    pipelines = {plan.layout.pipeline_parallel for plan in plans}
    splits = {plan.split for plan in plans if plan.layout.num_stages == 2}
    schedules = {plan.schedule.label for plan in plans}
    assert (len(pipelines) > 1, len(splits) > 1, "zb-h1" in schedules) == (not is_kept,) * 3
    for plan in plans[:20]:
        assert plan.schedule.custom is not None or space.params_of(plan) is not None


@pytest.mark.parametrize("flex", [(), ("moe_flex_dispatcher",)])
def test_overlap_of_expert_communication_has_chunks_in_a_pipeline_and_several_experts_devices(
    flex: tuple[str, ...],
) -> None:
    """What Megatron asserts (megatron/core/transformer/transformer_config.py) is never offered."""
    experts = Experts(num_experts=4, experts_per_token=2, ffn_hidden_size=96)
    layout = replace(LAYOUT, pipeline_parallel=1, data_parallel=4, expert_parallel=4)
    job = make_job(
        layout=layout,
        features=("moe", "overlap_moe", *flex),
        experts=experts,
        no_custom_schedules="it runs through a schedule of its own",
    )
    search = parse_config({"search": {"recompute": "auto"}}, where="q.yaml").search
    space = build_space(job, nodes=make_nodes(4), search=search, run="r", seed=0)
    assert set(space.locked) == {Axis.SCALING}
    plans = plans_of(space, num=300)
    assert all(plan.schedule.custom is None for plan in plans)
    assert all(plan.layout.expert_parallel > 1 for plan in plans)
    shapes = {(plan.layout.pipeline_parallel, plan.layout.virtual_stages) for plan in plans}
    assert (1, 1) in shapes
    assert {chunks for ranks, chunks in shapes if ranks > 1} == {2, 4}
    assert {plan.layout.recompute for plan in plans} == {"none", "selective"}
    assert len({plan.layout.tensor_parallel for plan in plans}) > 1


def test_the_flex_dispatcher_has_devices_to_exchange_tokens_with() -> None:
    experts = Experts(num_experts=4, experts_per_token=2, ffn_hidden_size=96)
    layout = replace(LAYOUT, pipeline_parallel=1, data_parallel=4, expert_parallel=4)
    job = make_job(layout=layout, features=("moe", "moe_flex_dispatcher"), experts=experts)
    search = parse_config({"search": {"schedule": "stock"}}, where="q.yaml").search
    plans = plans_of(build_space(job, nodes=make_nodes(4), search=search, run="r", seed=0))
    assert {plan.layout.expert_parallel for plan in plans} == {2, 4}


def test_degrees_of_experts_are_tuned() -> None:
    experts = Experts(num_experts=4, experts_per_token=2, ffn_hidden_size=96)
    job = make_job(layout=LAYOUT, features=("moe",), experts=experts)
    search = parse_config({"search": {"schedule": ["no-pipelining", "1f1b"]}}, where="q.yaml").search
    plans = plans_of(build_space(job, nodes=make_nodes(4), search=search, run="r", seed=0), num=300)
    degrees = {(plan.layout.data_parallel, plan.layout.expert_parallel) for plan in plans}
    assert degrees == {(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)}
    assert len({plan.layout.micro_batch_size for plan in plans}) > 1
    with_tensor = [plan.layout for plan in plans if plan.layout.tensor_parallel > 1]
    assert with_tensor
    assert all(layout.sequence_parallel for layout in with_tensor)
    assert len({plan.mapping for plan in plans}) > 1


def test_a_loss_of_one_microbatch_keeps_the_micro_batch_alone() -> None:
    plans = plans_of(space_of("moe_microbatch_loss", schedule=["1f1b", "zb-h1"], virtual_stages=1), num=60)
    assert {plan.layout.micro_batch_size for plan in plans} == {2}
    assert len({plan.layout.data_parallel for plan in plans}) > 1
    assert any(plan.layout.data_parallel != 2 and plan.schedule.custom is not None for plan in plans)


def test_a_kept_micro_batch_leaves_the_degrees_that_it_divides_the_batch_with() -> None:
    """DP 4 divides a batch of 12, but not with a micro-batch of 2."""
    space = space_of("moe_microbatch_loss", global_batch_size=12)
    layouts = space.layouts[space.job.shape]
    assert {(layout.micro_batch_size, layout.data_parallel) for layout in layouts} == {(2, 1), (2, 2)}


@pytest.mark.parametrize("change_class", ["B", "C"])
def test_a_sinkhorn_router_keeps_the_devices_that_share_a_sequence(change_class: str) -> None:
    """It balances the tokens of one rank, which has a part of each sequence."""
    experts = Experts(num_experts=4, experts_per_token=2, ffn_hidden_size=96)
    layout = replace(LAYOUT, tensor_parallel=2, pipeline_parallel=1, sequence_parallel=True)
    features = ("moe", "moe_sinkhorn")
    job = make_job(layout=layout, features=features, experts=experts, shares_sequences=True)
    search: dict[str, object] = {"change_class": change_class, "context_parallel": "auto"}
    search |= {"sequence_parallel": "auto", "schedule": ["no-pipelining", "1f1b"]}
    config = parse_config({"search": search}, where="q.yaml").search
    space = build_space(job, nodes=make_nodes(4), search=config, run="r", seed=0)
    layouts = [plan.layout for plan in plans_of(space)]
    assert {(layout.tensor_parallel, layout.context_parallel) for layout in layouts} == {(2, 1)}
    assert all(layout.sequence_parallel for layout in layouts)
    assert len({layout.pipeline_parallel for layout in layouts}) > 1
    assert (len({layout.micro_batch_size for layout in layouts}) > 1) == (change_class == "C")
    states = {row.knob.name: row.state for row in knob_rows(space)}
    reason = "a sinkhorn router balances the tokens of one rank"
    assert states["tensor_parallel"] == states["context_parallel"] == f"kept: {reason}"
    asked = config.model_copy(update={"tensor_parallel": (4,)})
    with pytest.raises(ConfigError, match=f"tensor_parallel: 4; must be the command.s own 2: {reason}"):
        build_space(job, nodes=make_nodes(4), search=asked, run="r", seed=0)


def test_a_plan_that_shares_a_sinkhorn_routers_tokens_otherwise_is_of_class_c() -> None:
    plan = space_of("moe_sinkhorn").baseline
    other = replace(plan, layout=replace(plan.layout, tensor_parallel=2, data_parallel=1))
    assert {change.part: change.change_class for change in changes(other)}["TP"] == "C"
    made_for = replace(plan.made_for, batching_features=("moe_microbatch_loss",))
    usual = changes(replace(other, made_for=made_for))
    assert {change.part: change.change_class for change in usual}["TP"] == "B"


def test_an_unknown_feature_keeps_everything_whatever_is_asked_for() -> None:
    assert set(locked_axes(["something-new"], change_class="C")) == set(Axis)


def test_the_tuner_says_what_is_kept_and_how_it_is_asked_for(tmp_path: Path) -> None:
    kept, asked = Watching(), Watching()
    job = make_job(features=("packing",))
    tune(begin(tmp_path / "a", study={"trials": 2}), FakeMachine(job=job), observer=kept)
    how = "(search.change_class: C tunes degrees and micro_batch)"
    assert f"not tuned because of packing (docs/support.md): degrees, micro_batch {how}" in kept.messages
    search = {"change_class": "C"}
    tune(begin(tmp_path / "b", search=search, study={"trials": 2}), FakeMachine(job=job), observer=asked)
    assert not any("not tuned" in text for text in asked.messages)


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        ("expert_tensor_parallel", "whole nodes move, each with its ranks in order"),
        ("moe_flex_dispatcher", "ranks that share experts move together, or inside their nodes"),
    ],
)
def test_the_tuner_says_which_orders_a_feature_leaves(tmp_path: Path, feature: str, words: str) -> None:
    said = Watching()
    job = make_job(features=(feature,))
    tune(begin(tmp_path / "a", study={"trials": 2}), FakeMachine(job=job), observer=said)
    assert any(words in text for text in said.messages)


def test_the_tuner_says_why_backwards_are_not_split(tmp_path: Path) -> None:
    said = Watching()
    reason = "--fp8-format: backwards are not split, because delayed gradients were not tried"
    tune(
        begin(tmp_path / "a", study={"trials": 2}),
        FakeMachine(job=make_job(full_backward=reason)),
        observer=said,
    )
    assert (
        f"{reason}; schedules with a split backward are tried only if search.schedule lists them"
        in said.messages
    )


def test_a_flag_that_megatron_lacks_keeps_the_axes_that_need_it() -> None:
    known = {name for names in NEEDED_FLAGS.values() for name in names}
    assert missing_flag_features(known) == ()
    (feature,) = missing_flag_features(known - {"pipeline_model_parallel_layout"})
    assert feature == "without --pipeline-model-parallel-layout"
    locked = locked_axes([feature], change_class="B")
    assert locked == dict.fromkeys((Axis.SPLIT, Axis.SCHEDULE, Axis.DEGREES), feature)
    plans = plans_of(space_of(feature), num=20)
    assert {plan.layout.degrees for plan in plans} == {LAYOUT.degrees}
    assert len({plan.layout.micro_batch_size for plan in plans}) > 1


@pytest.mark.parametrize("change_class", ["B", "C"])
@pytest.mark.parametrize(
    ("feature", "axes"),
    [
        ("eval_micro_batch", {Axis.DEGREES}),
        ("eval_batch", {Axis.DEGREES, Axis.MICRO_BATCH}),
    ],
)
def test_a_batch_of_the_evaluation_keeps_what_divides_it(
    feature: str, axes: set[Axis], change_class: str
) -> None:
    """Megatron asserts it in the trials of other plans, too (validate_args)."""
    space = space_of(feature, change_class=change_class)
    assert space.locked == dict.fromkeys(axes, feature)
    plans = plans_of(space, num=60)
    assert {plan.layout.data_parallel for plan in plans} == {2}
    assert (len({plan.layout.micro_batch_size for plan in plans}) > 1) == (Axis.MICRO_BATCH not in axes)


@pytest.mark.parametrize("feature", ["cp_comm_by_layer", "no_rope_pattern", "window_by_layer"])
def test_a_value_for_each_layer_keeps_the_number_of_layers(feature: str) -> None:
    search = parse_config({"search": {"scaling": {"tolerance": 0.1}}}, where="q.yaml").search
    for features, is_scaled in (((), True), ((feature,), False)):
        job = make_job(layout=LAYOUT, features=features)
        space = build_space(job, nodes=make_nodes(4), search=search, run="r", seed=0)
        assert (len(space.shapes) > 1) == is_scaled
    assert space.locked == {Axis.SCALING: feature}
