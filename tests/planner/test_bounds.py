"""The bounds of models with layers of several kinds, and of given splits on unequal devices."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quartet_plugin.cost.constants import ClusterConstants, fitted
from quartet_plugin.cost.iteration.assigned import AssignedRun
from quartet_plugin.cost.memory import Memory, peak_memory
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import Software, TrainingRun
from quartet_plugin.errors import InfeasibleError
from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.planner import ranking
from quartet_plugin.planner.bounds import bounds_of
from quartet_plugin.planner.job import PlanRequest, parse_job
from quartet_plugin.planner.layout_table import layout_table_of
from quartet_plugin.planner.ranking import rank
from quartet_plugin.split.layers import is_legal_split
from tests.model.clusters import make_cluster
from tests.planner.planning import (
    cluster_job,
    hybrid_cluster_job,
    hybrid_job,
    job_data,
    random_cluster_job,
    runs_of,
)

# Seeds of hybrid models.
HYBRIDS = range(100, 110)


def job_of_two_kinds(seed: int) -> PlanRequest:
    """A model with dense layers before those of experts, on up to 16 devices."""
    draw = random.Random(seed)
    model = {
        "num_layers": draw.choice([6, 8, 12]),
        "hidden_size": draw.choice([512, 2048]),
        "ffn_hidden_size": draw.choice([1024, 8192]),
        "num_experts": draw.choice([8, 64]),
        "experts_per_token": 2,
        "expert_ffn_hidden_size": draw.choice([512, 4096]),
        "shared_expert_ffn_hidden_size": draw.choice([0, 512]),
        "num_dense_layers": draw.randint(1, 4),
        "mtp_layers": draw.choice([0, 0, 1, 2]),
        "tied_embeddings": False,
        "position_embedding": "rope",
    }
    cluster = {"num_nodes": 2, "devices_per_node": draw.choice([2, 4, 8])}
    search: dict[str, Any] = {"micro_batch_size": [1, 2]}
    if draw.random() < 0.3:
        search["split"] = "even"
    return parse_job(job_data(model=model, cluster=cluster, search=search), where="job")


def test_a_layer_of_a_hybrid_model_counts_as_the_mean_of_its_layers() -> None:
    """The bounds look at a few layers, and the counts of kinds are of all."""
    job = parse_job(job_data(model={"num_layers": 12}, search={"micro_batch_size": [1, 2]}), where="job")
    shape = replace(job.shape, layer_kinds=LayerKinds(attention=3, mlp=9, experts=0, state_space=0))
    table = layout_table_of(job, shape)
    hybrid, mean = (bounds_of(job, one, table, constants=fitted()) for one in (shape, shape.mean))
    np.testing.assert_array_equal(hybrid.time_s, mean.time_s)
    np.testing.assert_array_equal(hybrid.memory_bytes, mean.memory_bytes)


@pytest.mark.parametrize("seed", [*range(8), *HYBRIDS])
def test_no_prediction_is_under_the_bounds_of_several_kinds_of_layers(seed: int) -> None:
    job = hybrid_job(seed) if seed in HYBRIDS else job_of_two_kinds(seed)
    table = layout_table_of(job, job.shape)
    bounds = bounds_of(job, job.shape, table, constants=fitted())
    ratios = []
    for row in range(0, len(table), max(1, len(table) // 60)):
        split = bounds.split(job, job.shape, table, row)
        for run in runs_of(job, table, row, split):
            words = (run.layout, run.schedule, run.group)
            memory = peak_memory(run).total_bytes
            assert bounds.time_s[row] <= predict(run, fitted()).iter_time_s, words
            assert bounds.memory_bytes[row] <= memory, words
            ratios.append(bounds.memory_bytes[row] / memory)
    # Each kind of layer counts by itself: a bound by the smaller of both would be far off.
    # The bound leaves out multi-token prediction, which is much of a model of so few layers.
    # Of a hybrid model the head's logits may be most of the memory.
    assert job.mtp_layers or seed in HYBRIDS or np.median(ratios) > 0.6


def job_before_last(seed: int) -> PlanRequest:
    """A model whose multi-token prediction lies on the stage before the last one in every pipeline."""
    while not (job := job_of_two_kinds(seed)).mtp_layers:
        seed += 1000
    search = job.search.model_copy(update={"mtp_stage": ("before_last",)})
    return replace(job, search=search)


@pytest.mark.parametrize("seed", range(6))
def test_no_prediction_with_a_head_alone_is_under_the_bounds(seed: int) -> None:
    job = job_before_last(seed)
    table = layout_table_of(job, job.shape)
    assert len(table)
    bounds = bounds_of(job, job.shape, table, constants=fitted())
    for row in range(0, len(table), max(1, len(table) // 60)):
        layout, split = table.layout(row), bounds.split(job, job.shape, table, row)
        assert layout.pipeline_parallel > 1
        assert not table.schedule(row).is_custom
        assert is_legal_split(
            split,
            num_layers=job.shape.num_layers,
            num_stages=layout.num_stages,
            is_mtp_before_last=True,
        )
        for run in runs_of(job, table, row, split):
            words = (run.layout, run.schedule, run.group)
            assert run.is_mtp_before_last
            assert bounds.time_s[row] <= predict(run, fitted()).iter_time_s, words
            assert bounds.memory_bytes[row] <= peak_memory(run).total_bytes, words


@pytest.mark.parametrize("seed", range(3))
def test_pruning_keeps_the_optimum_of_both_stages_of_multi_token_prediction(seed: int) -> None:
    job = job_before_last(seed)
    both = replace(job, search=job.search.model_copy(update={"mtp_stage": ("last", "before_last")}))
    every = rank(both, top=5, exhaustive=True).best
    assert rank(both, top=5).best == every
    alone = [
        rank(replace(both, search=both.search.model_copy(update={"mtp_stage": (stage,)}))).best[0]
        for stage in ("last", "before_last")
    ]
    assert every[0].iteration_s == min(row.iteration_s for row in alone)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (
            {"pipeline_parallel": 2, "virtual_stages": 2},
            "needs more than two pipeline ranks with virtual stages",
        ),
        ({"schedule": ["zb-h1"]}, "needs a schedule of the framework"),
    ],
)
def test_a_requested_stage_that_no_layout_has_is_refused(words: dict[str, Any], fault: str) -> None:
    model = {"mtp_layers": 1, "tied_embeddings": False, "position_embedding": "rope"}
    search: dict[str, Any] = {"mtp_stage": ["last", "before_last"], "micro_batch_size": 1, **words}
    job = parse_job(job_data(model=model, search=search), where="job")
    with pytest.raises(InfeasibleError, match=rf"^search\.mtp_stage: before_last; {fault}$"):
        rank(job)
    assert rank(replace(job, search=job.search.model_copy(update={"mtp_stage": None}))).best


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_no_prediction_of_processors_is_under_the_bounds(recompute: str) -> None:
    """They keep scores and copied queries, which recompute makes again, and ranks wait for the slowest."""
    cluster = make_cluster(num_nodes=1, device="core")
    cluster["devices"] = {
        "core": {
            "peak_flops": {"fp32": 9e10},
            "memory_bytes": 2**37,
            "memory_bandwidth_bytes_per_s": 1e10,
            "compute_units": 1,
        }
    }
    model = {"hidden_size": 256, "seq_length": 2048, "precision": "fp32"}
    job = cluster_job(cluster, model=model, search={"recompute": recompute, "schedule": "stock"})
    constants = replace(ClusterConstants.of(fitted()), skew=0.1)
    table = layout_table_of(job, job.shape)
    bounds = bounds_of(job, job.shape, table, constants=constants)
    for row in range(len(table)):
        for run in runs_of(job, table, row, bounds.split(job, job.shape, table, row)):
            words = (run.layout, run.schedule, run.group)
            assert bounds.time_s[row] <= predict(run, constants).iter_time_s, words
            assert bounds.memory_bytes[row] <= peak_memory(run).total_bytes, words


@pytest.mark.parametrize("seed", [*range(8, 14), *HYBRIDS])
def test_pruning_keeps_the_optimum_of_several_kinds_of_layers(seed: int) -> None:
    job = hybrid_job(seed) if seed in HYBRIDS else job_of_two_kinds(seed)
    quick, every = ranking.rank(job, top=3), ranking.rank(job, top=3, exhaustive=True)
    assert [(one.layout, one.schedule, one.group, one.split) for one in quick.best] == [
        (one.layout, one.schedule, one.group, one.split) for one in every.best
    ]
    assert [one.iteration_s for one in quick.best] == [one.iteration_s for one in every.best]


@pytest.mark.parametrize("seed", [*range(20, 28), *HYBRIDS[:4]])
def test_no_placed_prediction_is_under_the_bound_of_its_split(seed: int) -> None:
    job = hybrid_cluster_job(seed) if seed in HYBRIDS else random_cluster_job(seed)
    field = ranking._shape_layouts(job, job.shape, fitted())
    topology = job.topology(fitted())
    draw = random.Random(seed)
    for row in range(0, len(field.table), max(1, len(field.table) // 12)):
        layout, schedule = field.table.layout(row), field.table.schedule(row)
        counts = list(field.bounds.split(job, job.shape, field.table, row))
        source = counts.index(max(counts))
        if counts[source] > 1:
            counts[source] -= 1
            counts[draw.randrange(len(counts))] += 1
        time, memory = field.bounds.of_split(field.table, row, tuple(counts))
        group = field.table.groups(row)[0]
        run = job.run(job.shape, layout, tuple(counts), schedule=schedule, group=group)
        slots = list(range(layout.world_size))
        if layout.tensor_parallel == 1:
            draw.shuffle(slots)
        assigned = AssignedRun(run, fitted(), topology)
        predicted = assigned.predict(tuple(slots)).iter_time_s
        assert time <= predicted, layout
        assert assigned.least_s(tuple(slots)) <= predicted, layout
        assert memory <= peak_memory(run).total_bytes, layout


def test_few_layouts_of_two_kinds_are_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"name": "deepseek-v3"}
    cluster = {"device": "H100-SXM-80GB", "num_nodes": 32, "devices_per_node": 8}
    job = parse_job({"model": model, "cluster": cluster, "batch": {"global_batch_size": 2048}}, where="job")
    looked_at: list[TrainingRun] = []

    def counted(run: TrainingRun) -> Memory:
        looked_at.append(run)
        return peak_memory(run)

    monkeypatch.setattr(ranking, "peak_memory", counted)
    found = ranking.rank(job)
    assert found.best[0].memory.fits
    assert found.num_considered > 40_000
    assert len(looked_at) < 200


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_bounds_wait_for_sends_by_the_rule_of_the_cost_model(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a framework's transfers block, more schedules than 1F1B wait for them."""
    search = {"pipeline_parallel": 4, "schedule": schedule, "micro_batch_size": 1, "recompute": "none"}
    job = parse_job(job_data(search=search), where="job")
    table = layout_table_of(job, job.shape)
    free = bounds_of(job, job.shape, table, constants=fitted())
    software_with = PlanRequest._software_with

    def blocking(request: PlanRequest, values: Any) -> Software:
        return replace(software_with(request, values), blocking_transfers=True)

    monkeypatch.setattr(PlanRequest, "_software_with", blocking)
    blocked = bounds_of(job, job.shape, table, constants=fitted())
    assert len(table) > 0
    if schedule == "1f1b":
        assert (blocked.time_s == free.time_s).all()
    else:
        assert (blocked.time_s > free.time_s).all()
    for row in range(len(table)):
        split = blocked.split(job, job.shape, table, row)
        for run in runs_of(job, table, row, split):
            assert run.software.blocking_transfers
            assert blocked.time_s[row] <= predict(run, fitted()).iter_time_s, (run.layout, run.group)
