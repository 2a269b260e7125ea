"""Experts, fp8, written splits and context parallelism in the planner, and what it refuses."""

from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.memory import distinct_numbers, peak_memory
from quartet_plugin.cost.predict import predict
from quartet_plugin.errors import ConfigError, InfeasibleError
from quartet_plugin.model.job_description import LatentAttention
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.bounds import bounds_of
from quartet_plugin.planner.described_rules import rules_of
from quartet_plugin.planner.job import PlanRequest, parse_job
from quartet_plugin.planner.layout_table import (
    TooLarge,
    degrees,
    fault_of_degrees,
    layout_table_of,
    refused_degrees,
)
from quartet_plugin.planner.ranking import rank, refusals, shapes_of
from quartet_plugin.planner.table_rows import layout_of
from quartet_plugin.space.knobs.registry import DEGREES
from quartet_plugin.space.layouts import choices_by_degrees
from quartet_plugin.split.layers import is_legal_split
from tests.planner.planning import job_data, random_job, runs_of

EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 2048}

# DeepSeek-V3's, by Megatron's names.
LATENT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}


def parsed(**changes: dict[str, Any]) -> PlanRequest:
    return parse_job(job_data(**changes), where="job")


CASES: dict[str, dict[str, dict[str, Any]]] = {
    "experts": {"model": EXPERTS, "search": {"micro_batch_size": [1, 2]}},
    "dense layers first": {"model": {**EXPERTS, "num_dense_layers": 3}, "search": {"micro_batch_size": [1]}},
    "a shared expert": {
        "model": {**EXPERTS, "shared_expert_ffn_hidden_size": 2048},
        "search": {"context_parallel": "auto", "micro_batch_size": [1]},
    },
    "latent attention": {
        "model": {**EXPERTS, "latent_attention": LATENT},
        "search": {"micro_batch_size": [1]},
    },
    "fp8": {"model": {"precision": "fp8"}, "cluster": {"device": "H100-SXM-80GB"}},
    "splits": {"search": {"split": ["even", "5+3", "3+5", "2+2+2+2"], "micro_batch_size": [1, 2]}},
}


@pytest.mark.parametrize("name", CASES)
def test_pruning_keeps_the_optimum(name: str) -> None:
    job = parsed(**CASES[name])
    quick, every = rank(job, top=3), rank(job, top=3, exhaustive=True)
    assert [(b.layout, b.schedule, b.split) for b in quick.best] == [
        (b.layout, b.schedule, b.split) for b in every.best
    ]


def test_latent_attention_is_priced_and_takes_memory() -> None:
    """A model with it is another one than the plain attention of the same width."""
    latent = parsed(model={"latent_attention": LATENT})
    assert latent.latent == LatentAttention()
    assert latent.shape.kv_channels == LATENT["v_head_dim"]
    layout = layout_of(1, 1, 1, 8, 1, 1, 0, 0)
    runs = [job.run(job.shape, layout, (8,)) for job in (latent, parsed())]
    times, sizes = (
        [predict(run, fitted()).iter_time_s for run in runs],
        [peak_memory(run).total_bytes for run in runs],
    )
    assert times[0] > times[1]
    assert sizes[0] != sizes[1]


@pytest.mark.parametrize("name", CASES)
def test_no_prediction_is_under_its_bounds(name: str) -> None:
    job = parsed(**CASES[name])
    candidates = layout_table_of(job, job.shape)
    bounds = bounds_of(job, job.shape, candidates, constants=fitted())
    for row in range(0, len(candidates), max(1, len(candidates) // 120)):
        split = bounds.split(job, job.shape, candidates, row)
        for run in runs_of(job, candidates, row, split):
            words = (run.layout, run.schedule, run.group)
            assert bounds.time_s[row] <= predict(run, fitted()).iter_time_s, words
            assert bounds.memory_bytes[row] <= peak_memory(run).total_bytes, words


def test_expert_parallel_divides_experts_and_replicas() -> None:
    job = parsed(model={**EXPERTS, "num_experts": 12})
    found = [
        layout_table_of(job, job.shape).layout(row) for row in range(len(layout_table_of(job, job.shape)))
    ]
    assert {layout.expert_parallel for layout in found} == {1, 2, 4}
    for layout in found:
        assert layout.data_parallel * layout.context_parallel % layout.expert_parallel == 0


def test_expert_parallel_saves_memory() -> None:
    layouts = {
        ep: rank(
            parsed(model={**EXPERTS, "num_experts": 64}, search={"expert_parallel": ep, "data_parallel": 8})
        )
        for ep in (1, 8)
    }
    assert layouts[8].best[0].memory.total_bytes < layouts[1].best[0].memory.total_bytes


def test_dense_models_have_no_expert_parallel() -> None:
    job = parsed()
    candidates = layout_table_of(job, job.shape)
    assert {candidates.layout(row).expert_parallel for row in range(len(candidates))} == {1}


def test_fp8_is_faster_where_the_device_has_it() -> None:
    wide = {"hidden_size": 8192, "num_attention_heads": 64}
    fast, plain = (
        rank(parsed(cluster={"device": "H100-SXM-80GB"}, model={**wide, "precision": precision}))
        for precision in ("fp8", "bf16")
    )
    assert fast.best[0].iteration_s < plain.best[0].iteration_s


def test_written_splits_are_the_only_ones() -> None:
    found = rank(parsed(search={"split": ["5+3", "3+5"]}), top=50)
    assert {ranked.split for ranked in found.best} <= {(5, 3), (3, 5)}
    assert {ranked.layout.num_stages for ranked in found.best} == {2}


def splits_of(job: PlanRequest, shape: ModelShape) -> set[tuple[int, tuple[int, ...]]]:
    """The number of stages and the split of each row of the job's table."""
    table = layout_table_of(job, shape)
    bounds = bounds_of(job, shape, table, constants=fitted())
    rows = range(len(table))
    return {(table.layout(row).num_stages, bounds.split(job, shape, table, row)) for row in rows}


@pytest.mark.parametrize("num_layers", [5, 6, 7, 14])
@pytest.mark.parametrize("split", ["auto", "even", "stock", ["even", "stock"]])
def test_no_split_leaves_an_inner_stage_empty(num_layers: int, split: str | list[str]) -> None:
    job = parsed(
        model={"num_layers": num_layers},
        search={"split": split, "micro_batch_size": 1, "tensor_parallel": 1, "recompute": "none"},
    )
    found = splits_of(job, job.shape)
    assert len({stages for stages, _ in found}) > 2
    for stages, counts in found:
        assert is_legal_split(counts, num_layers=num_layers, num_stages=stages), (stages, counts)


def test_a_written_split_is_of_the_shapes_with_its_layers() -> None:
    few = {"micro_batch_size": 1, "tensor_parallel": 1, "recompute": "none"}
    job = parsed(search={"scaling": {}, "split": ["4+4", "stock"], **few})
    shapes = shapes_of(job)
    assert len({shape.num_layers for shape in shapes}) > 1
    for shape in shapes:
        found = splits_of(job, shape)
        assert ((2, (4, 4)) in found) == (shape.num_layers == 8)
        for stages, counts in found:
            assert is_legal_split(counts, num_layers=shape.num_layers, num_stages=stages)
    written = replace(job, search=job.search.model_copy(update={"split": ("5+3",)}))
    assert {ranked.split for ranked in rank(written, top=5).best} == {(5, 3)}


def test_a_split_of_two_names_is_there_once() -> None:
    job = parsed(search={"split": ["even", "stock", "4+4"], "schedule": "1f1b", "pipeline_parallel": 2})
    alone = replace(job, search=job.search.model_copy(update={"split": ("even",)}))
    table = layout_table_of(job, job.shape)
    assert table.columns.tolist() == layout_table_of(alone, job.shape).columns.tolist()


def test_context_parallel_cuts_sequences() -> None:
    job = parsed(search={"context_parallel": [2, 4]}, model={"seq_length": 1028})
    candidates = layout_table_of(job, job.shape)
    assert {candidates.layout(row).context_parallel for row in range(len(candidates))} == {2}


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("search", {"split": "6+3"}, "must sum to num_layers"),
        ("search", {"expert_parallel": 2}, "needs model.num_experts"),
        ("search", {"schedule": "mine.json"}, "`quartet tune` for schedule files"),
        ("search", {"mapping": "tp-pp-dp"}, "tp-pp-dp; needs a cluster file"),
        ("search", {"inside": "data"}, "inside"),
        ("model", {"num_experts": 1}, "num_experts"),
        ("model", {"latent_attention": LATENT, "kv_channels": 64}, "remove kv_channels"),
        ("model", {"latent_attention": {**LATENT, "q_lora_rnk": 1}}, "did you mean q_lora_rank?"),
        ("model", {"precision": "fp8"}, "model.precision: fp8; A100-SXM-80GB multiplies in"),
        ("model", {"num_experts": 4, "experts_per_token": 8}, "experts_per_token"),
        ("model", {"num_experts": 4, "num_dense_layers": 8}, "num_dense_layers"),
        ("model", {"precision": "int8"}, "precision"),
    ],
)
def test_what_a_job_may_not_say(section: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parsed(**{section: values})
    assert "\n" not in str(caught.value)


def test_experts_are_not_scaled() -> None:
    with pytest.raises(ConfigError, match=r"search.scaling"):
        parsed(model=EXPERTS, search={"scaling": {}})


def test_refused_degrees_and_legal_ones_are_all_degrees() -> None:
    job = parsed(
        model={"num_attention_heads": 12, "hidden_size": 1536, "num_layers": 5},
        batch={"global_batch_size": 12},
        search={"context_parallel": "auto"},
    )
    refused = refused_degrees(job, job.shape)
    legal = {tuple(row) for row in layout_table_of(job, job.shape).columns[:, :3].tolist()}
    assert sum(one.num_refused for one in refused) + len(legal) == len(list(degrees(job)))
    reasons = {one.reason for one in refused}
    assert "heads: TP 8 does not divide 12 heads; nearest: 4" in reasons
    assert "layers: PP 8 has more stages than 5 layers, embedding and head; nearest: 4" in reasons
    assert "batch: DP 8 does not divide a batch of 12; nearest: 4" in reasons
    assert [one.num_refused for one in refused] == sorted((one.num_refused for one in refused), reverse=True)


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_what_is_told_of_degrees_is_what_the_knobs_refuse(seed: int) -> None:
    job = random_job(seed)
    free = job.search.model_copy(update={knob.name: None for knob in DEGREES})
    job = replace(job, search=free)
    layouts = [layout for layout, _ in choices_by_degrees(job.shape, rules=rules_of(job))]
    legal = {(one.tensor_parallel, one.context_parallel, one.pipeline_parallel) for one in layouts}
    assert legal == {sizes for sizes in degrees(job) if fault_of_degrees(job, job.shape, *sizes) is None}


@pytest.mark.parametrize(
    ("model", "tp", "words"),
    [
        ({"num_query_groups": 6, "num_attention_heads": 12, "hidden_size": 1536}, 4, "query groups"),
        ({"ffn_hidden_size": 1022}, 4, "of the FFN"),
        ({**EXPERTS, "expert_ffn_hidden_size": 1002}, 4, "of an expert's FFN"),
        ({"precision": "fp8", "hidden_size": 1032, "num_attention_heads": 8}, 1, "multiples of 16"),
        ({"seq_length": 1023}, 4, "sequences of 1023"),
    ],
)
def test_each_constraint_names_itself(model: dict[str, Any], tp: int, words: str) -> None:
    job = parsed(model=model, cluster={"device": "H100-SXM-80GB"})
    fault = fault_of_degrees(job, job.shape, tp, 1, 1)
    assert fault is not None
    assert words in fault


def test_memory_refusals_are_grouped_and_counted() -> None:
    job = parsed(cluster={"memory_bytes": 6 * 2**30}, model={"num_layers": 16})
    found = rank(job)
    memory = [one for one in refusals(job, found) if one.reason.startswith("memory")]
    assert sum(one.num_refused for one in memory) == found.num_too_large > 0
    assert any("the least of these needs" in one.reason and "GiB" in one.reason for one in memory)


def test_no_legal_layout_names_the_commonest_reason() -> None:
    with pytest.raises(InfeasibleError, match=r"search\.pipeline_parallel: 4; layers: PP 4 .*; nearest: 2"):
        rank(parsed(model={"num_layers": 1}, search={"pipeline_parallel": 4}))


def test_no_legal_layout_is_told_about_the_degree_that_was_asked_for() -> None:
    with pytest.raises(
        InfeasibleError, match=r"search\.tensor_parallel: 3; must divide the 8 devices; nearest: 2 or 4"
    ) as caught:
        rank(parsed(search={"tensor_parallel": 3}))
    assert "TP 8" not in str(caught.value)
    with pytest.raises(InfeasibleError, match="TP 4 does not divide 2 heads") as caught:
        rank(parsed(model={"num_attention_heads": 2}, search={"tensor_parallel": 4}))
    assert "TP 8" not in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "search", "words"),
    [
        (
            64,
            {"micro_batch_size": 3},
            "micro_batch_size: 3; no layout of the job has it; nearest: 2 or 4",
        ),
        (
            64,
            {"virtual_stages": 9, "pipeline_parallel": 2},
            "virtual_stages: 9; no layout of the job has it; nearest:",
        ),
        (64, {"virtual_stages": 1, "schedule": "zb-v"}, "search.virtual_stages: 1; no layout of the job"),
        (64, {"data_parallel": 8, "tensor_parallel": 4}, "search.tensor_parallel: 4; no layout of the job"),
        (
            7,
            {"pipeline_parallel": 1, "tensor_parallel": 1},
            "search.tensor_parallel: 1; batch: DP 8 does not divide a batch of 7; nearest: 1; choose another",
        ),
        # No request alone is to blame: TP 16 and the like are no reasons, the batch is.
        (
            63,
            {"pipeline_parallel": 1, "tensor_parallel": [1, 2], "data_parallel": [4, 8]},
            "most often: batch: DP 8 does not divide a batch of 63; nearest: 1",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_the_request_that_alone_leaves_no_layout_is_named(
    batch: int, search: dict[str, Any], words: str
) -> None:
    with pytest.raises(InfeasibleError) as caught:
        rank(parsed(batch={"global_batch_size": batch}, search=search))
    assert words in str(caught.value), caught.value


def test_two_numbers_that_differ_look_different() -> None:
    group = TooLarge(
        tensor_parallel=1, context_parallel=1, pipeline_parallel=1, num_layouts=1, least_bytes=77.34 * 2**30
    )
    usable_bytes = 77.31 * 2**30
    assert "needs 77.34 GiB, 77.31 GiB are usable" in group.refusal(usable_bytes).reason
    larger = replace(group, least_bytes=90 * 2**30)
    assert "needs 90 GiB, 77 GiB are usable" in larger.refusal(usable_bytes).reason
    assert distinct_numbers(1.0, 1.0, digits=1) == ("1.0", "1.0")
    assert distinct_numbers(1.0, 1.0000001, digits=1) == ("1.0000000", "1.0000001")


def layouts_of(job: PlanRequest) -> set[tuple[Layout, str]]:
    found = layout_table_of(job, job.shape)
    return {(found.layout(row), found.schedule(row).value) for row in range(len(found))}


def test_forbidden_layouts_are_no_candidates() -> None:
    rules = [
        {"tensor_parallel": [4, 8]},
        {"pipeline_parallel": 2, "micro_batch_size": 1},
        {"schedule": "interleaved", "data_parallel": 1},
    ]
    free, job = parsed(), parsed(search={"forbid": rules})
    every, kept = layouts_of(free), layouts_of(job)

    def is_forbidden(layout: Layout, schedule: str) -> bool:
        return (
            layout.tensor_parallel >= 4
            or (layout.pipeline_parallel == 2 and layout.micro_batch_size == 1)
            or (layout.virtual_stages > 1 and layout.data_parallel == 1 and schedule == "interleaved")
        )

    assert kept == {pair for pair in every if not is_forbidden(*pair)}
    assert any(is_forbidden(*pair) for pair in every)
    assert all(not is_forbidden(one.layout, one.schedule.value) for one in rank(job, top=3).best)


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ({"forbid": {"mapping": "1,0"}}, "mapping; a rule of `quartet plan` may use only"),
        ({"forbid": {"schedule": "searched"}}, "searched; `quartet plan` supports no-pipelining"),
        ({"change_class": "A"}, "change_class: A; keeps the command's own values"),
        ({"scaling": {"shapes": "1x64"}}, "scaling.shapes: 1x64"),
    ],
)
def test_what_takes_a_run_is_refused(search: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rank(parsed(search=search), top=1)
