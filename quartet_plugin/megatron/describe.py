"""Reads model, layout, split and schedule out of Megatron's arguments, as the types of a plan.

The arguments may be the user's flags as they are (with the parser's defaults) or what Megatron made of them:
where Megatron derives a value, the same rule is here, with its function in 0.19.2 named.
"""

from argparse import Namespace
from typing import Any

from quartet_plugin.errors import ConfigError, InfeasibleError
from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.layout import Layout, Recompute
from quartet_plugin.model.plan import ScheduleChoice, ScheduleName, Split
from quartet_plugin.model.shape import ModelShape, PositionEmbedding

FRAMEWORK = MEGATRON.framework

# Feature -> whether these arguments use it. Names are explained in docs/support.md.
_SWITCHES = {
    "moe": ("num_experts",),
    "mtp": ("mtp_num_layers",),
    "fsdp": ("use_megatron_fsdp", "use_torch_fsdp2", "use_custom_fsdp"),
    "fp8": ("fp8",),
    "fp4": ("fp4",),
    "hybrid": ("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model"),
    "heterogeneous": ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
    "multi_latent_attention": ("multi_latent_attention",),
    "attention_variant": ("experimental_attention_variant", "linear_attention_freq"),
    "packing": ("sft", "reset_position_ids", "reset_attention_mask", "dataloader_inter_document_masking"),
    "per_token_loss": ("calculate_per_token_loss",),
    "rampup_batch_size": ("rampup_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed"),
    "phase_transitions": ("phase_transition_iterations",),
    "overlap_grad_reduce": ("overlap_grad_reduce",),
    "overlap_param_gather": ("overlap_param_gather",),
    "overlap_moe": ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
    "cpu_offload": (
        "cpu_offloading_num_layers",
        "optimizer_cpu_offload",
        "fine_grained_activation_offloading",
    ),
    "tp_comm_overlap": ("tp_comm_overlap",),
    "hierarchical_context_parallel": ("hierarchical_context_parallel_sizes", "hybrid_context_parallel"),
    "reinforcement_learning": ("perform_rl_step",),
    "encoder_decoder": ("decoder_num_layers",),
    "inprocess_restart": ("inprocess_restart",),
    "tp_pp_dp_order": ("use_tp_pp_dp_mapping",),
}


def shape_of(args: Namespace, *, vocab_size: int | None = None) -> ModelShape:
    """The model's shape; `vocab_size` is padded, None where the arguments already have it.

    Raises ConfigError for arguments without a size that every model needs.
    """
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if getattr(args, name, None) is None:
            raise ConfigError(
                f"--{name.replace('_', '-')}: not given; a plan needs the model's size in flags"
            )
    heads = args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    vocab = vocab_size if vocab_size is not None else getattr(args, "padded_vocab_size", None)
    if vocab is None:
        raise ConfigError("the vocabulary's size is not known before the tokenizer is built")
    return ModelShape(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=_ffn_hidden_size(args),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=args.kv_channels or args.hidden_size // heads,
        seq_length=args.seq_length,
        vocab_size=vocab,
        max_position_embeddings=args.max_position_embeddings or args.seq_length,
        gated_ffn=bool(args.swiglu),
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        position_embedding=_position_embedding(args),
    )


def _ffn_hidden_size(args: Namespace) -> int:
    if args.ffn_hidden_size is not None:
        return int(args.ffn_hidden_size)
    # arguments.py, validate_args: two thirds for gated FFNs, in multiples of 64.
    return int((4 * args.hidden_size * 2 / 3) / 64) * 64 if args.swiglu else 4 * args.hidden_size


def _position_embedding(args: Namespace) -> PositionEmbedding:
    kind = args.position_embedding_type
    if kind in ("rope", "yarn", "mrope") or getattr(args, "use_rotary_position_embeddings", False):
        return "rope"
    return "learned_absolute" if kind == "learned_absolute" else "none"


def layout_of(args: Namespace, *, world_size: int) -> Layout:
    """The degrees of parallelism. Raises ConfigError where the world does not divide."""
    degrees = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if world_size % degrees:
        raise ConfigError(
            f"world size {world_size}: must be a multiple of the tensor x pipeline x context "
            f"parallel sizes ({degrees})"
        )
    if args.micro_batch_size is None:
        raise ConfigError("--micro-batch-size: not given")
    return Layout(
        tensor_parallel=args.tensor_model_parallel_size,
        pipeline_parallel=args.pipeline_model_parallel_size,
        data_parallel=world_size // degrees,
        virtual_stages=_virtual_stages(args),
        context_parallel=args.context_parallel_size,
        expert_parallel=args.expert_model_parallel_size,
        micro_batch_size=args.micro_batch_size,
        sequence_parallel=bool(args.sequence_parallel) and args.tensor_model_parallel_size > 1,
        distributed_optimizer=bool(args.use_distributed_optimizer),
        recompute=_recompute(args),
    )


def _recompute(args: Namespace) -> Recompute:
    if getattr(args, "recompute_activations", False):
        return "selective"
    granularity = args.recompute_granularity
    return granularity if granularity in ("selective", "full") else "none"


def _layout_stages(args: Namespace) -> list[int] | None:
    """Transformer layers of each stage in `--pipeline-model-parallel-layout`, read by Megatron itself."""
    layout = args.pipeline_model_parallel_layout
    if layout is None:
        return None
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    if not isinstance(layout, str):
        layout = str(layout)
    stages = PipelineParallelLayerLayout.parse_str_to_list(layout)
    return [stage.count(LayerType.decoder) for stage in stages]


def _virtual_stages(args: Namespace) -> int:
    """Chunks on each device, as validate_args derives them."""
    pp = int(args.pipeline_model_parallel_size)
    if pp == 1:
        return 1
    stages = _layout_stages(args)
    if stages is not None:
        return max(1, len(stages) // pp)
    if args.num_virtual_stages_per_pipeline_rank is not None:
        return int(args.num_virtual_stages_per_pipeline_rank)
    if args.num_layers_per_virtual_pipeline_stage is not None and args.num_layers is not None:
        return max(1, _num_split_layers(args) // pp // int(args.num_layers_per_virtual_pipeline_stage))
    return 1


def _num_split_layers(args: Namespace) -> int:
    """Entries that are divided evenly: layers, and embedding and loss where they count as layers."""
    extra = bool(args.account_for_embedding_in_pipeline_split) + bool(args.account_for_loss_in_pipeline_split)
    return int(args.num_layers) + extra


def split_of(args: Namespace) -> Split:
    """Transformer layers of each stage, as transformer_block.get_num_layers_to_build counts them.

    Raises InfeasibleError for layers that Megatron could not divide.
    """
    stages = _layout_stages(args)
    if stages is not None:
        return Split(transformer_layers_per_stage=tuple(stages))
    pp, chunks = args.pipeline_model_parallel_size, _virtual_stages(args)
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    per_rank = [0] * pp
    if first is None and last is None:
        per_rank = [_even(_num_split_layers(args), pp)] * pp
    else:
        ends = {0: first, pp - 1: last}
        fixed = {rank: count for rank, count in ends.items() if count is not None}
        left = pp - len(fixed)
        rest = _even(args.num_layers - sum(fixed.values()), left) if left else 0
        per_rank = [fixed.get(rank, rest) for rank in range(pp)]
    counts = [_even(per_rank[stage % pp], chunks) for stage in range(pp * chunks)]
    counts[0] -= bool(args.account_for_embedding_in_pipeline_split)
    counts[-1] -= bool(args.account_for_loss_in_pipeline_split)
    return Split(transformer_layers_per_stage=tuple(counts))


def _even(num_layers: int, parts: int) -> int:
    if num_layers % parts:
        raise InfeasibleError(f"{num_layers} layers cannot be divided evenly over {parts} stages")
    return num_layers // parts


def schedule_of(args: Namespace) -> ScheduleChoice:
    """The stock schedule that Megatron picks."""
    name: ScheduleName = "no-pipelining"
    group = None
    if args.pipeline_model_parallel_size > 1:
        name = "interleaved" if _virtual_stages(args) > 1 else "1f1b"
    if name == "interleaved":
        group = args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
    return ScheduleChoice(name=name, group=group)


def features_of(args: Namespace) -> list[str]:
    """The features of the command that limit its plans, by name."""
    features = [name for name, dests in _SWITCHES.items() if any(_is_on(args, dest) for dest in dests)]
    if args.context_parallel_size > 1:
        features.append("context_parallel")
    if getattr(args, "cuda_graph_impl", "none") not in (None, "none") or _is_on(args, "enable_cuda_graph"):
        features.append("cuda_graphs")
    if getattr(args, "num_distributed_optimizer_instances", 1) > 1:
        features.append("distributed_optimizer_instances")
    if (getattr(args, "gtp_weight_remat_size", 1) or 1) > 1:
        features.append("weight_shards")
    if _is_on(args, "eod_mask_loss") and not _is_on(args, "calculate_per_token_loss"):
        features.append("masked_tokens")
    loader = getattr(args, "dataloader_type", None)
    if loader not in (None, "single"):
        features.append("cyclic_data" if loader == "cyclic" else "external_data")
    return sorted(features)


def _is_on(args: Namespace, dest: str) -> bool:
    return bool(getattr(args, dest, None))


def precision_of(args: Namespace) -> str:
    """`bf16`, `fp16` or `fp32`."""
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def describe_job(args: Namespace, *, neutralised: list[str]) -> dict[str, Any]:
    """The `job` of rank-K.json, from the arguments as Megatron resolved them."""
    import torch
    from megatron.core.package_info import __version__

    from quartet_plugin.model.schema import dump

    features = features_of(args)
    split = None if "hybrid" in features or "encoder_decoder" in features else dump(split_of(args))
    return {
        "framework": FRAMEWORK,
        "framework_version": str(__version__).partition("+")[0],
        "torch_version": str(torch.__version__).partition("+")[0],
        "shape": dump(shape_of(args)),
        "layout": dump(layout_of(args, world_size=args.world_size)),
        "split": split,
        "schedule": dump(schedule_of(args)),
        "global_batch_size": args.global_batch_size,
        "train_iters": args.train_iters,
        "precision": precision_of(args),
        "features": features,
        "neutralised": neutralised,
    }
