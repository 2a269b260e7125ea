"""The request to plan of a study's space: its table holds the space's layouts and schedules, no others."""

from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.calibration.machine_prior import KnownMachine, machine_model_of_space
from quartet_plugin.cost.iteration.plan_terms import run_of_plan
from quartet_plugin.model.packed_lengths import PackedLengths
from quartet_plugin.model.plan import Split
from quartet_plugin.planner.described_rules import training_job_of
from quartet_plugin.planner.described_space import plan_in_space
from quartet_plugin.planner.layout_table import layout_table_of
from quartet_plugin.planner.ranking import rank, shapes_of
from quartet_plugin.planner.space_request import request_of_space
from quartet_plugin.planner.table_schedules import KINDS
from quartet_plugin.space.config import SEARCHED, TABLE_SCHEDULES
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.study.plan_sampler import PlanSampler
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes

FEW = {"micro_batch_size": [1, 2, 4], "virtual_stages": [1, 2]}


def space_of(
    search: dict[str, Any],
    *,
    framework: str = "megatron-core",
    features: tuple[str, ...] = (),
    global_batch_size: int = 32,
    **layout: Any,
) -> Space:
    degrees = {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2, **layout}
    job = make_job(layout=make_layout(**degrees), features=features, global_batch_size=global_batch_size)
    job = replace(job, framework=framework)
    config = parse_config({"search": {**FEW, **search}}, where="test").search
    return build_space(job, nodes=make_nodes(4, 4), search=config, run="r", seed=0)


@pytest.mark.parametrize(
    "space",
    [
        pytest.param(space_of({}), id="all"),
        pytest.param(space_of({}, sequence_parallel=True), id="sequence parallel"),
        pytest.param(space_of({"recompute": "auto", "distributed_optimizer": "auto"}), id="memory"),
        pytest.param(space_of({}, features=("moe_microbatch_loss",)), id="kept schedules"),
        pytest.param(space_of({"change_class": "C"}, features=("moe_microbatch_loss",)), id="objective"),
        pytest.param(space_of({"forbid": {"schedule": "zb-v", "data_parallel": 2}}), id="forbidden"),
        pytest.param(space_of({"tensor_partition": ["stock", "rings"]}, sequence_parallel=True), id="rings"),
        pytest.param(space_of({}, framework="deepspeed"), id="deepspeed"),
    ],
)
def test_the_table_holds_what_the_space_does(space: Space) -> None:
    check_table(space)


def test_the_table_has_no_degrees_with_which_a_kept_micro_batch_does_not_divide_the_batch() -> None:
    """DP 8 divides a batch of 16, but not with a micro-batch of 4."""
    space = space_of({}, features=("moe_microbatch_loss",), global_batch_size=16)
    layouts = space.layouts[space.job.shape]
    assert {layout.micro_batch_size for layout in layouts} == {4}
    assert {layout.data_parallel for layout in layouts} == {1, 2, 4}
    check_table(space)


def check_table(space: Space) -> None:
    """Hold the layouts and schedules of the space's table to those of the space."""
    request = request_of_space(space, machine=KnownMachine())
    table = layout_table_of(request, space.job.shape)
    ranked = {
        (table.layout(row), TABLE_SCHEDULES[KINDS.index(table.schedule(row))]) for row in range(len(table))
    }
    tried = {
        (layout, name)
        for layout in space.layouts[space.job.shape]
        for name in space.schedules_of(layout, shape=space.job.shape)
        if name != SEARCHED
    }
    assert ranked == tried


def test_the_models_norms_are_those_of_the_command() -> None:
    space = space_of({})
    space = replace(space, job=replace(space.job, normalization="RMSNorm"))
    request = request_of_space(space, machine=KnownMachine())
    assert request.run(space.job.shape, space.job.layout, (4, 4)).normalization == "RMSNorm"
    described = training_job_of(request, layout=space.job.layout, split=Split.of((4, 4)))
    assert described.normalization == PlanSampler(space)._machine_model.normalization == "RMSNorm"


def test_products_in_fp8_are_those_of_the_study() -> None:
    """Where the device has them: an A100 has none."""
    for device, matmul in (("NVIDIA H100 80GB HBM3", "fp8"), ("NVIDIA A100-SXM4-80GB", "bf16")):
        space = space_of({}, features=("fp8",))
        nodes = tuple(replace(node, node_class=f"{device} x4") for node in space.nodes)
        space = replace(space, nodes=nodes, job=replace(space.job, precision="bf16"))
        baseline = space.baseline
        planned = request_of_space(space, machine=KnownMachine()).run(
            baseline.shape, baseline.layout, baseline.split.transformer_layers_per_stage
        )
        studied = run_of_plan(baseline, machine_model_of_space(space))
        assert (planned.matmul, studied.matmul) == (matmul, matmul)
        assert planned.half == studied.half == "bf16"


@pytest.mark.parametrize(
    "scaling", [{}, {"budget": "flops"}, {"shapes": ["8x256", "4x320"], "tolerance": 0.1}]
)
def test_the_table_has_the_shapes_of_the_space(scaling: dict[str, Any]) -> None:
    space = space_of({"scaling": {"tolerance": 0.05, "max_shapes": 3, **scaling}})
    assert len(space.shapes) > 1
    request = request_of_space(space, machine=KnownMachine())
    assert set(shapes_of(request)) == set(space.shapes)


@pytest.mark.parametrize("asked", [None, ["before_last"], ["last"]])
def test_both_stages_of_multi_token_prediction_are_ranked(asked: list[str] | None) -> None:
    split = Split(transformer_layers_per_stage=(4, 4, 0, 0), mtp_before_last=True)
    layout = make_layout(pipeline_parallel=4, data_parallel=2)
    job = replace(make_job(layout=layout, features=("mtp", "mtp_before_last")), mtp_layers=1, split=split)
    words = {"micro_batch_size": [1, 2], "recompute": "none"}
    config = {"search": {**words, **({} if asked is None else {"mtp_stage": asked})}}
    search = parse_config(config, where="test").search
    space = build_space(job, nodes=make_nodes(4, 4), search=search, run="r", seed=0)
    request = request_of_space(space, machine=KnownMachine())
    # No bound is above a prediction: all rows are predicted, and the best ones are the same.
    every = rank(request, top=1000, exhaustive=True).best
    for num in (1, 8):
        assert rank(request, top=num).best == every[:num]
    stages = {row.is_mtp_before_last for row in every}
    assert stages == ({True} if asked == ["before_last"] else {False} if asked else {True, False})
    for row in every:
        assert not row.is_mtp_before_last or (row.layout.pipeline_parallel > 1 and row.split[-1] == 0)
        if not row.schedule.is_custom:
            made = plan_in_space(space, row)
            assert made is not None
            assert made[1].split == row.stage_split


def test_the_documents_of_packed_sequences_are_those_of_plans_and_predictions() -> None:
    usual = space_of({})
    packed = PackedLengths(tokens_per_sequence=0.9 * usual.job.shape.seq_length, squares_per_sequence=500.0)
    job = replace(usual.job, packed=packed)
    space = build_space(job, nodes=usual.nodes, search=usual.search, run="r", seed=0)
    baseline = space.baseline
    assert baseline.made_for.packed == packed
    planned = request_of_space(space, machine=KnownMachine()).run(
        job.shape, baseline.layout, baseline.split.transformer_layers_per_stage
    )
    studied = run_of_plan(baseline, machine_model_of_space(space))
    assert planned.packed == studied.packed == packed
