"""The planner: bounds hold, pruning keeps the optimum, and jobs are read strictly."""

import random
from typing import Any

import pytest

from quartet_plugin.cost.constants import ClusterConstants, fitted, names
from quartet_plugin.cost.memory import peak_memory
from quartet_plugin.cost.predict import predict
from quartet_plugin.errors import ConfigError, InfeasibleError
from quartet_plugin.planner.bounds import bounds_of
from quartet_plugin.planner.job import PlanRequest, parse_job
from quartet_plugin.planner.layout_table import layout_table_of
from quartet_plugin.planner.plans import plain_layout, plan_of
from quartet_plugin.planner.ranking import Ranked, rank, refine
from tests.planner.planning import job_data, runs_of

# Jobs whose plans are all predicted: the first ones, and those that run nightly.
NUM_JOBS, NUM_NIGHTLY = 60, 200
# Stock and named schedules; those that are left out of `auto`; stock ones with every group.
SCHEDULES = (
    "auto",
    "auto",
    ["1f1b", "gpipe", "breadth-first", "dualpipev", "zb-v"],
    ["interleaved", "zb-h2"],
)


def random_job(seed: int) -> PlanRequest:
    """A small job; memory is drawn so that it often decides."""
    draw = random.Random(seed)
    heads = draw.choice([4, 8, 12])
    model = {
        "num_layers": draw.randint(2, 9),
        "hidden_size": heads * 128,
        "num_attention_heads": heads,
        "seq_length": draw.choice([512, 2048]),
        "vocab_size": draw.choice([1000, 32000, 256000]),
        "gated_ffn": draw.random() < 0.5,
    }
    cluster = {
        "device": draw.choice(["A100-SXM-80GB", "H100-SXM-80GB", "B200-SXM-180GB"]),
        "num_nodes": draw.choice([1, 2]),
        "devices_per_node": draw.choice([2, 4]),
        "memory_bytes": draw.choice([8, 12, 24, 80]) * 2**30,
    }
    search: dict[str, Any] = {"micro_batch_size": [1, 2, 4], "schedule": draw.choice(SCHEDULES)}
    if draw.random() < 0.3:
        search["context_parallel"] = "auto"
    batch = {"global_batch_size": draw.choice([8, 24, 64])}
    return parse_job({"model": model, "cluster": cluster, "batch": batch, "search": search}, where="job")


def chosen(ranked: Ranked) -> tuple[Any, ...]:
    return ranked.layout, ranked.schedule, ranked.group, ranked.split


@pytest.mark.parametrize(
    "first",
    [
        *range(0, NUM_JOBS, 20),
        *(pytest.param(first, marks=pytest.mark.nightly) for first in range(NUM_JOBS, NUM_NIGHTLY, 20)),
    ],
)
def test_pruning_keeps_the_optimum(first: int) -> None:
    pruned = 0
    for seed in range(first, first + 20):
        job = random_job(seed)
        try:
            every = rank(job, top=3, exhaustive=True)
        except InfeasibleError:
            with pytest.raises(InfeasibleError):
                rank(job, top=3)
            continue
        quick = rank(job, top=3)
        assert [chosen(b) for b in quick.best] == [chosen(b) for b in every.best], f"seed {seed}"
        assert [b.iteration_s for b in quick.best] == [b.iteration_s for b in every.best]
        assert quick.num_considered == every.num_considered == every.num_predicted + every.num_too_large
        pruned += quick.num_pruned
    assert pruned > 0


def test_pruning_keeps_the_optimum_of_a_calibrated_model() -> None:
    values = {name: getattr(fitted(), name) for name in names()}
    calibrated = ClusterConstants(**{**values, "hop_s": 1e-4, "action_s": 2e-4, "residual": 0.9})
    checked = 0
    for seed in range(600, 608):
        job = random_job(seed)
        try:
            every = rank(job, top=3, exhaustive=True, constants=calibrated)
        except InfeasibleError:
            continue
        quick = rank(job, top=3, constants=calibrated)
        assert [chosen(b) for b in quick.best] == [chosen(b) for b in every.best], f"seed {seed}"
        checked += quick.num_pruned
    assert checked > 0


@pytest.mark.parametrize("seed", range(300, 312))
def test_no_prediction_is_under_its_bounds(seed: int) -> None:
    job = random_job(seed)
    candidates = layout_table_of(job, job.shape)
    bounds = bounds_of(job, job.shape, candidates, constants=fitted())
    for row in range(0, len(candidates), 3):
        split = bounds.split(job, job.shape, candidates, row)
        for run in runs_of(job, candidates, row, split):
            words = (run.layout, run.schedule, run.group)
            assert bounds.time_s[row] <= predict(run, fitted()).iter_time_s, words
            assert bounds.memory_bytes[row] <= peak_memory(run).total_bytes, words


def test_a_bound_is_tight_without_a_pipeline() -> None:
    search = {"tensor_parallel": 2, "pipeline_parallel": 1, "distributed_optimizer": False}
    job = parse_job(job_data(search=search), where="job")
    candidates = layout_table_of(job, job.shape)
    bounds = bounds_of(job, job.shape, candidates, constants=fitted())
    run = job.run(job.shape, candidates.layout(0), (8,))
    assert bounds.time_s[0] > 0.8 * predict(run, fitted()).iter_time_s


def test_the_three_forms() -> None:
    search = {
        "tensor_parallel": "auto",
        "pipeline_parallel": 2,
        "micro_batch_size": [1, 2],
        "recompute": "full",
    }
    job = parse_job(job_data(search=search), where="job")
    layouts = [layout_table_of(job, job.shape).layout(k) for k in range(8)]
    assert {x.pipeline_parallel for x in layouts} == {2}
    assert {x.recompute for x in layouts} == {"full"}


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("cluster", {"device": "H9000"}, "unknown"),
        ("cluster", {"scale_out_bandwidth_bytes_per_s": -1.0}, "scale_out_bandwidth_bytes_per_s"),
        ("cluster", {"num_gpus": 8}, "unknown key"),
        ("model", {"num_layers": "8"}, "num_layers"),
        ("model", {"num_attention_heads": 7}, "hidden_size"),
        ("search", {"mapping": "ring"}, "search.mapping"),
        ("search", {"recompute": "some"}, "recompute"),
    ],
)
def test_what_a_job_may_not_say(section: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_job(job_data(**{section: values}), where="job.yaml")
    assert "\n" not in str(caught.value)


def test_a_job_that_cannot_fit_says_by_how_much() -> None:
    job = parse_job(job_data(cluster={"memory_bytes": 1_700_000_000}), where="job")
    words = r"none of \d+ layouts fits; the nearest, .* needs [\d.]+ GiB of the [\d.]+ GiB that are usable"
    with pytest.raises(InfeasibleError, match=words):
        rank(job)


def test_no_legal_layout_is_said() -> None:
    job = parse_job(job_data(search={"tensor_parallel": 3}), where="job")
    with pytest.raises(InfeasibleError, match="none is legal"):
        rank(job)


def test_other_shapes_compete_by_equal_work() -> None:
    search = {"scaling": {"tolerance": 0.1, "max_shapes": 4}, "micro_batch_size": 1, "recompute": "none"}
    job = parse_job(job_data(search=search), where="job")
    found = rank(job, top=50)
    assert len({ranked.shape for ranked in found.best}) > 1
    own = [r for r in found.best if r.shape == job.shape]
    assert all(r.equal_work_s == r.iteration_s for r in own)


def test_solving_the_mapping_keeps_the_layouts() -> None:
    job = parse_job(job_data(cluster={"num_nodes": 4, "devices_per_node": 4}), where="job")
    found = rank(job, top=4)
    better = refine(job, found)
    assert {one.layout for one in better.best} == {one.layout for one in found.best}
    for one in better.best:
        before = next(other for other in found.best if (other.layout, other.split) == (one.layout, one.split))
        assert one.iteration_s <= before.iteration_s * (1 + 1e-9)
        assert one.stock_s is not None
        assert one.stock_s["tp-cp-ep-dp-pp"] == pytest.approx(before.iteration_s)


def test_a_plan_names_its_baseline_and_prediction() -> None:
    job = parse_job(job_data(), where="job")
    best = rank(job).best[0]
    plain = plain_layout(job, best=best)
    plan = plan_of(job, best, plain=plain, name="job", place=1)
    assert plain.layout.virtual_stages == plain.layout.micro_batch_size == 1
    assert plan.prediction is not None
    assert plan.prediction.iteration_s == best.iteration_s
    assert plan.prediction.relative_cost is not None
    assert plan.prediction.relative_cost <= 1.0
    assert plan.mapping.is_stock
    assert plan.measurement is None
