"""A plan in flags: only what differs, and what it was made for is checked."""

import re
import shlex
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import PlanError
from quartet_plugin.megatron.apply import check_fit, rewrite
from quartet_plugin.model.job_description import EqualDevices, JobDescription
from quartet_plugin.model.layout import SettingValue
from quartet_plugin.model.megatron_arguments import layout_of, num_mtp_layers_of, shape_of, split_of
from quartet_plugin.model.plan import ScheduleChoice, Split
from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.rank.failure import kind_of
from quartet_plugin.schedule.choice import choice_of
from quartet_plugin.schedule.named import named
from quartet_plugin.space.knobs import registry
from quartet_plugin.space.knobs.cp_comm_type import CP_COMM_TYPE, HIERARCHICAL_SIZES
from quartet_plugin.space.knobs.expert_parallel import EXPERT_PARALLEL
from quartet_plugin.space.knobs.expert_tensor_parallel import EXPERT_TENSOR_PARALLEL
from quartet_plugin.space.knobs.knob import LiveJob
from quartet_plugin.space.knobs.offload_modules import OFFLOAD_MODULES
from quartet_plugin.space.knobs.registry import KNOBS, SETTINGS, settings_of
from quartet_plugin.space.knobs.token_dispatcher import TOKEN_DISPATCHER
from quartet_plugin.space.knobs.use_megatron_fsdp import USE_MEGATRON_FSDP
from tests.megatron.entry_launch import MEGATRON_FLAGS, SHAPE, make_plan
from tests.megatron.native import native_flags
from tests.runtime.pipelines import stage_costs
from tests.space.knobs.made_up import ROPE_FUSION


def test_own_configuration_changes_nothing() -> None:
    words = [*MEGATRON_FLAGS, "--pipeline-model-parallel-size=2", "--tensor-model-parallel-size", "2"]
    plan = make_plan(split=(3, 3), pipeline=2, tensor=2)
    assert rewrite(plan, flags=native_flags(), words=words) == (words, [])


def test_uneven_split_is_written_out() -> None:
    words = [*MEGATRON_FLAGS, "--pipeline-model-parallel-size", "2"]
    edited, notes = rewrite(make_plan(split=(5, 1), pipeline=2), flags=native_flags(), words=words)
    assert edited == [*words, "--pipeline-model-parallel-layout", "Ettttt|tL"]
    assert notes == ["the plan adds --pipeline-model-parallel-layout 'Ettttt|tL'"]


TWO_TIMES_TWO = ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2")


@pytest.mark.parametrize(
    ("placement", "stages", "is_written"),
    [
        ((0, 1, 1, 0), TWO_TIMES_TWO, True),
        ((0, 1, 0, 1), TWO_TIMES_TWO, False),
        ((0, 2, 1), ("--pipeline-model-parallel-size", "3"), True),
        ((0, 1, 2), ("--pipeline-model-parallel-size", "3"), False),
    ],
)
def test_stages_in_another_order_than_megatrons_are_written_out(
    placement: tuple[int, ...], stages: tuple[str, ...], is_written: bool
) -> None:
    """Also where the command has the plan's split already: without a layout Megatron counts in a loop."""
    num_stages, num_devices = len(placement), max(placement) + 1
    shape = replace(SHAPE, num_layers=num_stages * 2)
    stock = make_plan(
        split=(2,) * num_stages,
        pipeline=num_devices,
        chunks=num_stages // num_devices,
        group=num_devices if num_stages > num_devices else None,
        shape=shape,
        made_for_shape=shape,
    )
    made = choice_of(named("gpipe", num_devices=num_stages, num_microbatches=4), stage_costs(placement))
    custom = replace(made, placement=placement)
    plan = replace(stock, schedule=ScheduleChoice(name="custom", custom=custom))
    words = [*MEGATRON_FLAGS, "--num-layers", str(num_stages * 2), *stages]
    edited, _ = rewrite(plan, flags=native_flags(), words=words)
    layout = plan.split.megatron_layout if is_written else None
    assert native_flags().explicit_values(edited).get("pipeline_model_parallel_layout") == layout
    assert rewrite(stock, flags=native_flags(), words=words) == (words, [])
    # A layout that the command has is placed as it is.
    written = [*words, "--pipeline-model-parallel-layout", plan.split.megatron_layout]
    assert rewrite(plan, flags=native_flags(), words=written)[0] == written


def test_layers_of_multi_token_prediction_lie_before_the_head() -> None:
    words = [*MEGATRON_FLAGS, "--pipeline-model-parallel-size", "2", "--mtp-num-layers", "1"]
    plan = make_plan(split=(6, 0), pipeline=2)
    edited, _ = rewrite(plan, flags=native_flags(), words=words)
    assert edited[len(words) :] == ["--pipeline-model-parallel-layout", "Etttttt|mL"]
    user = native_flags().values(words)
    with pytest.raises(PlanError, match=r"mtp_layers 1 \(plan: None\)"):
        check_fit(plan, user, version="0.19.2", world_size=2)
    made_for = replace(plan.made_for, mtp_layers=1)
    check_fit(replace(plan, made_for=made_for), user, version="0.19.2", world_size=2)


def test_layers_of_multi_token_prediction_stay_before_the_last_stage() -> None:
    words = [*MEGATRON_FLAGS, *shlex.split("--pipeline-model-parallel-size 4 --mtp-num-layers 1")]
    command = [*words, "--pipeline-model-parallel-layout", "Ettt|t*3|m|L"]
    plan = make_plan(split=(2, 2, 1, 1), pipeline=4)
    split = Split(transformer_layers_per_stage=(3, 3, 0, 0), mtp_before_last=True)
    plan = replace(plan, split=split, made_for=replace(plan.made_for, mtp_layers=1))
    assert rewrite(plan, flags=native_flags(), words=command) == (command, [])
    edited, _ = rewrite(plan, flags=native_flags(), words=words)
    assert edited[len(words) :] == ["--pipeline-model-parallel-layout", "Ettt|ttt|m|L"]
    layout = replace(plan.layout, pipeline_parallel=2, virtual_stages=2, data_parallel=2, micro_batch_size=1)
    on_two_ranks = replace(plan, layout=layout, schedule=ScheduleChoice(name="interleaved", group=2))
    # Megatron would train another model there (`has_mtp_before_last`).
    with pytest.raises(PlanError, match="cannot be written in Megatron's flags"):
        rewrite(on_two_ranks, flags=native_flags(), words=words)


def test_replaced_flags_of_the_user_are_named() -> None:
    words = [
        *MEGATRON_FLAGS,
        *("--pipeline-model-parallel-size=2", "--num-layers-per-virtual-pipeline-stage", "1"),
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        *("--use-distributed-optimizer", "--my-own", "flag"),
    ]
    plan = make_plan(split=(6,), data=2, micro_batch=4)
    edited, notes = rewrite(plan, flags=native_flags(), words=words)
    assert edited[-4:] == ["--pipeline-model-parallel-size", "1", "--micro-batch-size", "4"]
    assert edited[-6:-4] == ["--my-own", "flag"]
    assert notes == [
        "the plan replaces --micro-batch-size 2 -> 4, --pipeline-model-parallel-size 2 -> 1, "
        "--num-layers-per-virtual-pipeline-stage 1 -> left out, --recompute-granularity full -> left out, "
        "--recompute-method uniform -> left out, --recompute-num-layers 1 -> left out, "
        "--use-distributed-optimizer -> left out"
    ]


def test_batch_that_follows_from_the_layout_is_kept() -> None:
    words = [word for word in MEGATRON_FLAGS if word not in ("--global-batch-size", "8")]
    plan = make_plan(split=(6,), data=2, micro_batch=1, global_batch_size=4)
    edited, _ = rewrite(plan, flags=native_flags(), words=words)
    assert native_flags().explicit_values(edited)["global_batch_size"] == 4


def test_vocabulary_is_not_padded_further_by_tensor_parallelism() -> None:
    edited, _ = rewrite(make_plan(split=(6,), tensor=2), flags=native_flags(), words=MEGATRON_FLAGS)
    appended = ["--tensor-model-parallel-size", "2", "--padded-vocab-size", "128"]
    assert edited == [*MEGATRON_FLAGS, *appended]


def test_a_plan_without_a_run_takes_the_commands_padding() -> None:
    devices = EqualDevices(
        device="H100-SXM-80GB",
        num_nodes=1,
        devices_per_node=2,
        scale_up_bandwidth_bytes_per_s=4.5e11,
        scale_out_bandwidth_bytes_per_s=5e10,
        memory_bytes=80 * 2**30,
    )
    made = make_plan(split=(6,), tensor=2, shape=replace(SHAPE, vocab_size=256))
    job = JobDescription(precision="fp32", search={}, devices=devices, vocab_size=127)
    shape = replace(SHAPE, vocab_size=256)
    plan = replace(made, made_for=replace(made.made_for, shape=shape, job=job))
    edited, _ = rewrite(plan, flags=native_flags(), words=MEGATRON_FLAGS)
    assert edited[-2:] == ["--padded-vocab-size", "128"]
    # An odd padding of the command's own cannot be halved.
    odd = [*MEGATRON_FLAGS, "--make-vocab-size-divisible-by", "127"]
    with pytest.raises(PlanError, match=r"must divide the padded vocabulary \(127\); pad the command's"):
        rewrite(plan, flags=native_flags(), words=odd)


def test_interleaving_and_its_group() -> None:
    plan = make_plan(split=(1, 2, 2, 1), pipeline=2, chunks=2, group=4)
    edited, _ = rewrite(plan, flags=native_flags(), words=MEGATRON_FLAGS)
    found = native_flags().explicit_values(edited)
    assert found["pipeline_model_parallel_layout"] == "Et|tt|tt|tL"
    assert found["microbatch_group_size_per_vp_stage"] == 4
    stock = replace(plan, schedule=replace(plan.schedule, group=2))
    edited, _ = rewrite(stock, flags=native_flags(), words=MEGATRON_FLAGS)
    assert "microbatch_group_size_per_vp_stage" not in native_flags().explicit_values(edited)


def test_derived_sizes_are_written_when_megatron_would_derive_others() -> None:
    wider = replace(SHAPE, num_layers=4, hidden_size=48, ffn_hidden_size=192, kv_channels=12)
    edited, _ = rewrite(make_plan(split=(4,), shape=wider), flags=native_flags(), words=MEGATRON_FLAGS)
    assert edited[-4:] == ["--num-layers", "4", "--hidden-size", "48"]
    assert "--ffn-hidden-size" not in edited
    odd = replace(wider, ffn_hidden_size=200, kv_channels=8)
    edited, _ = rewrite(make_plan(split=(4,), shape=odd), flags=native_flags(), words=MEGATRON_FLAGS)
    found = native_flags().explicit_values(edited)
    assert (found["ffn_hidden_size"], found["kv_channels"]) == (200, 8)
    grouped = replace(SHAPE, num_query_groups=2)
    edited, _ = rewrite(make_plan(split=(6,), shape=grouped), flags=native_flags(), words=MEGATRON_FLAGS)
    found = native_flags().explicit_values(edited)
    assert (found["group_query_attention"], found["num_query_groups"]) == (True, 2)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_plan_reads_back_from_its_flags(data: st.DataObject) -> None:
    """`rewrite` checks its own result; here many users' flags meet many plans."""
    pipeline = data.draw(st.sampled_from([1, 2, 4]))
    chunks = data.draw(st.sampled_from([1, 2])) if pipeline > 1 else 1
    stages = pipeline * chunks
    cuts = sorted(
        data.draw(st.lists(st.integers(1, 11), min_size=stages - 1, max_size=stages - 1, unique=True))
    )
    split = [b - a for a, b in zip([0, *cuts], [*cuts, 12], strict=True)]
    shape = replace(SHAPE, num_layers=12)
    plan = make_plan(
        split=split,
        pipeline=pipeline,
        chunks=chunks,
        tensor=data.draw(st.sampled_from([1, 2])),
        data=4 // pipeline,
        micro_batch=1,
        group=pipeline if chunks > 1 else None,
        shape=shape,
        made_for_shape=data.draw(st.sampled_from([SHAPE, shape])),
        global_batch_size=16,
    )
    users = data.draw(
        st.sampled_from(
            [
                [],
                ["--pipeline-model-parallel-size", "2"],
                ["--pipeline-model-parallel-size=2", "--num-virtual-stages-per-pipeline-rank=3"],
                ["--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "1"],
                ["--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout", "Et|tt|tt|tL"],
                ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
                ["--recompute-activations", "--micro-batch-size", "1"],
                ["--pipeline-model-parallel-size", "4"],
            ]
        )
    )
    words = [*MEGATRON_FLAGS[2:], "--num-layers", str(plan.made_for.shape.num_layers), *users]
    edited, notes = rewrite(plan, flags=native_flags(), words=words)
    assert len(notes) <= 1
    assert rewrite(plan, flags=native_flags(), words=edited)[0] == edited


def test_groups_that_do_not_divide_the_heads_of_another_shape_are_replaced() -> None:
    command = replace(SHAPE, num_query_groups=4)
    wider = replace(command, num_attention_heads=6, num_query_groups=3, hidden_size=96, ffn_hidden_size=384)
    words = [*MEGATRON_FLAGS, "--group-query-attention", "--num-query-groups", "4"]
    plan = make_plan(split=(6,), shape=wider, made_for_shape=command)
    edited, _ = rewrite(plan, flags=native_flags(), words=words)
    assert native_flags().explicit_values(edited)["num_query_groups"] == 3


def test_misfit_names_every_difference() -> None:
    plan = make_plan(split=(6,), data=2, global_batch_size=16, framework_version="0.19.3")
    user = native_flags().values(["--num-layers", "5", *MEGATRON_FLAGS[2:]])
    with pytest.raises(PlanError) as raised:
        check_fit(plan, user, version="0.19.2", world_size=4)
    for part in (
        "framework_version 0.19.2 (plan: 0.19.3)",
        "world_size 4 (plan: 2)",
        "global_batch_size 8 (plan: 16)",
        "num_layers 5 (plan: 6)",
    ):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    "extra",
    [["--use-checkpoint-args"], ["--yaml-cfg", "x.yaml"], ["--rampup-batch-size", "2", "2", "9"]],
)
def test_commands_that_no_plan_fits(extra: list[str]) -> None:
    user = native_flags().values([*MEGATRON_FLAGS, *extra])
    with pytest.raises(PlanError, match=extra[0]):
        check_fit(make_plan(split=(6,)), user, version="0.19.2", world_size=1)


def test_a_custom_schedule_runs_while_a_batch_ramps_up_and_not_where_it_changes_in_steps() -> None:
    made = choice_of(named("zb-h1", num_devices=2, num_microbatches=8), stage_costs((0, 1)))
    stock = make_plan(split=(3, 3), pipeline=2)
    plan = replace(stock, schedule=ScheduleChoice(name="custom", custom=made))
    words = [*MEGATRON_FLAGS, "--pipeline-model-parallel-size", "2"]
    ramped = native_flags().values([*words, "--rampup-batch-size", "2", "2", "9"])
    check_fit(plan, ramped, version="0.19.2", world_size=2)
    in_steps = native_flags().values([*words, "--step-batch-size-schedule", "0:4,1K:8"])
    reason = "--step-batch-size-schedule cannot be used with a plan: Megatron refuses --global-batch-size"
    with pytest.raises(PlanError, match=reason):
        check_fit(plan, in_steps, version="0.19.2", world_size=2)


@pytest.mark.parametrize(
    ("pattern", "pipeline", "split", "written"),
    [
        ("*-*-*-", 1, (4, 2), "*-*-|*-"),
        ("-*-*-*", 1, (4, 2), "-*-*|-*"),
        ("*-*|-*-", 2, (1, 5), "*|-*-*-"),
        ("*-*|-*-/*-/*-", 2, (1, 2, 2, 1), "*|-*|-*|-/*-/*-"),
        ("*-*|-*-/*-", 2, (6,), "*-*-*-/*-"),
    ],
)
def test_stages_of_a_hybrid_model_are_pipes_in_its_pattern(
    pattern: str, pipeline: int, split: tuple[int, ...], written: str
) -> None:
    kinds = LayerKinds(attention=3, mlp=3, experts=0, state_space=0)
    chunks = max(1, len(split) // 2)
    plan = make_plan(
        split=split,
        pipeline=min(2, len(split)),
        data=2 if len(split) == 1 else 1,
        chunks=chunks,
        group=2 if chunks > 1 else None,
        shape=replace(SHAPE, layer_kinds=kinds),
        made_for_shape=replace(SHAPE, layer_kinds=kinds),
    )
    degree = ["--pipeline-model-parallel-size", str(pipeline)]
    # In words of its own a pattern that begins with a dash would be a flag.
    words = [*MEGATRON_FLAGS[2:], *degree, f"--hybrid-layer-pattern={pattern}"]
    edited, _ = rewrite(plan, flags=native_flags(), words=words)
    args = native_flags().values(edited)
    assert args.hybrid_layer_pattern == written
    assert args.pipeline_model_parallel_layout is None
    assert split_of(args) == plan.split
    assert rewrite(plan, flags=native_flags(), words=edited)[0] == edited


@pytest.mark.parametrize(
    ("planned", "pattern", "is_refused"),
    [
        (None, "*-*|-*-", False),  # a plan from before shapes had the order
        ("*-*-*-", "*-*|-*-", False),
        ("*-*-*-", "***|---", True),
        (None, "**|--", True),
    ],
)
def test_a_plan_is_for_layers_in_its_order(planned: str | None, pattern: str, is_refused: bool) -> None:
    kinds = LayerKinds(attention=3, mlp=3, experts=0, state_space=0, pattern=planned)
    shape = replace(SHAPE, layer_kinds=kinds)
    plan = make_plan(split=(3, 3), pipeline=2, shape=shape, made_for_shape=shape)
    words = [*MEGATRON_FLAGS[2:], "--hybrid-layer-pattern", pattern]
    args = native_flags().values(words)
    if not is_refused:
        check_fit(plan, args, version="0.19.2", world_size=2)
        return
    with pytest.raises(PlanError, match=r"the plan was made for another job: .*layer_kinds"):
        check_fit(plan, args, version="0.19.2", world_size=2)


@pytest.mark.parametrize(
    ("more", "letters"),
    [
        (["--hybrid-layer-pattern", "M-M*/MM"], "M-M*"),
        (["--hybrid-layer-pattern", "M-M*", "--mamba-state-dim", "64"], "M-M*"),
    ],
)
def test_a_plan_of_an_older_release_lacks_sizes_and_letters(more: list[str], letters: str) -> None:
    words = [*MEGATRON_FLAGS[2:], *more]
    args = native_flags().values(words)
    now = shape_of(args, vocab_size=SHAPE.vocab_size)
    assert now.layer_kinds is not None
    assert now.layer_kinds.framework_pattern or now.layer_kinds.state_size
    before = replace(now, layer_kinds=replace(now.layer_kinds, framework_pattern=None, state_size=None))
    plan = make_plan(split=(2, 2), pipeline=2, shape=before, made_for_shape=before)
    plan = replace(plan, made_for=replace(plan.made_for, mtp_layers=num_mtp_layers_of(args) or None))
    check_fit(plan, args, version="0.19.2", world_size=2)
    other = replace(now, layer_kinds=replace(now.layer_kinds, framework_pattern="M-M*/M-", state_size=32))
    plan = replace(plan, shape=other, made_for=replace(plan.made_for, shape=other))
    with pytest.raises(PlanError, match="layer_kinds"):
        check_fit(plan, args, version="0.19.2", world_size=2)


def test_a_hybrid_model_without_a_pattern_keeps_its_split() -> None:
    words = [*MEGATRON_FLAGS, "--pipeline-model-parallel-size", "2", "--hybrid-override-pattern", "M*-M*-"]
    with pytest.raises(PlanError, match="hybrid-layer-pattern"):
        rewrite(make_plan(split=(4, 2), pipeline=2), flags=native_flags(), words=words)


@pytest.mark.parametrize(
    ("split", "loss", "is_refused"),
    [
        ((2, 4), ["--moe-aux-loss-coeff", "0.01"], True),
        ((2, 4), ["--moe-z-loss-coeff", "0.001"], True),
        ((2, 4), [], False),  # the coefficient is 0
        ((4, 2), ["--moe-aux-loss-coeff", "0.01"], False),
    ],
)
def test_a_rank_without_experts_is_refused_where_megatron_logs_their_losses(
    split: tuple[int, ...], loss: list[str], is_refused: bool
) -> None:
    words = [*MEGATRON_FLAGS[2:], "--hybrid-layer-pattern", "*-*E-E", "--num-experts", "4", *loss]
    shape = replace(SHAPE, layer_kinds=LayerKinds(attention=2, mlp=2, experts=2, state_space=0))
    plan = make_plan(split=split, pipeline=2, shape=shape, made_for_shape=shape)
    args = native_flags().values(words)
    if not is_refused:
        check_fit(plan, args, version="0.19.2", world_size=2)
        return
    with pytest.raises(PlanError) as refusal:
        check_fit(plan, args, version="0.19.2", world_size=2)
    assert str(refusal.value).startswith("split: 2+4 leaves pipeline rank 0 without a layer with experts (E)")
    assert len(str(refusal.value).splitlines()) == 1


def test_settings_become_flags_and_are_read_back() -> None:
    words = [*MEGATRON_FLAGS, "--overlap-grad-reduce"]
    plan = make_plan(split=(6,), data=2)
    on = plan.layout.with_setting("overlap_grad_reduce", True).with_setting("ddp_bucket_size", 4000)
    edited, _ = rewrite(replace(plan, layout=on), flags=native_flags(), words=words)
    assert edited == [*words, "--ddp-bucket-size", "4000"]
    assert {x.name: x.value for x in settings_of(native_flags().values(edited))} == {
        "expert_tensor_parallel": 0,
        "moe_token_dispatcher": "allgather",
        "moe_shared_expert_overlap": False,
        "overlap_moe_expert_parallel_comm": False,
        "delay_wgrad_compute": False,
        "moe_grouped_gemm": False,
        "overlap_grad_reduce": True,
        "overlap_param_gather": False,
        "ddp_bucket_size": 4000,
        "optimizer_cpu_offload": False,
        "optimizer_offload_fraction": "1",
        "cp_comm_type": "p2p",
        "offload_modules": "none",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "recompute_modules": "core_attn",
        "use_megatron_fsdp": False,
    }
    off = plan.layout.with_setting("overlap_grad_reduce", False)
    edited, notes = rewrite(replace(plan, layout=off), flags=native_flags(), words=words)
    assert "--overlap-grad-reduce" not in edited
    assert notes == ["the plan replaces --overlap-grad-reduce -> left out"]


@pytest.mark.parametrize("own", [[], ["--expert-tensor-parallel-size", "1"]])
def test_experts_that_are_spread_over_tensor_parallel_ranks_become_flags(own: list[str]) -> None:
    words = [*MEGATRON_FLAGS, "--num-experts", "4", *own]
    plan = make_plan(split=(6,), tensor=2, data=2)
    layout = replace(plan.layout, expert_parallel=4, sequence_parallel=True)
    # A plan that keeps the command's shares does not name them.
    layout = layout if own else layout.with_setting("expert_tensor_parallel", 1)
    edited, _ = rewrite(replace(plan, layout=layout), flags=native_flags(), words=words)
    values = native_flags().explicit_values(edited)
    assert values["tensor_model_parallel_size"] == 2
    assert values["expert_model_parallel_size"] == 4
    assert values["expert_tensor_parallel_size"] == 1
    live = LiveJob(degrees={"tensor_parallel": 2, "expert_parallel": 4, "expert_tensor_parallel": 1})
    assert EXPERT_PARALLEL.read_back(live) == 4
    assert EXPERT_TENSOR_PARALLEL.read_back(live) == 1


def test_switches_of_experts_become_flags_and_are_read_back_of_the_model() -> None:
    words = [*MEGATRON_FLAGS, "--moe-shared-expert-overlap"]
    plan, flags = make_plan(split=(6,), data=2), native_flags()
    values = {
        "moe_shared_expert_overlap": False,
        "overlap_moe_expert_parallel_comm": True,
        "delay_wgrad_compute": True,
        "moe_grouped_gemm": True,
    }
    layout = plan.layout
    for name, value in values.items():
        layout = layout.with_setting(name, value)
    edited, notes = rewrite(replace(plan, layout=layout), flags=flags, words=words)
    added = ["--delay-wgrad-compute", "--moe-grouped-gemm", "--overlap-moe-expert-parallel-comm"]
    assert edited == [*MEGATRON_FLAGS, *added]
    replaced = "the plan replaces --moe-shared-expert-overlap -> left out"
    assert notes == [f"{replaced} and adds {' '.join(added)}"]
    live = LiveJob(degrees={}, model=SimpleNamespace(**values))
    knobs = [knob for knob in SETTINGS if knob.name in values]
    assert {knob.name: knob.read_back(live) for knob in knobs} == values
    assert all(knob.read_back(LiveJob(degrees={}, model=SimpleNamespace())) is None for knob in knobs)


def test_modules_on_the_host_become_flags() -> None:
    plan, flags = make_plan(split=(6,), data=2), native_flags()
    listed = replace(plan, layout=plan.layout.with_setting(OFFLOAD_MODULES.name, "attn_proj+core_attn"))
    edited, _ = rewrite(listed, flags=flags, words=[*MEGATRON_FLAGS])
    added = ["--fine-grained-activation-offloading", "--offload-modules", "attn_proj", "core_attn"]
    assert edited == [*MEGATRON_FLAGS, *added]
    assert OFFLOAD_MODULES.read(flags.values(edited)) == "attn_proj+core_attn"
    none = replace(plan, layout=plan.layout.with_setting(OFFLOAD_MODULES.name, "none"))
    edited, _ = rewrite(none, flags=flags, words=edited)
    assert edited == [*MEGATRON_FLAGS]
    assert OFFLOAD_MODULES.read(flags.values(edited)) == "none"
    unknown = flags.values([*MEGATRON_FLAGS, *added[:2], "layer_input"])
    assert OFFLOAD_MODULES.read(unknown) is None
    assert OFFLOAD_MODULES.read(Namespace()) is None


def test_a_part_of_the_optimizer_on_the_host_becomes_a_flag() -> None:
    words = [*MEGATRON_FLAGS, "--use-distributed-optimizer", "--use-precision-aware-optimizer"]
    plan, flags = make_plan(split=(6,), data=2), native_flags()
    layout = replace(plan.layout, distributed_optimizer=True).with_setting("optimizer_cpu_offload", True)
    layout = layout.with_setting("optimizer_offload_fraction", "0.25")
    edited, _ = rewrite(replace(plan, layout=layout), flags=flags, words=words)
    assert edited == [*words, "--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.25"]
    whole = replace(plan, layout=layout.with_setting("optimizer_offload_fraction", "1"))
    edited, notes = rewrite(whole, flags=flags, words=edited)
    assert notes == ["the plan replaces --optimizer-offload-fraction 0.25 -> 1.0"]
    read = {setting.name: setting.value for setting in settings_of(flags.values(edited))}
    assert read["optimizer_offload_fraction"] == "1"


def test_megatron_fsdp_comes_and_goes_with_its_checkpoint_format() -> None:
    plan, flags = make_plan(split=(6,), data=2), native_flags()
    with_distributed_optimizer = replace(plan.layout, distributed_optimizer=True)
    name = USE_MEGATRON_FSDP.name
    words = [*MEGATRON_FLAGS, "--use-distributed-optimizer", "--ckpt-format", "torch_dist"]
    on = replace(plan, layout=with_distributed_optimizer.with_setting(name, True))
    edited, notes = rewrite(on, flags=flags, words=words)
    assert {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "ckpt_format": "fsdp_dtensor",
        "megatron_fsdp_main_grads_dtype": "fp32",
    }.items() <= flags.explicit_values(edited).items()
    assert USE_MEGATRON_FSDP.read(flags.values(edited)) is True
    assert "--ckpt-format torch_dist -> fsdp_dtensor" in notes[0]
    off = replace(plan, layout=with_distributed_optimizer.with_setting(name, False))
    # Of a command that leaves the distributed optimizer to the switch.
    fsdp = ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"]
    assert layout_of(flags.values([*MEGATRON_FLAGS, *fsdp]), world_size=2).distributed_optimizer
    edited, _ = rewrite(off, flags=flags, words=[*MEGATRON_FLAGS, *fsdp])
    assert edited == [*MEGATRON_FLAGS, "--use-distributed-optimizer"]
    assert USE_MEGATRON_FSDP.read(flags.values(edited)) is False
    other = flags.values([*MEGATRON_FLAGS, *fsdp, "--data-parallel-sharding-strategy", "optim"])
    assert USE_MEGATRON_FSDP.read(other) is None


def test_the_communication_of_shared_sequences_becomes_a_flag_and_is_read_back() -> None:
    flags, plan = native_flags(), make_plan(split=(6,), context=2)
    name = CP_COMM_TYPE.name
    exchanged = replace(plan, layout=plan.layout.with_setting(name, "a2a"))
    words = [*MEGATRON_FLAGS, "--context-parallel-size", "2"]
    edited, notes = rewrite(exchanged, flags=flags, words=words)
    assert (edited, notes) == ([*words, "--cp-comm-type", "a2a"], ["the plan adds --cp-comm-type a2a"])
    ring = replace(plan, layout=plan.layout.with_setting(name, "p2p"))
    assert rewrite(ring, flags=flags, words=edited) == (
        words,
        ["the plan replaces --cp-comm-type a2a -> left out"],
    )
    sizes = ["--hierarchical-context-parallel-sizes", "1", "2"]
    both = replace(plan, layout=plan.layout.with_setting(name, "a2a+p2p"))
    edited, notes = rewrite(both, flags=flags, words=[*words, "--cp-comm-type", "a2a", *sizes])
    assert edited == [*words, *sizes, "--cp-comm-type", "a2a+p2p"]
    assert notes == ["the plan replaces --cp-comm-type a2a -> a2a+p2p"]
    read = {setting.name: setting.value for setting in settings_of(flags.values(edited))}
    assert (read[name], read["hierarchical_context_parallel_sizes"]) == ("a2a+p2p", "1+2")
    other = replace(both, layout=both.layout.with_setting(HIERARCHICAL_SIZES.name, "2+1"))
    edited, notes = rewrite(other, flags=flags, words=edited)
    assert edited == [*words, "--cp-comm-type", "a2a+p2p", sizes[0], "2", "1"]
    assert notes == ["the plan replaces --hierarchical-context-parallel-sizes 1 2 -> 2 1"]
    for live_sizes, text in (([2, 1], "2+1"), (None, None)):
        live = LiveJob(degrees={}, model=SimpleNamespace(hierarchical_context_parallel_sizes=live_sizes))
        assert HIERARCHICAL_SIZES.read_back(live) == text
    # Types by layer are none that a plan has, nor one that it does not know.
    for types in (["p2p", *["a2a"] * 5], ["A2A"]):
        by_layer = flags.values([*words, "--cp-comm-type", *types])
        assert name not in {setting.name for setting in settings_of(by_layer)}
    for value, expected in (("a2a", "a2a"), (["a2a"], "a2a"), (None, "p2p"), (["p2p", "a2a"], None)):
        live = LiveJob(degrees={}, model=SimpleNamespace(cp_comm_type=value))
        assert CP_COMM_TYPE.read_back(live) == expected
    assert CP_COMM_TYPE.read_back(LiveJob(degrees={}, model=SimpleNamespace())) is None


def test_sizes_that_another_degree_does_not_have_are_left_out() -> None:
    """Megatron asserts their product whatever the communication is, and a type with sizes has some."""
    flags = native_flags()
    sizes = ["--hierarchical-context-parallel-sizes", "2", "2"]
    words = [*MEGATRON_FLAGS, "--context-parallel-size", "4"]
    ring = rewrite(make_plan(split=(6,), context=2, data=2), flags=flags, words=[*words, *sizes])[0]
    assert ring == [*MEGATRON_FLAGS, "--context-parallel-size", "2"]
    same = make_plan(split=(6,), context=4)
    assert rewrite(same, flags=flags, words=[*words, *sizes])[0] == [*words, *sizes]
    rings = [*words, "--cp-comm-type", "a2a+p2p", *sizes]
    alone = rewrite(make_plan(split=(6,), data=4), flags=flags, words=rings)[0]
    assert alone == [*MEGATRON_FLAGS, "--context-parallel-size", "1"]
    plan = make_plan(split=(6,), context=8)
    planned = replace(plan, layout=plan.layout.with_setting(HIERARCHICAL_SIZES.name, "2+4"))
    edited = flags.values(rewrite(planned, flags=flags, words=rings)[0])
    assert (edited.cp_comm_type, edited.hierarchical_context_parallel_sizes) == (["a2a+p2p"], [2, 4])


@pytest.mark.parametrize(
    ("flag", "destination"),
    [("--no-rope-fusion", "apply_rope_fusion"), ("--disable-gloo-process-groups", "use_gloo_process_groups")],
)
def test_a_switch_that_its_flag_turns_off(
    flag: str, destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    knob = replace(ROPE_FUSION, name="knob", flag=flag, destination=destination)
    monkeypatch.setattr(registry, "SETTINGS", (knob,))
    plan = make_plan(split=(6,))
    on, off = (replace(plan, layout=plan.layout.with_setting("knob", value)) for value in (True, False))
    without, given = MEGATRON_FLAGS, [*MEGATRON_FLAGS, flag]
    for words, value in ((without, True), (given, False)):
        assert [setting.value for setting in settings_of(native_flags().values(words))] == [value]
    assert rewrite(on, flags=native_flags(), words=without) == (without, [])
    assert rewrite(off, flags=native_flags(), words=without) == (given, [f"the plan adds {flag}"])
    assert rewrite(off, flags=native_flags(), words=given) == (given, [])
    note = f"the plan replaces {flag} -> left out"
    assert rewrite(on, flags=native_flags(), words=given) == (without, [note])


def test_recompute_keeps_the_modules_of_the_command_and_writes_its_settings() -> None:
    flags, plan = native_flags(), make_plan(split=(6,))
    selective = replace(plan, layout=replace(plan.layout, recompute="selective"))
    full = replace(plan, layout=replace(plan.layout, recompute="full"))
    modules = ["--recompute-modules", "mlp", "layernorm"]
    words = [*MEGATRON_FLAGS, *modules]
    edited, _ = rewrite(selective, flags=flags, words=words)
    assert edited == [*words, "--recompute-granularity", "selective"]
    other = replace(selective, layout=selective.layout.with_setting("recompute_modules", "core_attn+mlp"))
    edited, notes = rewrite(other, flags=flags, words=edited)
    assert edited[-3:] == ["--recompute-modules", "core_attn", "mlp"]
    assert notes == ["the plan replaces --recompute-modules mlp layernorm -> core_attn mlp"]
    # A switch from modules to whole layers and back.
    edited, _ = rewrite(full, flags=flags, words=edited)
    stated = flags.explicit_values(edited)
    assert (stated["recompute_method"], stated["recompute_num_layers"]) == ("uniform", 1)
    assert stated["recompute_modules"] == ["core_attn", "mlp"]
    block = full.layout.with_setting("recompute_method", "block").with_setting("recompute_num_layers", 2)
    edited, _ = rewrite(replace(full, layout=block), flags=flags, words=edited)
    stated = flags.explicit_values(edited)
    assert (stated["recompute_method"], stated["recompute_num_layers"]) == ("block", 2)
    edited, _ = rewrite(selective, flags=flags, words=edited)
    assert {"recompute_method", "recompute_num_layers"}.isdisjoint(flags.explicit_values(edited))


def test_a_plan_keeps_the_switch_of_an_optimizer_that_is_sharded_by_layers() -> None:
    """Megatron turns --use-distributed-optimizer off in its own arguments (validate_args)."""
    plan = make_plan(split=(5, 1), pipeline=2, data=2, micro_batch=1)
    sharded = replace(plan, layout=replace(plan.layout, distributed_optimizer=True))
    words = [*MEGATRON_FLAGS, "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1"]
    split = ["--pipeline-model-parallel-layout", "Ettttt|tL"]
    for optimizer, planned in (
        (["--optimizer", "muon", "--use-distributed-optimizer"], sharded),
        (["--optimizer", "dist_muon"], sharded),
        (["--optimizer", "muon"], plan),
    ):
        command = [*words, *optimizer]
        assert rewrite(planned, flags=native_flags(), words=command)[0] == [*command, *split]


@pytest.mark.parametrize(
    ("layout", "is_kept"),
    [
        ({"tensor_parallel": 2, "data_parallel": 1}, True),
        ({"tensor_parallel": 2, "data_parallel": 1, "sequence_parallel": True}, False),
        ({}, False),
    ],
)
def test_recomputed_activations_are_distributed_where_sequences_are_whole(
    layout: dict[str, Any], is_kept: bool
) -> None:
    """Megatron asserts TP above 1, and no sequence parallelism."""
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    command = f"--tensor-model-parallel-size 2 {full} --distribute-saved-activations"
    words = [*MEGATRON_FLAGS, *shlex.split(command)]
    plan = make_plan(split=(6,), data=2)
    planned = replace(plan, layout=replace(plan.layout, recompute="full", **layout))
    edited, notes = rewrite(planned, flags=native_flags(), words=words)
    assert ("--distribute-saved-activations" in edited) == is_kept
    note = "--distribute-saved-activations -> left out"
    assert any(note in text for text in notes) != is_kept


def test_a_layer_recompute_of_experts_goes_with_the_commands_modules() -> None:
    flags, plan = native_flags(), make_plan(split=(6,))
    words = [*MEGATRON_FLAGS, "--moe-layer-recompute"]
    selective = replace(plan, layout=replace(plan.layout, recompute="selective"))
    assert rewrite(selective, flags=flags, words=words) == (words, [])
    as_it_is = replace(selective, layout=selective.layout.with_setting("recompute_modules", "core_attn+moe"))
    assert rewrite(as_it_is, flags=flags, words=words) == (words, [])
    assert rewrite(plan, flags=flags, words=words)[0] == MEGATRON_FLAGS
    full = replace(plan, layout=replace(plan.layout, recompute="full"))
    edited, _ = rewrite(full, flags=flags, words=words)
    assert "--moe-layer-recompute" not in edited
    assert flags.values(edited).recompute_granularity == "full"
    other = replace(selective, layout=selective.layout.with_setting("recompute_modules", "moe_act"))
    edited, _ = rewrite(other, flags=flags, words=words)
    granularity = ["--recompute-granularity", "selective"]
    assert edited == [*MEGATRON_FLAGS, "--recompute-modules", "moe_act", *granularity]
    edited, _ = rewrite(other, flags=flags, words=[*words, *granularity])
    assert edited == [*MEGATRON_FLAGS, *granularity, "--recompute-modules", "moe_act"]


def test_a_flag_of_an_enumeration_is_written_by_the_members_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = replace(
        TOKEN_DISPATCHER,
        name="kernels",
        flag="--attention-backend",
        destination="attention_backend",
        words=("flash", "unfused"),
    )
    monkeypatch.setattr(registry, "SETTINGS", (kernels,))
    plan = make_plan(split=(6,))
    words = [*MEGATRON_FLAGS, "--attention-backend", "flash"]
    unfused = replace(plan, layout=plan.layout.with_setting("kernels", "unfused"))
    edited, notes = rewrite(unfused, flags=native_flags(), words=words)
    assert edited == [*MEGATRON_FLAGS, "--attention-backend", "unfused"]
    assert notes == ["the plan replaces --attention-backend flash -> unfused"]
    assert kernels.read(native_flags().values(edited)) == "unfused"
    as_given = replace(plan, layout=plan.layout.with_setting("kernels", "flash"))
    assert rewrite(as_given, flags=native_flags(), words=words) == (words, [])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("telemetry", True, "layout.settings: telemetry; this release knows expert_tensor_parallel"),
        ("overlap_grad_reduce", 3, "layout.settings.overlap_grad_reduce: 3; must be a switch"),
        ("ddp_bucket_size", "many", "layout.settings.ddp_bucket_size: 'many'; must be a size"),
    ],
)
def test_a_setting_that_no_knob_has_is_refused(name: str, value: SettingValue, words: str) -> None:
    plan = make_plan(split=(6,), data=2)
    planned = replace(plan, layout=plan.layout.with_setting(name, value))
    with pytest.raises(PlanError, match=re.escape(words)):
        rewrite(planned, flags=native_flags(), words=MEGATRON_FLAGS)


def test_the_flag_of_every_knob_is_one_of_megatrons() -> None:
    flags = native_flags()
    given = {item.flag for knob in KNOBS if knob.flag for item in flags.occurrences([knob.flag, "1"])}
    assert given == {knob.flag for knob in KNOBS if knob.flag}
    assert {knob.destination for knob in SETTINGS} <= set(flags.defaults)


def test_a_switch_says_what_its_flag_does() -> None:
    """Where a new knob fails here, its flag turns the switch off: the descriptor needs `unset=True`."""
    flags = native_flags()
    for knob in (*(knob for knob in SETTINGS if knob.kind == "switch"), ROPE_FUSION):
        assert flags.explicit_values([knob.flag]) == {knob.destination: not knob.without_flag}, knob.name
        assert flags.defaults[knob.destination] in (None, knob.without_flag), knob.name


@pytest.mark.parametrize(("pipeline", "is_kept"), [(2, False), (4, True)])
def test_transfers_are_overlapped_on_two_devices_with_chunks(pipeline: int, is_kept: bool) -> None:
    """Megatron refuses --no-overlap-p2p-communication there."""
    words = [*MEGATRON_FLAGS, "--no-overlap-p2p-communication"]
    split = (2, 2, 1, 1) if pipeline == 2 else (0, 1, 1, 1, 1, 1, 1, 0)
    plan = make_plan(split=split, pipeline=pipeline, chunks=2, group=pipeline)
    edited, notes = rewrite(plan, flags=native_flags(), words=words)
    assert ("--no-overlap-p2p-communication" in edited) == is_kept
    assert any("--no-overlap-p2p-communication" in note for note in notes) != is_kept


def test_the_overlap_of_warm_up_and_flush_goes_with_the_stages_of_a_device() -> None:
    """Megatron refuses it with one stage a device."""
    flag = "--overlap-p2p-communication-warmup-flush"
    words = [*MEGATRON_FLAGS, "--pipeline-model-parallel-size", "2", flag]
    words += ["--num-virtual-stages-per-pipeline-rank", "3"]
    edited, notes = rewrite(make_plan(split=(4, 2), pipeline=2), flags=native_flags(), words=words)
    assert flag not in edited
    assert any(f"{flag} -> left out" in note for note in notes)
    chunks = make_plan(split=(2, 2, 1, 1), pipeline=2, chunks=2, group=2)
    edited, _ = rewrite(chunks, flags=native_flags(), words=words)
    assert flag in edited


_FLEX, _BACKEND = ["--moe-token-dispatcher-type", "flex"], "--moe-flex-dispatcher-backend"


@pytest.mark.parametrize("planned", ["allgather", "alltoall", "flex-deepep", "flex-hybridep"])
@pytest.mark.parametrize(
    ("written", "command"),
    [
        ([], "allgather"),
        (["--moe-token-dispatcher-type", "alltoall"], "alltoall"),
        (_FLEX, "flex-deepep"),
        ([*_FLEX, "--moe-enable-deepep"], "flex-deepep"),
        ([*_FLEX, _BACKEND, "hybridep"], "flex-hybridep"),
        ([*_FLEX, _BACKEND, "ncclep"], "flex"),
    ],
)
def test_a_dispatcher_and_its_back_end_become_flags_and_are_read_back(
    written: list[str], command: str, planned: str
) -> None:
    """The flags are Megatron's own parser's, and what a rank reads back those of its model."""
    flags, plan, words = native_flags(), make_plan(split=(6,), data=2), [*MEGATRON_FLAGS, *written]
    assert TOKEN_DISPATCHER.read(flags.values(words)) == command
    layout = plan.layout.with_setting(TOKEN_DISPATCHER.name, planned)
    edited, _ = rewrite(replace(plan, layout=layout), flags=flags, words=words)
    values = flags.values(edited)
    kind, _, backend = planned.partition("-")
    assert (values.moe_token_dispatcher_type, TOKEN_DISPATCHER.read(values)) == (kind, planned)
    if command == planned:
        assert edited == words
    else:
        expected = [*MEGATRON_FLAGS, "--moe-token-dispatcher-type", kind]
        assert edited == [*expected, *([_BACKEND, backend] if backend else [])]
    live = LiveJob(degrees={}, model=SimpleNamespace(**vars(values)))
    assert TOKEN_DISPATCHER.read_back(live) == planned


def test_a_dispatcher_says_what_it_replaces() -> None:
    flags, plan = native_flags(), make_plan(split=(6,), data=2)
    layout = plan.layout.with_setting(TOKEN_DISPATCHER.name, "flex-hybridep")
    words = [*MEGATRON_FLAGS, "--moe-token-dispatcher-type", "alltoall"]
    _, notes = rewrite(replace(plan, layout=layout), flags=flags, words=words)
    added = "adds --moe-flex-dispatcher-backend hybridep"
    assert notes == [f"the plan replaces --moe-token-dispatcher-type alltoall -> flex and {added}"]


@pytest.mark.parametrize("manager", ["_DeepepManager", "_HybridEPManager"])
def test_a_rank_without_the_kernels_refuses_a_dispatcher_and_says_why(manager: str) -> None:
    """Megatron raises it while the model is built, so a trial of such a plan is infeasible."""
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    if fused_a2a.HAVE_DEEP_EP or fused_a2a.HAVE_HYBRIDEP:
        pytest.skip("deep_ep is installed")
    config = SimpleNamespace(**vars(native_flags().values(MEGATRON_FLAGS)))
    sizes: dict[str, Any] = {"group": None, "num_local_experts": 2, "num_experts": 4, "config": config}
    if manager == "_DeepepManager":
        sizes["router_topk"] = 2
    with pytest.raises(ImportError, match=r"EP is not installed\. Please install") as raised:
        getattr(token_dispatcher, manager)(**sizes)
    assert kind_of(raised.value, num_steps=0) == "refused"
