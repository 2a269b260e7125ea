"""Reading rows: nothing but the allowed fields, and stated rules for what is open."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.cost.predict import predict_row, predict_rows
from quartet_plugin.cost.rows import ALLOWED, READ_KNOBS, read_row, resolve, split_layers
from quartet_plugin.cost.run import Overlap, ScheduleKind
from quartet_plugin.cost.software import software_named
from quartet_plugin.errors import ConfigError
from tests.cost.runs import PIPELINE, ROW, run

FORBIDDEN = (
    "iter_time_s", "tflops_per_gpu", "tflops_kind", "mfu", "hfu", "tokens_per_s", "tokens_per_s_per_gpu",
    "samples_per_s_per_gpu", "memory_gb", "memory_kind", "time_basis", "extra", "notes",
    "check_model_tflops_per_gpu", "check_mfu_bf16_peak", "id", "family", "model", "source", "url", "table",
    "core", "tier", "kind", "inferred", "unverified", "unverified_fields", "params_b",
)  # fmt: skip


def test_no_result_field_is_allowed() -> None:
    assert not ALLOWED & set(FORBIDDEN)


def test_results_and_labels_change_nothing() -> None:
    told: dict[str, Any] = (
        ROW | dict.fromkeys(FORBIDDEN, "99") | {"iter_time_s": 1e9, "memory_gb": "OOM", "extra": {"a": 1}}
    )
    expected = predict_row(ROW)
    assert {**predict_row(told), "id": None} == expected


def test_what_is_open_is_assumed_and_listed() -> None:
    bare = {key: ROW[key] for key in ("layers", "hidden", "heads", "seq_len", "gpu", "gpus", "tp", "mbs")}
    found = resolve(read_row(bare))
    assert found.assumed["ffn"] == 4 * 6144
    assert found.assumed["recompute"] == "none"
    assert found.assumed["precision"] == "bf16"
    assert {"software", "kv_heads", "dp", "pp", "gbs"} <= set(found.assumed)
    assert found.run.layout.data_parallel == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 60, "kv_heads": 60}, "heads: 60; must be a multiple of tp"),
        ({"gpu": "Unobtainium"}, "unknown"),
        ({"dp": 3}, "tp x pp x cp x dp must be the 8 gpus"),
        ({"gpus": 12}, "gpus: 12; must be a multiple"),
        ({"hidden": -1}, "hidden"),
        ({"hidden": "6144"}, "hidden"),
        ({"recompute": "sometimes"}, "recompute"),
        ({"precision": "fp32"}, "precision"),
        ({"experts": 9, "topk": 2, "ep": 2}, "experts: 9"),
        ({"kv_heads": 12}, "kv_heads|num_query_groups"),
    ],
)
def test_an_impossible_row_has_its_own_error(changes: dict[str, Any], message: str) -> None:
    first, second = predict_rows([{**ROW, "id": "x", **changes}, {**ROW, "id": "y"}], where="rows")
    assert first["id"] == "x"
    assert set(first) == {"id", "error"}
    assert any(part in first["error"] for part in message.split("|"))
    assert second["iter_time_s"] > 0


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("microbatch", r"\[1\]: microbatch: unknown key; did you mean microbatches\?"),
        ("gpu_memory", r"\[1\]: gpu_memory: unknown key; did you mean gpu_mem_gb\?"),
        ("?" * 500, r"unknown key; remove it"),
    ],
)
def test_a_key_that_no_table_has_is_refused(key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        predict_rows([ROW, {**ROW, key: 1}], where="ROWS.json")
    assert len(str(caught.value)) < 200
    assert set(predict_row({**ROW, key: 1})) == {"id", "error"}


def test_settings_of_a_recipe_that_nothing_reads_are_named() -> None:
    knobs = {"overlap_a2a": True, "moe_a2a_overlap": False, "cuda_graph_impl": "none"}
    prediction = predict_row({**ROW, "knobs": knobs})
    assert prediction["warnings"] == [*predict_row(ROW)["warnings"], "knobs: overlap_a2a: not read"]


ROW_OF_STAGES = {**ROW, "tp": 2, "pp": 4}
KNOBS_OF_A_RECIPE: tuple[dict[str, Any], ...] = (
    {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]},
    {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
    {"expert_tensor_parallel_size": 1},
    {"moe_a2a_overlap": True},
    {"moe_flex_dispatcher_backend": "hybridep"},
    {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
    {
        "moe_expert_rank_capacity_factor": 1.5,
        "moe_paged_stash": True,
        "moe_paged_stash_buffer_size_factor_cuda": 1.2,
    },
    {"pp_layout": "Et*13|t*12|t*12|t*11L"},
    {"recompute_modules": ["layernorm"]},
    {"recompute_num_layers": 1},
)


@pytest.mark.parametrize("knobs", KNOBS_OF_A_RECIPE)
def test_every_setting_that_counts_as_read_changes_the_run(knobs: dict[str, Any]) -> None:
    row = {**ROW_OF_STAGES, "arch": "moe", "experts": 8, "topk": 2}
    assert resolve(read_row({**row, "knobs": knobs})).run != resolve(read_row(row)).run


def test_all_settings_that_count_as_read_are_tried() -> None:
    assert {name for knobs in KNOBS_OF_A_RECIPE for name in knobs} == READ_KNOBS


def test_recomputed_modules_of_a_recipe_are_read() -> None:
    """Megatron's default repeats attention's core; another module costs its own forward and keeps it."""
    row = {**ROW, "recompute": "selective"}
    core = predict_row({**row, "knobs": {"recompute_modules": ["core_attn"]}})
    assert core == {**predict_row(row), "id": core["id"]}
    assert predict_row({**row, "knobs": {"recompute_modules": ["unknown"]}}) == core
    norm, ffn = (
        predict_row({**row, "knobs": {"recompute_modules": modules}})
        for modules in (["layernorm"], ["layernorm", "mlp"])
    )
    assert norm["iter_time_s"] < ffn["iter_time_s"]
    assert norm["peak_memory_bytes"] > ffn["peak_memory_bytes"]


def test_no_array_is_refused() -> None:
    with pytest.raises(ConfigError, match="array of rows"):
        predict_rows({"rows": []}, where="ROWS.json")
    with pytest.raises(ConfigError, match=r"\[0\]: must be an object"):
        predict_rows([3], where="ROWS.json")


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 200), st.integers(1, 64))
def test_a_split_holds_every_layer(num_layers: int, num_stages: int) -> None:
    split = split_layers(num_layers, num_stages)
    assert sum(split) == num_layers
    assert len(split) == num_stages
    assert max(split) - min(split) <= 1


def test_embedding_and_head_count_as_layers_where_only_that_divides() -> None:
    assert split_layers(22, 8) == (2, 3, 3, 3, 3, 3, 3, 2)
    assert split_layers(24, 8) == (3,) * 8


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("ZB-1p", ScheduleKind.ZB_H1),
        ("ZB-2p (all-reduce sync)", ScheduleKind.ZB_H2),
        ("1F1B", ScheduleKind.ONE_F_ONE_B),
    ],
)
def test_schedules_by_their_published_names(words: str, kind: ScheduleKind) -> None:
    assert run(PIPELINE, schedule=words).schedule is kind
    assert run(PIPELINE, schedule=words, vpp=2).schedule is ScheduleKind.INTERLEAVED


def test_software_rules() -> None:
    assert software_named("NeMo 24.07").tensor_overlap is Overlap.FULL
    assert software_named("Megatron-LM 2021").attention == "unfused"
    assert software_named("something new").attention == "native-flash"
    assert not software_named("Megatron-LM, TE, no comm overlap").has_data_overlap
    assert software_named("InternEvo", {"zero1_group": -1}).zero_broadcasts
    assert not software_named("torchtitan", {"torch_compile": False}).fused_elementwise


@pytest.mark.parametrize(
    ("gpu", "precision", "warning"),
    [
        ("A100-SXM-80GB", "fp8", "precision: fp8; A100-SXM-80GB has no fp8: products as in bf16"),
        ("H100-SXM-80GB", "nvfp4", "precision: nvfp4; H100-SXM-80GB has no fp4: products as in fp8"),
        ("H100-SXM-80GB", "fp8", None),
        ("A100-SXM-80GB", "bf16", None),
    ],
)
def test_a_precision_that_the_device_lacks_is_named(gpu: str, precision: str, warning: str | None) -> None:
    found = resolve(read_row({**ROW, "gpu": gpu, "precision": precision})).warnings
    assert found == ([] if warning is None else [warning])
