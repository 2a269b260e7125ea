"""Plans of hybrid models: their stages by the letters that they hold."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quartet_plugin.calibration.machine_prior import KnownMachine
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.predict import predict
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.planner.assignment_search import balanced_split
from quartet_plugin.planner.described_job import request_of
from quartet_plugin.planner.described_rules import rules_of
from quartet_plugin.planner.described_space import first_plans
from quartet_plugin.planner.job import PlanRequest, parse_job
from quartet_plugin.planner.layout_table import CP, PP, VIRTUAL, layout_table_of, refused_degrees
from quartet_plugin.planner.order_search import planned_ranking
from quartet_plugin.planner.plans import plain_layout, plan_of
from quartet_plugin.planner.ranking import rank
from quartet_plugin.planner.space_request import request_of_space
from quartet_plugin.planner.table_schedules import placement_of
from quartet_plugin.space.expert_stages import fault_of_split
from quartet_plugin.space.plan_space import build_space
from quartet_plugin.tuner.config import parse_config
from tests.model.clusters import make_cluster
from tests.planner.planning import cluster_job, job_data, with_pattern
from tests.planner.test_best_moves import every_split
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape

APART = "MMMMMMMM****"
LONG, SHORT = 65_536, 512


def job_of(pattern: str, *, seq_length: int, **search: Any) -> PlanRequest:
    """A job with two pipeline ranks of one device each and a small vocabulary."""
    model = {"num_layers": len(pattern), "seq_length": seq_length, "vocab_size": 1024}
    cluster = {"num_nodes": 1, "devices_per_node": 2}
    asked = {"pipeline_parallel": 2, "micro_batch_size": 1, "schedule": "1f1b", **search}
    job = parse_job(job_data(model=model, cluster=cluster, search=asked), where="job")
    return with_pattern(job, pattern)


def best_split(job: PlanRequest) -> tuple[int, ...]:
    return planned_ranking(job, top=1).best[0].split


def test_long_sequences_leave_few_layers_to_the_stage_with_attention() -> None:
    long, short = (best_split(job_of(APART, seq_length=length)) for length in (LONG, SHORT))
    assert long[1] <= 3
    assert short[1] > long[1]
    # Turned around it is the first stage.
    turned = best_split(job_of(APART[::-1], seq_length=LONG))
    assert turned[0] <= 3


@pytest.mark.parametrize("pattern", [APART, "M*M*-M**MMMM", "**-*-MMM-M-M"])
@pytest.mark.parametrize("seq_length", [LONG, SHORT])
def test_the_planned_split_is_nearly_the_best_of_all(pattern: str, seq_length: int) -> None:
    job = job_of(pattern, seq_length=seq_length, recompute="none", distributed_optimizer=False)
    best = rank(job).best[0]

    def seconds(split: tuple[int, ...]) -> float:
        return predict(job.run(job.shape, best.layout, split, schedule=best.schedule), fitted()).iter_time_s

    assert best.iteration_s == seconds(best.split)
    assert best.iteration_s <= 1.03 * min(map(seconds, every_split(12, 2)))


def test_slower_devices_get_fewer_of_the_letters_that_take_long() -> None:
    job = job_of(APART, seq_length=LONG)
    layout = rank(job).best[0].layout
    splits = [
        balanced_split(job, job.shape, layout, fitted(), np.array(slowdowns))
        for slowdowns in ([1.0, 1.0], [1.0, 4.0], [4.0, 1.0])
    ]
    assert splits[1][1] < splits[0][1] < splits[2][1]


def first_plan(pattern: str | None, *, seq_length: int) -> Plan:
    """The first plan of a study of a reported hybrid model; without a pattern as older reports are."""
    kinds = LayerKinds(attention=4, mlp=0, experts=0, state_space=8, projected_size=512, pattern=pattern)
    job = make_job(
        layout=make_layout(pipeline_parallel=2),
        shape=make_shape(num_layers=12, layer_kinds=kinds, seq_length=seq_length, vocab_size=1024),
        features=("bare_first_stage", "bare_last_stage", "hybrid"),
    )
    config = parse_config({"search": {"pipeline_parallel": 2, "schedule": "1f1b"}}, where="test").search
    space = build_space(job, nodes=make_nodes(2), search=config, run="r", seed=0)
    request = request_of_space(space, machine=KnownMachine())
    return first_plans(space, request, top=1)[0][1]


def test_a_study_begins_with_the_split_of_the_letters() -> None:
    plan = first_plan(APART, seq_length=8192)
    assert plan.split.transformer_layers_per_stage[1] <= 4
    assert plan.shape.pattern == APART
    without = first_plan(None, seq_length=8192)
    first, last = without.split.transformer_layers_per_stage
    # Of mean layers the head alone makes the last stage shorter.
    assert first - last <= 2


def test_a_hybrid_models_further_tokens_are_planned_with_it() -> None:
    job = job_of("M*M*M*M*", seq_length=1024)
    shape = replace(job.shape, tied_embeddings=False, position_embedding="rope")
    kinds = LayerKinds(attention=1, mlp=1, experts=0, state_space=0)
    plain = rank(replace(job, shape=shape)).best[0]
    for given in (kinds, None):
        further = rank(replace(job, shape=shape, mtp_layers=1, mtp_kinds=given)).best[0]
        assert further.iteration_s > plain.iteration_s
        assert further.split[1] <= plain.split[1]


def routed_job(pattern: str, *, slow: bool = False, **search: Any) -> PlanRequest:
    """A job on eight devices whose routers log a loss, so that every device needs an `E`."""
    model = {"num_layers": len(pattern), "num_experts": 4, "vocab_size": 64_000, "gated_ffn": True}
    cluster: dict[str, Any] = {"num_nodes": 1, "devices_per_node": 8}
    made = parse_job(job_data(model=model, cluster=cluster, search=search), where="job")
    if slow:
        unequal = make_cluster(slowdown={(1, local): 2.5 for local in range(4)})
        made = cluster_job(unequal, model=model, search=search)
    job = with_pattern(made, pattern)
    return replace(job, logged_expert_layers=tuple(i for i, layer in enumerate(pattern) if layer == "E"))


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("pattern", ["EEMMMMMMMMM*", "M*E*E*MMMMMM", "M" * 10 + "EE"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_every_device_has_experts_whose_losses_are_logged(pattern: str, slow: bool, schedule: str) -> None:
    job = routed_job(pattern, slow=slow, pipeline_parallel=2, schedule=schedule, micro_batch_size=1)
    ranking = rank(job, top=200, exhaustive=True)
    for ranked in ranking.best:
        name = ranked.schedule
        placement = placement_of(name, num_devices=2, num_chunks=ranked.layout.virtual_stages)
        fault = fault_of_split(ranked.split, placement=placement, expert_layers=job.logged_expert_layers)
        assert fault is None, ranked.split
    # Bounds leave none out that is faster.
    assert rank(job).best[0].equal_work_s == ranking.best[0].equal_work_s


def test_a_pipeline_has_as_many_devices_as_layers_with_logged_losses() -> None:
    job = routed_job("MEM*EM*-E-M*")
    tables = [layout_table_of(each, each.shape) for each in (job, replace(job, logged_expert_layers=()))]
    assert [int(table.columns[:, PP].max()) for table in tables] == [2, 8]
    reasons = " ".join(refusal.reason for refusal in refused_degrees(job, job.shape))
    assert "experts: PP 4 leaves a device without one of the 3 layers with experts; nearest: 2" in reasons


def test_every_stage_of_a_hybrid_model_has_layers() -> None:
    job = job_of("M*-M", seq_length=SHORT, pipeline_parallel="auto", schedule="auto")
    table = layout_table_of(job, job.shape)
    stages = table.columns[:, PP] * table.columns[:, VIRTUAL]
    assert stages.max() == 4
    assert min(min(ranked.split) for ranked in rank(job, top=100, exhaustive=True).best) == 1
    plain = replace(job, shape=replace(job.shape, layer_kinds=None))
    columns = layout_table_of(plain, plain.shape).columns
    assert (columns[:, PP] * columns[:, VIRTUAL]).max() == 6
    written = job_of("M*-M", seq_length=SHORT, split=["0+4", "1+3"])
    assert {ranked.split for ranked in rank(written, top=100).best} == {(1, 3)}


def test_state_space_layers_are_shared_and_run_as_the_runtime_does() -> None:
    """Their heads are divided by TP and CP; Transformer Engine's take full backwards."""
    job = job_of(APART, seq_length=SHORT, pipeline_parallel=1, context_parallel="auto", schedule="auto")
    assert job.shape.layer_kinds is not None
    kinds = replace(job.shape.layer_kinds, state_space_heads=2, state_space_groups=1)
    shared = replace(job, shape=replace(job.shape, layer_kinds=kinds))
    alone = replace(job, shape=replace(job.shape, layer_kinds=replace(kinds, state_space_heads=1)))
    tables = [layout_table_of(each, each.shape).columns for each in (shared, alone)]
    assert [2 in columns[:, CP] for columns in tables] == [True, False]
    attention = job_of("*-*-*-*-", seq_length=SHORT)
    assert [rules_of(each).job.full_backward is None for each in (job, attention)] == [False, True]


def test_a_plan_carries_what_it_was_planned_with() -> None:
    job = routed_job("MEM*EM*-E-M*")
    shape = replace(job.shape, tied_embeddings=False, position_embedding="rope")
    depth = LayerKinds(attention=1, mlp=1, experts=0, state_space=0)
    job = replace(job, shape=shape, mtp_layers=1, mtp_kinds=depth)
    best = rank(job).best[0]
    plan = plan_of(job, best, plain=plain_layout(job, best=best), name="job", place=1)
    assert plan.made_for.job is not None
    again = request_of(plan, plan.made_for.job)
    assert (again.mtp_kinds, again.logged_expert_layers) == (job.mtp_kinds, job.logged_expert_layers)
    assert again.shape == job.shape
