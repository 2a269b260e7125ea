"""The behaviour of frameworks, by the words that published tables use for them.

Published tables name a framework and sometimes an option; the rules from these to a `Software` stand here,
oldest first, so that a reader can argue with each. An unknown name counts as today's Megatron-Core.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from quartet_plugin.cost.devices import DeviceSpec
from quartet_plugin.cost.run import (
    FORCED_IMBALANCE,
    IMBALANCE,
    ContextComm,
    HalfPrecision,
    Overlap,
    Software,
)
from quartet_plugin.model.hierarchical_context import SIZES, sizes_of
from quartet_plugin.model.job_description import JobPrecision
from quartet_plugin.model.layout import SettingValue
from quartet_plugin.model.offload_modules import offload_modules_of

# GPT-2 and GPT-3 recipes train with dropout, materialize the attention scores and reduce half gradients.
_EARLY = Software(
    name="Megatron-LM, early",
    attention="unfused",
    has_dropout=True,
    tensor_overlap=Overlap.NONE,
    has_data_overlap=False,
    gradient_bytes=2,
    main_gradient_bytes=2,
    blocking_transfers=True,
    is_fragmenting=True,
    fused_weight_gradient=False,
    gradient_placeholders=False,
    keeps_gathered_inputs=False,
)
_CORE = Software()

# The share of the kernels of a layer with experts that a part in CUDA graphs replays.
_GRAPHED = {
    "graphed_attn": 0.3,
    "graphed_moe_router": 0.15,
    "graphed_moe_preprocess": 0.15,
    "graphed_mlp": 0.1,
    "graphed_layer": 1.0,
}
# The settings that are switches of GPUs alone, and the field of a `Software` that each sets.
_SWITCHES_OF_GPU = {
    "moe_shared_expert_overlap": "shared_expert_overlap",
    "overlap_moe_expert_parallel_comm": "expert_overlap",
    "delay_wgrad_compute": "delayed_weight_gradients",
    "moe_grouped_gemm": "grouped_experts",
    "optimizer_cpu_offload": "offloads_optimizer",
    "use_megatron_fsdp": "shards_parameters",
}
# Dispatchers that send a token to another domain once, and order it there by themselves.
_SENDS_ONCE = frozenset({"moe_deepep", "moe_hybridep"})


def software_named(
    text: str, options: Mapping[str, Any] | None = None, *, is_pipelined: bool = False
) -> Software:
    """The behaviour of the framework called `text`, with the options a row states."""
    words = text.lower()
    software = _family(words)
    if software is _EARLY and not is_pipelined:
        # Without a pipeline the early releases used torch's DistributedDataParallel, which overlaps.
        software = replace(software, has_data_overlap=True)
    if "no comm overlap" in words:
        software = replace(software, has_data_overlap=False)
    if "tp overlap off" in words:
        software = replace(software, tensor_overlap=Overlap.NONE)
    if "fused cross entropy" in words:
        software = replace(software, fused_loss=True, logit_bytes=4.0)
    if "mlperf" in words:
        software = replace(software, is_graphed=True, logs_step_only=True)
    return _with_options(software, options or {})


def with_features(software: Software, features: Iterable[str]) -> Software:
    """The behaviour under features of a job, by the names of `model.megatron_arguments.features_of`.

    On processors nothing is replayed from graphs, and collectives stop the computation whatever a flag says.
    """
    names = frozenset(features)
    if software.plain_operations:
        return software
    return replace(
        software,
        is_graphed=software.is_graphed or "graphed_iteration" in names,
        graphed_share=_graphed_share(names),
        graphed_attention=not names.isdisjoint(("graphed_attn", "graphed_layer")),
        has_static_inputs="graphed_by_te" in names,
        expert_overlap="overlap_moe" in names,
        shared_expert_overlap="moe_shared_expert_overlap" in names,
        sends_once_a_domain=bool(_SENDS_ONCE & names),
        builds_whole="meta_init" not in names,
    )


def _graphed_share(features: Iterable[str]) -> float:
    """The share of a layer's kernels that the graphed parts among `features` replay."""
    return min(1.0, sum(_GRAPHED.get(name, 0.0) for name in features))


def imbalance_of(features: Iterable[str]) -> float:
    """Tokens of the fullest device of an expert group, over the mean, under features of a job."""
    return FORCED_IMBALANCE if "moe_forced_balance" in frozenset(features) else IMBALANCE


def precision_of_products(
    features: Iterable[str], device: DeviceSpec, *, precision: HalfPrecision
) -> JobPrecision:
    """The format of a layer's products: FP8 where the job and the device have it."""
    return "fp8" if "fp8" in frozenset(features) and "fp8" in device.peak_flops else precision


def with_settings(software: Software, settings: Mapping[str, SettingValue]) -> Software:
    """The behaviour under settings of Megatron, by the names of their knobs; an absent one changes nothing.

    Where collectives stop the computation, as on processors, no setting makes them overlap.
    """
    # No processor runs another value of these than its own.
    of_gpu = {} if software.plain_operations else settings
    switches: dict[str, Any] = {
        field: of_gpu.get(name, getattr(software, field)) is True for name, field in _SWITCHES_OF_GPU.items()
    }
    parts, modules = of_gpu.get("cuda_graph_modules"), of_gpu.get("offload_modules")
    # Megatron gathers parameters beside the forward only where it reduces gradients beside the backward.
    reduces = settings.get("overlap_grad_reduce", True) is True
    comm, sizes = of_gpu.get("cp_comm_type"), sizes_of(of_gpu.get(SIZES))
    return replace(
        software,
        **switches,
        offloaded_modules=software.offloaded_modules if modules is None else offload_modules_of(str(modules)),
        optimizer_offload_fraction=float(
            of_gpu.get("optimizer_offload_fraction", software.optimizer_offload_fraction)
        ),
        graphed_share=_graphed_share(f"graphed_{part}" for part in parts.split("+"))
        if isinstance(parts, str)
        else software.graphed_share,
        graphed_attention="attn" in parts.split("+")
        if isinstance(parts, str)
        else software.graphed_attention,
        has_data_overlap=software.has_data_overlap and reduces,
        gather_overlap=software.gather_overlap
        and reduces
        and settings.get("overlap_param_gather", True) is True,
        bucket_elements=float(settings.get("ddp_bucket_size") or software.bucket_elements),
        gathers_tokens=settings.get("moe_token_dispatcher") == "allgather",
        sends_once_a_domain=_sends_once(software, of_gpu.get("moe_token_dispatcher")),
        context_comm=ContextComm(str(comm)) if comm in ContextComm else software.context_comm,
        exchanging_ranks=sizes[0] if sizes else software.exchanging_ranks,
    )


def _sends_once(software: Software, dispatcher: SettingValue | None) -> bool:
    """Whether tokens are sent to a domain once; `flex` alone is a back end that features may tell."""
    if dispatcher in (None, "flex"):
        return software.sends_once_a_domain
    return f"moe_{str(dispatcher).removeprefix('flex-')}" in _SENDS_ONCE


def _family(words: str) -> Software:
    if "sail-sg" in words:
        return replace(
            _EARLY,
            name="zero-bubble",
            tensor_overlap=Overlap.BACKWARD,
            gradient_bytes=4,
            fused_weight_gradient=True,
        )
    if "megatron-deepspeed" in words:
        # ZeRO-1 keeps an fp32 gradient shard and two buckets of 5e8 half-precision elements; its many
        # communicators hold about as much again in buffers of their own.
        return replace(
            _EARLY,
            name="Megatron-DeepSpeed",
            optimizer_bytes=16.0,
            bucket_bytes=5e9,
            keeps_stage_outputs=True,
            reduces_all=True,
            splits_transfers=True,
        )
    if "zero-3" in words:
        return replace(_EARLY, name="DeepSpeed ZeRO-3", has_data_overlap=True, collectives_per_layer=12)
    if "megatron-lm" in words and any(year in words for year in ("2019", "2020", "2021")):
        return _EARLY
    if "megatron-lm 2022" in words:
        return replace(
            _EARLY, name="Megatron-LM 2022", tensor_overlap=Overlap.BACKWARD, fused_weight_gradient=True
        )
    if "nemo" in words:
        return replace(
            _CORE,
            name="NeMo",
            tensor_overlap=Overlap.FULL,
            gradient_bytes=2,
            main_gradient_bytes=2,
            fused_loss=True,
            logit_bytes=4.0,
        )
    if "mindspeed" in words:
        return replace(
            _CORE, name="MindSpeed", tensor_overlap=Overlap.FULL if "mc2" in words else Overlap.BACKWARD
        )
    if "torchtitan" in words:
        return replace(
            _CORE,
            name="torchtitan",
            gathers_narrow=False,
            attention="flash-2",
            tensor_overlap=Overlap.NONE,
            selective_fraction=0.5,
            logit_bytes=12.0,
            fused_weight_gradient=False,
            has_early_stop=True,
            gradient_bytes=4,
        )
    if "composer" in words or "fsdp" in words:
        return replace(
            _CORE,
            name="FSDP",
            attention="flash-1",
            fused_elementwise=False,
            gradient_bytes=2,
            has_early_stop=True,
            fused_loss=True,
            logit_bytes=4.0,
            gradient_placeholders=False,
        )
    if "internevo" in words:
        return replace(
            _CORE,
            name="InternEvo",
            attention="flash-2",
            fused_elementwise=False,
            gradient_bytes=2,
            main_gradient_bytes=2,
        )
    return _CORE


def _with_options(software: Software, options: Mapping[str, Any]) -> Software:
    if "torch_compile" in options:
        software = replace(software, fused_elementwise=options["torch_compile"] is True)
    if options.get("async_tp") is True:
        software = replace(software, tensor_overlap=Overlap.FULL)
    if options.get("zero1_group") == -1:
        software = replace(software, zero_broadcasts=True)
    return software
