"""Rows of published runs: the fields that a prediction may read, and the assumptions for missing ones.

Only `ALLOWED` passes the reader; results, notes and names are dropped before anything sees the row, so
a prediction cannot lean on them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from quartet_plugin.cost.devices import DeviceSpec, device_named
from quartet_plugin.cost.run import (
    HalfPrecision,
    Overlap,
    ScheduleKind,
    Software,
    TrainingRun,
    UniformCluster,
    port_share,
)
from quartet_plugin.cost.software import imbalance_of, software_named, with_features
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import field_path
from quartet_plugin.model.huggingface import model_section
from quartet_plugin.model.job_description import Experts, LatentAttention
from quartet_plugin.model.layout import Layout, Recompute
from quartet_plugin.model.megatron_arguments import expert_capacity_of, stages_of_layout
from quartet_plugin.model.recompute_modules import modules_of, modules_text
from quartet_plugin.model.schema import Bounds, Length, parse, record, unknown_key
from quartet_plugin.model.shape import MAX_HIDDEN, MAX_LAYERS, ModelShape
from quartet_plugin.model.tensor_partition import partition_from_label
from quartet_plugin.partition.layer import fault_of_sizes
from quartet_plugin.split.layers import even_split, even_split_with_ends

# Formats whose blocks of elements have a scale each, by parts of their names.
BLOCK_SCALED = ("mxfp8", "nvfp4", "mxfp4")

_Count = Annotated[int, Bounds(ge=1, le=2**31)]
_Devices = Annotated[int, Bounds(ge=1, le=2**20)]
_Rate = Annotated[float, Bounds(gt=0, le=1e9)]
_Words = Annotated[str, Length(most=400)]


@record
class Row:
    """The allowed fields of a row, with the names and units of the published table; None is not printed."""

    arch: Literal["dense", "moe", "moe-mla"] | None = None
    layers: Annotated[int, Bounds(ge=1, le=MAX_LAYERS)]
    hidden: Annotated[int, Bounds(ge=1, le=MAX_HIDDEN)]
    heads: _Count
    seq_len: _Count
    gpu: _Words
    gpus: _Devices
    kv_heads: _Count | None = None
    head_dim: _Count | None = None
    ffn: _Count | None = None
    gated_ffn: bool | None = None
    vocab: _Count | None = None
    experts: _Count | None = None
    topk: _Count | None = None
    moe_ffn: _Count | None = None
    gbs: _Count | None = None
    mbs: _Count | None = None
    microbatches: _Count | None = None
    tp: _Count | None = None
    pp: _Count | None = None
    vpp: _Count | None = None
    dp: _Count | None = None
    cp: _Count | None = None
    ep: _Count | None = None
    sp: bool | None = None
    tensor_partition: _Words | None = None
    zero: Annotated[int, Bounds(ge=0, le=3)] | None = None
    fsdp: _Count | None = None
    precision: _Words | None = None
    schedule: _Words | None = None
    recompute: _Words | None = None
    software: _Words | None = None
    options: Mapping[str, Any] | None = None
    knobs: Mapping[str, Any] | None = None
    mtp_layers: Annotated[int, Bounds(ge=0, le=MAX_LAYERS)] | None = None
    dense_layers: Annotated[int, Bounds(ge=0, le=MAX_LAYERS)] | None = None
    shared_ffn: Annotated[int, Bounds(ge=0, le=2**31)] | None = None
    forced_balance: bool | None = None
    gpu_mem_gb: _Rate | None = None
    gpus_per_node: _Devices | None = None
    nvlink_domain: _Devices | None = None
    intra_bw_GBps_per_dir: _Rate | None = None  # noqa: N815 - the table's own name
    inter_bw_Gbps_per_gpu: _Rate | None = None  # noqa: N815


ALLOWED: frozenset[str] = frozenset(column.name for column in fields(Row))
# The settings of a recipe, of the column `knobs`, that a prediction reads.
READ_KNOBS = frozenset(
    {
        "cuda_graph_impl",
        "cuda_graph_scope",
        "expert_tensor_parallel_size",
        "moe_a2a_overlap",
        "moe_expert_capacity_factor",
        "moe_expert_rank_capacity_factor",
        "moe_flex_dispatcher_backend",
        "moe_pad_expert_input_to_capacity",
        "moe_paged_stash",
        "moe_paged_stash_buffer_size_factor_cuda",
        "pp_layout",
        "recompute_modules",
        "recompute_num_layers",
    }
)
# The column that a HuggingFace config.json's key of the `model` section fills.
_OF_SECTION = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "ffn": "ffn_hidden_size",
    "gated_ffn": "gated_ffn",
    "vocab": "vocab_size",
    "seq_len": "seq_length",
    "experts": "num_experts",
    "topk": "experts_per_token",
    "moe_ffn": "expert_ffn_hidden_size",
    "shared_ffn": "shared_expert_ffn_hidden_size",
    "dense_layers": "num_dense_layers",
}
# The other columns of published tables: results, labels, sources, and what a prediction does not read.
IGNORED = frozenset({
    "active_b", "arch_detail", "check_mfu_bf16_peak", "check_model_tflops_per_gpu", "commit", "core",
    "extra", "family", "gpu_short", "hf", "hfu", "id", "inferred", "iter_time_s",
    "kind", "low_precision", "memory_gb", "memory_kind", "mfu", "missing", "mla", "model", "moe",
    "moe_token_drop", "notes", "optimizer", "overlaps_old_dataset", "params_b", "precision_printed",
    "recipe", "recipe_path", "recipe_tag", "release", "samples_per_s_per_gpu", "section",
    "shape_source", "source", "table", "task", "tflops_kind", "tflops_per_gpu", "tier", "time_basis",
    "tokens_per_s", "tokens_per_s_per_gpu", "unverified", "unverified_fields", "url", "usable",
    "uses_cp",
})  # fmt: skip


@dataclass(slots=True)
class Resolved:
    """A row's run, the assumed values of missing fields, and warnings for the reader."""

    run: TrainingRun
    assumed: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def read_row(data: Mapping[str, Any]) -> Row:
    """The allowed fields of `data`; the other columns of published tables are dropped unread.

    Raises ConfigError for any other key, and for values that break a rule.
    """
    check_keys(data, where="row")
    return parse(Row, {key: data[key] for key in sorted(ALLOWED & set(data))}, where="row")


def check_keys(data: Mapping[str, Any], *, where: str) -> None:
    """Raise ConfigError for a key that no table has, with the known key that is spelled most like it."""
    unknown = next((key for key in data if key not in ALLOWED | IGNORED), None)
    if unknown is not None:
        rule = unknown_key(unknown, known=sorted(ALLOWED))
        raise ConfigError(f"{where}: {field_path([unknown])[:60]}: {rule}")


def resolve_with_config(
    data: Mapping[str, Any], *, devices: Mapping[str, DeviceSpec] | None = None, folder: Path | None = None
) -> Resolved:
    """The run that `resolve` makes, of plain data; `hf` fills the shape from a HuggingFace config.json.

    The row's own columns go before the file's. Raises ConfigError as `read_row`, `resolve` and
    `huggingface.model_section` do.
    """
    path = data.get("hf")
    if path is None:
        return resolve(read_row(data), devices=devices)
    if not isinstance(path, str):
        raise ConfigError("row: hf: must be the path of a config.json")
    section = model_section(Path(path) if folder is None else folder / path)
    columns = {name: section[key] for name, key in _OF_SECTION.items() if section.get(key) is not None}
    # A file that names none of these has none, where a row's would be assumed.
    columns = {"shared_ffn": 0, "dense_layers": 0, **columns}
    latent = section.get("latent_attention")
    if "experts" in columns:
        columns["arch"] = "moe" if latent is None else "moe-mla"
    resolved = resolve(
        read_row({**columns, **{k: v for k, v in data.items() if v is not None}}), devices=devices
    )
    run = replace(resolved.run, shape=replace(resolved.run.shape, tied_embeddings=section["tied_embeddings"]))
    resolved.assumed.pop("tied_embeddings", None)
    if run.experts is not None:
        run = replace(run, latent=None if latent is None else LatentAttention(**latent))
        resolved.assumed.pop("latent_attention", None)
    resolved.run = run
    if "seq_len" not in data:
        resolved.assumed["seq_len"] = columns["seq_len"]
    return resolved


def resolve(row: Row, *, devices: Mapping[str, DeviceSpec] | None = None) -> Resolved:
    """The row's run, with missing fields assumed by the rules of docs/cost-model.md.

    Raises ConfigError for an unknown device and for sizes that no run can have, such as heads that
    tensor parallelism does not divide.
    """
    assumed: dict[str, Any] = {}
    warnings: list[str] = []
    software = _software(row, assumed)
    if software.tensor_overlap is Overlap.FULL and "fp8" in (row.precision or "").lower():
        software = replace(software, parameter_bytes=1)
    features = _features(row)
    software = with_features(software, features)
    if software.expert_overlap:
        # Megatron-Bridge's recipes delay weight gradients wherever they have the overlap.
        software = replace(software, delayed_weight_gradients=True)
    device = device_named(row.gpu, extra=devices)
    shape, experts, latent = _shape(row, assumed)
    layout, num_microbatches = _layout(row, assumed, warnings)
    _check_divisible(shape, layout, experts)
    _check_partition(shape, layout, is_plain=experts is None and latent is None)
    half, matmul = _precisions(row, device, assumed, warnings)
    schedule = _schedule(row, layout, assumed)
    stages = _stages(row, layout)
    zero = row.zero if row.zero is not None else (3 if row.fsdp else 1)
    if row.zero is None:
        assumed["zero"] = zero
    ranks = layout.data_parallel * layout.context_parallel
    group = (row.options or {}).get("zero1_group")
    run = TrainingRun(
        shape=shape,
        layout=layout,
        num_microbatches=num_microbatches,
        layers_per_stage=stages,
        half=half,
        matmul=matmul,
        zero_stage=zero,
        shard_group=min(row.fsdp or ranks, ranks) if zero == 3 else 1,
        optimizer_group=group if isinstance(group, int) and 0 < group <= ranks else ranks,
        schedule=schedule,
        cluster=_cluster(row, device, assumed),
        software=software,
        experts=experts,
        latent=latent,
        has_whole_experts=(row.knobs or {}).get("expert_tensor_parallel_size") == 1,
        has_block_scales=any(name in (row.precision or "").lower() for name in BLOCK_SCALED),
        recomputed_layers=_recomputed_layers(row),
        recomputed_modules=_recomputed_modules(row),
        mtp_layers=row.mtp_layers or 0,
        imbalance=imbalance_of(features),
    )
    return Resolved(run, assumed, warnings)


def _stages(row: Row, layout: Layout) -> tuple[int, ...]:
    """Transformer layers of each stage: of a stated layout, else balanced.

    A layer of multi-token prediction takes the place of one, and runs the head once more; recipes leave room
    for both, and for the head, on the last stage.
    """
    stated = (row.knobs or {}).get("pp_layout")
    if isinstance(stated, str):
        counts = tuple(stages_of_layout(stated))
        if len(counts) == layout.num_stages and sum(counts) == row.layers:
            return counts
    if row.mtp_layers and layout.num_stages > 1:
        head = 1 + 2 * row.mtp_layers
        return even_split_with_ends(row.layers, num_stages=layout.num_stages, embedding=0, head=head)
    return split_layers(row.layers, layout.num_stages)


def split_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Transformer layers of each stage: even, or with embedding and head counted as a layer each.

    The second where only that divides, as published runs with L + 2 divisible did.
    """
    if num_layers % num_stages and (num_layers + 2) % num_stages == 0:
        return even_split_with_ends(num_layers, num_stages=num_stages, embedding=1, head=1)
    return even_split(num_layers, num_stages=num_stages)


def _software(row: Row, assumed: dict[str, Any]) -> Software:
    if row.software is None:
        assumed["software"] = "Megatron-Core"
    software = software_named(row.software or "", row.options, is_pipelined=(row.pp or 1) > 1)
    if "all-reduce sync" not in (row.schedule or "") and software.name == "zero-bubble":
        return replace(software, post_validation=True)
    return software


def _features(row: Row) -> list[str]:
    """The features of the stated settings of experts, by the names that a command's have."""
    knobs = row.knobs or {}
    scopes = knobs.get("cuda_graph_scope") if knobs.get("cuda_graph_impl") not in (None, "none") else None
    parts = ["iteration"] if scopes == "full_iteration" else scopes
    features = [f"graphed_{part}" for part in ([] if isinstance(parts, str) else parts or [])]
    if features and knobs.get("cuda_graph_impl") == "transformer_engine":
        features.append("graphed_by_te")
    if knobs.get("moe_a2a_overlap") is True:
        features.append("overlap_moe")
    backend = knobs.get("moe_flex_dispatcher_backend")
    if isinstance(backend, str):
        features.append(f"moe_{backend}")
    return [*features, "moe_forced_balance"] if row.forced_balance else features


def _shape(row: Row, assumed: dict[str, Any]) -> tuple[ModelShape, Experts | None, LatentAttention | None]:
    kv_heads = _default(row.kv_heads, row.heads, "kv_heads", assumed)
    head_dim = row.head_dim or max(1, row.hidden // row.heads)
    gated = _default(row.gated_ffn, False, "gated_ffn", assumed)
    ffn = _default(row.ffn, 4 * row.hidden, "ffn", assumed)
    vocab = _default(row.vocab, 51200, "vocab", assumed)
    degree = row.tp or 1
    old = not gated and kv_heads == row.heads
    shape = ModelShape(
        num_layers=row.layers,
        hidden_size=row.hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=row.heads,
        num_query_groups=kv_heads,
        kv_channels=head_dim,
        seq_length=row.seq_len,
        vocab_size=-(-vocab // (128 * degree)) * 128 * degree,
        max_position_embeddings=row.seq_len,
        gated_ffn=gated,
        tied_embeddings=old,
        position_embedding="learned_absolute" if old else "rope",
    )
    assumed["tied_embeddings"] = old
    if row.experts is None:
        return shape, None, None
    latent = LatentAttention() if row.arch == "moe-mla" else None
    moe_ffn = _default(row.moe_ffn, ffn, "moe_ffn", assumed)
    experts = Experts(
        num_experts=row.experts,
        experts_per_token=_default(row.topk, 1, "topk", assumed),
        ffn_hidden_size=moe_ffn,
        shared_ffn_hidden_size=(_shared_ffn(row.experts, moe_ffn) if latent else 0)
        if row.shared_ffn is None
        else row.shared_ffn,
        num_dense_layers=int(latent is not None) if row.dense_layers is None else row.dense_layers,
        capacity=expert_capacity_of(row.knobs or {}),
    )
    if latent:
        dense = "" if row.dense_layers is not None else ", one dense layer"
        assumed["latent_attention"] = f"DeepSeek: ranks 1536 and 512, heads 128 + 64{dense}"
        if row.shared_ffn is None:
            assumed["shared_ffn"] = experts.shared_ffn_hidden_size
    return shape, experts, latent


def _shared_ffn(num_experts: int, moe_ffn: int) -> int:
    """DeepSeek-V2 has two shared experts, V3 (256 experts) one."""
    return moe_ffn * (1 if num_experts >= 256 else 2)


def _layout(row: Row, assumed: dict[str, Any], warnings: list[str]) -> tuple[Layout, int]:
    tp, pp, cp = (_default(v, 1, n, assumed) for v, n in ((row.tp, "tp"), (row.pp, "pp"), (row.cp, "cp")))
    model = tp * pp * cp
    if row.gpus % model:
        raise ConfigError(f"gpus: {row.gpus}; must be a multiple of tp x pp x cp ({tp} x {pp} x {cp})")
    dp = _default(row.dp, row.gpus // model, "dp", assumed)
    if dp * model != row.gpus:
        raise ConfigError(f"dp: {dp}; tp x pp x cp x dp must be the {row.gpus} gpus, not {dp * model}")
    mbs = _default(row.mbs, 1, "mbs", assumed)
    sequences = dp * mbs
    gbs = _default(row.gbs, sequences * (row.microbatches or 1), "gbs", assumed)
    count = (
        max(1, round(gbs / sequences)) if gbs % sequences == 0 else row.microbatches or -(-gbs // sequences)
    )
    if gbs % sequences:
        warnings.append(f"gbs {gbs} is no multiple of dp x mbs ({dp} x {mbs}); {count} microbatches taken")
    cut = None if row.tensor_partition is None else partition_from_label(row.tensor_partition)
    layout = Layout(
        tensor_parallel=tp,
        pipeline_parallel=pp,
        data_parallel=dp,
        virtual_stages=(row.vpp or 1) if pp > 1 else 1,
        context_parallel=cp,
        expert_parallel=row.ep or 1,
        micro_batch_size=mbs,
        sequence_parallel=(bool(_default(row.sp, False, "sp", assumed)) or cut is not None) and tp > 1,
        distributed_optimizer=(row.zero or 0) >= 1,
        recompute=_recompute(row, assumed),
        tensor_partition=cut,
    )
    return layout, count


def _recompute(row: Row, assumed: dict[str, Any]) -> Recompute:
    words = _default(row.recompute, "none", "recompute", assumed)
    for mode in ("none", "selective", "full"):
        if words.startswith(mode):
            return mode
    raise ConfigError(f"recompute: {words!r}; must be none, selective or full")


def _recomputed_layers(row: Row) -> int | None:
    """The layers of each stage that full recompute repeats (block method), where the row states them."""
    count = (row.knobs or {}).get("recompute_num_layers")
    return count if isinstance(count, int) and count >= 0 else None


def _recomputed_modules(row: Row) -> tuple[str, ...]:
    """The modules of a layer that selective recompute repeats: attention's core where the row states none."""
    stated = (row.knobs or {}).get("recompute_modules")
    text = modules_text(map(str, stated)) if isinstance(stated, list) else None
    return ("core_attn",) if text is None else modules_of(text)


def _check_partition(shape: ModelShape, layout: Layout, *, is_plain: bool) -> None:
    partition = layout.tensor_partition
    if partition is None:
        return
    fault = fault_of_sizes(
        partition, shape, devices=layout.tensor_parallel, micro_batch_size=layout.micro_batch_size
    )
    if not is_plain:
        fault = "must be stock with experts or latent attention"
    elif layout.context_parallel > 1:
        fault = "must be stock with cp above 1"
    if fault is not None:
        raise ConfigError(f"tensor_partition: {partition.label}; {fault}")


def _check_divisible(shape: ModelShape, layout: Layout, experts: Experts | None) -> None:
    tp, stages = layout.tensor_parallel, layout.num_stages
    for name, value in (("heads", shape.num_attention_heads), ("ffn", shape.ffn_hidden_size)):
        if value % tp:
            raise ConfigError(f"{name}: {value}; must be a multiple of tp ({tp})")
    if shape.num_query_groups % tp and tp % shape.num_query_groups:
        raise ConfigError(f"kv_heads: {shape.num_query_groups}; must divide tp ({tp}) or be a multiple of it")
    if experts is not None and experts.num_experts % layout.expert_parallel:
        raise ConfigError(
            f"experts: {experts.num_experts}; must be a multiple of ep ({layout.expert_parallel})"
        )
    if shape.num_layers < stages - 2:
        raise ConfigError(f"layers: {shape.num_layers}; must fill pp x vpp ({stages}) stages")
    if shape.seq_length % layout.context_parallel:
        raise ConfigError(
            f"seq_len: {shape.seq_length}; must be a multiple of cp ({layout.context_parallel})"
        )


def _precisions(
    row: Row, device: DeviceSpec, assumed: dict[str, Any], warnings: list[str]
) -> tuple[HalfPrecision, Literal["fp16", "bf16", "fp32", "fp8", "fp4"]]:
    words = _default(row.precision, "bf16", "precision", assumed).lower()
    half: HalfPrecision = "fp16" if words.startswith("fp16") or "bf16" not in device.peak_flops else "bf16"
    if not any(name in words for name in ("fp16", "bf16", "fp8", "fp4")):
        raise ConfigError(f"precision: {words!r}; must be bf16, fp16, fp8 or fp4")
    if "fp4" not in words and "fp8" not in words:
        return half, half
    narrow: Literal["fp8", "fp4"] = "fp4" if "fp4" in words else "fp8"
    if not {narrow, "fp4"} & set(device.peak_flops):
        wider = "fp8" if "fp8" in device.peak_flops else half
        warnings.append(f"precision: {row.precision}; {device.name} has no {narrow}: products as in {wider}")
    return half, narrow


def _schedule(row: Row, layout: Layout, assumed: dict[str, Any]) -> ScheduleKind:
    if layout.pipeline_parallel == 1:
        return ScheduleKind.NONE
    words = _default(row.schedule, "1F1B", "schedule", assumed).lower()
    if layout.virtual_stages > 1:
        return ScheduleKind.INTERLEAVED
    for prefix, kind in (
        ("zb-1p", ScheduleKind.ZB_H1),
        ("zb-h1", ScheduleKind.ZB_H1),
        ("zb-2p", ScheduleKind.ZB_H2),
        ("zb-h2", ScheduleKind.ZB_H2),
        ("gpipe", ScheduleKind.GPIPE),
        ("1f1b", ScheduleKind.ONE_F_ONE_B),
        ("none", ScheduleKind.ONE_F_ONE_B),
    ):
        if words.startswith(prefix):
            return kind
    raise ConfigError(
        f"schedule: {words!r}; must be 1F1B, 1F1B-interleaved, GPipe, ZB-1p, ZB-2p, ZB-H1 or ZB-H2"
    )


def _cluster(row: Row, device: DeviceSpec, assumed: dict[str, Any]) -> UniformCluster:
    per_node = _default(row.gpus_per_node, device.devices_per_node, "gpus_per_node", assumed)
    up = row.intra_bw_GBps_per_dir
    out = row.inter_bw_Gbps_per_gpu
    if up is None:
        assumed["intra_bw_GBps_per_dir"] = device.scale_up_bandwidth_bytes_per_s / 1e9
    if out is None and row.gpus > (row.nvlink_domain or per_node):
        assumed["inter_bw_Gbps_per_gpu"] = device.scale_out_bandwidth_bytes_per_s * 8 / 1e9
    return UniformCluster(
        device=device,
        num_devices=row.gpus,
        devices_per_node=per_node,
        scale_up_devices=row.nvlink_domain or max(per_node, device.scale_up_devices),
        scale_up_bytes_per_s=up * 1e9 if up else device.scale_up_bandwidth_bytes_per_s,
        scale_out_bytes_per_s=out * 1e9 / 8 if out else device.scale_out_bandwidth_bytes_per_s,
        memory_bytes=int(row.gpu_mem_gb * 2**30) if row.gpu_mem_gb else device.memory_bytes,
        port_share=port_share(device),
    )


def _default[T](value: T | None, default: T, name: str, assumed: dict[str, Any]) -> T:
    if value is None:
        assumed[name] = default
        return default
    return value
