"""The axes that a feature of the user's job locks at stock. See docs/support.md for the whole table."""

from collections.abc import Iterable, Mapping

from quartet_plugin.model.megatron_arguments import GRAPHED_PARTS
from quartet_plugin.space.axes import Axis
from quartet_plugin.space.needed_flags import axes_without

__all__ = ["Axis", "batching_features", "lock_lines", "locked_axes", "objective_axes"]

_ALL = frozenset(Axis)
_DATA = frozenset({Axis.DEGREES, Axis.MICRO_BATCH})
_STAGES = frozenset({Axis.SPLIT, Axis.SCHEDULE, Axis.DEGREES})
_SCALING = frozenset({Axis.SCALING})
_MAPPING = frozenset({Axis.MAPPING})
_NONE: frozenset[Axis] = frozenset()

# Features with which ranks move by whole nodes alone: the framework takes a rank for a place.
WHOLE_NODES = frozenset(
    {
        # Transformer Engine takes consecutive ranks for one node (megatron/training/initialize.py).
        "tp_comm_overlap",
        "hierarchical_context_parallel",
        "hybrid_context_parallel",
        "distributed_optimizer_instances",
        # No plan describes these groups of experts; to move whole nodes keeps them.
        "expert_tensor_parallel",
    }
)

# Features with which the pipeline's degree is kept beside split and schedule, and why.
STAGES_KEPT = {
    "mtp_tied_head": "Megatron saves no stages of multi-token prediction with a tied head",
    "mtp_without_tokens": "the script gives the last stage no tokens, which multi-token prediction embeds",
    "hybrid_without_pattern": "no --hybrid-layer-pattern, whose pipes would say the stages",
    "fsdp": "Megatron-FSDP shards parameters over all devices of one stage",
    "cpu_offload": "offloading was not tried with other stages",
}

# Features with which TP and CP are kept, whatever a plan may change, and why (megatron/core/transformer/moe/
# router.py: the tokens of one rank are the local ones under sequence parallelism).
TOKENS_KEPT = {"moe_sinkhorn": "a sinkhorn router balances the tokens of one rank"}

# Features with which TP and expert TP are kept, and why: an update of each rank's part of a matrix is another
# than that of the matrix (megatron/core/optimizer/emerging_optimizers.py).
PARTS_KEPT = {
    "muon_blockwise": "blockwise Muon orthogonalizes each tensor-parallel rank's part of a matrix",
    "soap_optimizer": "SOAP preconditions each tensor-parallel rank's part of a matrix",
}

# Features with which the pipeline's degree alone is kept, and why.
PIPELINE_KEPT = {"bf16_end_layers": "the first and the last stage hold the command's bf16 layers"}

# A trial has a part of the training's stages.
FEWER_STAGES = "fewer_stages"

# Features with which micro-batch, or DP, may change the training objective (class C), since a loss is a
# mean over microbatches, which then hold other tokens or samples. Change class C tunes the axes they lock.
_BATCHING = frozenset(
    {
        "moe_microbatch_loss",
        "moe_sinkhorn",
        "moe_global_loss",
        "moe_capacity",
        "packing",
        "masked_tokens",
        "cyclic_data",
        "external_data",
    }
)

_LOCKS: dict[str, frozenset[Axis]] = {
    # Experts have a width of their own, which no shape scales.
    "moe": _SCALING,
    # The router (megatron/core/transformer/moe/router.py): a loss of the tokens of one microbatch, over the
    # TP and CP ranks that share it; a balance of those of one rank (`TOKENS_KEPT`); a loss of the
    # microbatches so far, over the DP ranks too; a limit on the tokens that an expert takes, by rank.
    "moe_microbatch_loss": frozenset({Axis.MICRO_BATCH}),
    "moe_sinkhorn": frozenset({Axis.MICRO_BATCH}),
    "moe_global_loss": _DATA,
    "moe_capacity": _DATA,
    # Rules of ETP, TP, grouped products and the dispatcher look at these.
    **dict.fromkeys(("moe_linear_bias", "moe_unfused_bias", "moe_router_padding", "moe_router_fp64"), _NONE),
    "moe_flex_dispatcher": _NONE,
    # Rules of recompute's modules ask for these.
    "moe_grouped_gemm": _NONE,
    "no_linear_bias": _NONE,
    # A plan has one tensor-parallel size, the experts' too, or whole experts.
    "expert_tensor_parallel": frozenset({Axis.DEGREES}),
    "moe_shared_expert_overlap": _NONE,
    # Offloading the optimizer needs the first; older reports name a part of it. Parameters that are gathered
    # in FP8 need the distributed optimizer.
    **dict.fromkeys(("precision_aware_optimizer", "optimizer_offload_part", "fp8_param_gather"), _NONE),
    # A rule of recompute, graphs and experts: modules whose activations are on the host.
    **dict.fromkeys(("activation_offload", "activation_offload_part"), _NONE),
    # Read for predictions alone: the flex dispatcher's kernels, random routing, what graphs replay.
    **dict.fromkeys(("moe_deepep", "moe_hybridep", "moe_forced_balance"), _NONE),
    **dict.fromkeys((f"graphed_{part}" for part in (*GRAPHED_PARTS, "layer", "iteration", "by_te")), _NONE),
    # It needs virtual stages where there is a pipeline, and a degree of experts: rules of these knobs.
    "overlap_moe": _SCALING,
    # No shape scales the layers of multi-token prediction. They lie on the last stage, before the head, or on
    # the stage before it. By default plans have them there only where the command has (`mtp_before_last`):
    # its script then gives that stage tokens, and lets it share the embedding (`get_embedding_ranks`). With a
    # tied head Megatron cannot write or read checkpoints of several stages
    # (models/common/language_module/language_module.py): the last one has a head of its own beside.
    "mtp": _SCALING,
    "mtp_before_last": _NONE,
    "mtp_on_inner_stage": _STAGES,
    **dict.fromkeys(STAGES_KEPT, frozenset({Axis.SPLIT, Axis.SCHEDULE})),
    # Layers that are not all alike. A hybrid model's stages are the parts of its pattern.
    "hybrid": _SCALING,
    "heterogeneous": _STAGES | _SCALING,
    "multi_latent_attention": _SCALING,
    # Linear attention in some of the layers, which alternate by a short period: a split is predicted with
    # like layers (megatron/core/models/gpt/experimental_attention_variant_module_specs.py).
    "attention_variant": _SCALING,
    # Rules of `cp_comm_type` look at these: Transformer Engine shares some attention in some ways alone.
    **dict.fromkeys(("sliding_window", "attention_sink"), _NONE),
    # Rules of the distributed optimizer, TP, expert TP and the partition of layers look at these.
    **dict.fromkeys(("emerging_optimizer", *PARTS_KEPT), _NONE),
    # DP, and the micro-batch without the evaluation's own, divide its batch (validate_args).
    "eval_micro_batch": frozenset({Axis.DEGREES}),
    "eval_batch": _DATA,
    # Rules of virtual stages, the gather's overlap and the buckets' size look at these.
    **dict.fromkeys(("step_param_gather", "saved_params", "ddp_num_buckets"), _NONE),
    # Several bf16 layers at the ends bind the pipeline's degree (`PIPELINE_KEPT`), a single layer its limit.
    "bf16_end_layer": _NONE,
    "bf16_end_layers": _SCALING,
    # A value for each layer, whose number Megatron compares with the layers'.
    **dict.fromkeys(("cp_comm_by_layer", "no_rope_pattern", "window_by_layer"), _SCALING),
    # Token counts differ between microbatches.
    "packing": _DATA,
    "masked_tokens": _DATA,
    # The samples of a microbatch depend on DP and micro-batch, or on the script.
    "cyclic_data": _DATA,
    "external_data": _DATA,
    # The number of microbatches changes while training, so nothing is tuned; a plan with a custom schedule,
    # which is made for any number, can be applied (cli/train_schedule.py).
    "rampup_batch_size": _ALL,
    # Rules of Megatron-FSDP look at these; without Megatron-FSDP no code materializes weights on the meta
    # device.
    **dict.fromkeys(("fsdp_bound", "meta_init"), _NONE),
    # Parameters are sharded over devices instead of staged. PyTorch's FSDP2 refuses experts and pipelines
    # (megatron/training/arguments.py).
    "torch_fsdp": _STAGES,
    "weight_shards": _STAGES | _MAPPING,
    # Ranks are taken for slots, or in another order.
    "tp_comm_overlap": _NONE,
    # Its sizes go with the degree: a plan with another one has others, or none.
    "hierarchical_context_parallel": _NONE,
    "hybrid_context_parallel": frozenset({Axis.DEGREES}),
    "distributed_optimizer_instances": frozenset({Axis.DEGREES}),
    "inprocess_restart": _MAPPING,
    "tp_pp_dp_order": _MAPPING,
    "sharp": _MAPPING,
    "gpu_sniff_test": _MAPPING,
    "persistent_checkpoint_worker": _MAPPING,
    "local_checkpoint_replication": _MAPPING,
    # Where a rank of the training would be is not known from a trial with a part of its stages.
    FEWER_STAGES: _MAPPING | _SCALING,
    # Graphs are captured in every launch for the order of the framework's schedule; the runtime steps aside.
    "cuda_graphs": _NONE,
    # DeepSpeed: the layers of the first device decide about clipping; gradients are summed over copies of the
    # model, not averaged (deepspeed/runtime/engine.py); the script batches its own data.
    "clips_by_first_stage": _STAGES,
    "summed_gradients": frozenset({Axis.DEGREES}),
    "own_data_iterator": _DATA,
    "tensor_parallel_topology": _ALL,
    # The first or the last stage needs a layer. DeepSpeed: nothing lies before the first layer, or behind the
    # last one. Multi-token prediction: the last stage, where its layers are dense in a mixture of experts.
    # Hybrid models: stages without layers were not tried.
    "bare_first_stage": _NONE,
    "bare_last_stage": _NONE,
    # A rule of the ZeRO stage looks at these.
    **dict.fromkeys(("clips_in_fp32", "zero_bound"), _NONE),
    "dynamic_shape": _NONE,
    "per_token_loss": _NONE,
    "context_parallel": _NONE,
    "overlap_grad_reduce": _NONE,
    "overlap_param_gather": _NONE,
    "fp8": _NONE,
    "fp4": _NONE,
}


def batching_features(features: Iterable[str]) -> tuple[str, ...]:
    """The features by which another micro-batch or DP may change the training objective."""
    return tuple(sorted(_BATCHING & set(features)))


def objective_axes(features: Iterable[str]) -> frozenset[Axis]:
    """The axes, of micro-batch and degrees, on which another value may change the training objective."""
    return frozenset(axis for feature in batching_features(features) for axis in _LOCKS[feature])


def locked_axes(features: Iterable[str], *, change_class: str) -> dict[Axis, str]:
    """The axes that stay at stock, each with the feature that locks it; an unknown feature locks all.

    `change_class` (A, B or C) limits how far a plan may change the training.
    """
    locked: dict[Axis, str] = {}
    for feature in features:
        for axis in Axis:
            if axis in _locked_by(feature, change_class=change_class):
                locked.setdefault(axis, feature)
    if change_class == "A":
        for axis in (Axis.DEGREES, Axis.MICRO_BATCH, Axis.OPTIONS):
            locked.setdefault(axis, "search.change_class A")
    return locked


def lock_lines[A: str](locked: Mapping[A, str], *, change_class: str | None = None) -> list[str]:
    """A line for each feature that locks axes at stock; `without --FLAG` names a missing flag.

    Where a search has the `change_class`, a line also says which other class would tune the axes.
    """
    by_feature: dict[str, list[str]] = {}
    for axis, feature in locked.items():
        by_feature.setdefault(feature, []).append(str(axis))
    return [
        _lock_words(feature, axes, can_be_asked=change_class in ("A", "B") and feature in _BATCHING)
        for feature, axes in by_feature.items()
    ]


def _lock_words(feature: str, axes: Iterable[str], *, can_be_asked: bool) -> str:
    cause = feature if axes_without(feature) is not None else f"because of {feature}"
    how = " (search.change_class: C tunes degrees and micro_batch)" if can_be_asked else ""
    return f"not tuned {cause} (docs/support.md): {', '.join(axes)}{how}"


def _locked_by(feature: str, *, change_class: str) -> frozenset[Axis]:
    without = axes_without(feature)
    axes = _LOCKS.get(feature, _ALL) if without is None else without
    return axes - _DATA if change_class == "C" and feature in _BATCHING else axes
