"""Megatron's arguments as model, layout, split, schedule, precision and features of a job.

The arguments may be the user's flags as they are (with the parser's defaults) or what Megatron made of them:
where Megatron derives a value, the same rule is here, with its function in 0.19.2 named. Nothing of Megatron
is imported, so the tuner's side reads a command's flags with it, too.
"""

import itertools
import math
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from quartet_plugin.errors import ConfigError, InfeasibleError
from quartet_plugin.model.job_description import (
    ExpertCapacity,
    Experts,
    LatentAttention,
    words_of_model,
)
from quartet_plugin.model.layout import Layout, Recompute
from quartet_plugin.model.plan import ScheduleChoice, ScheduleName, Split
from quartet_plugin.model.shape import (
    DEFAULT_GROUPS,
    DEFAULT_HEAD,
    DEFAULT_STATE,
    LETTERS,
    MAX_LAYERS,
    LayerKinds,
    ModelShape,
    PositionEmbedding,
)

# Megatron's default of the pages of a stash, over the mean tokens.
STASH_FACTOR = 1.1
# Far more than the layers and stages of any model, written out.
_MAX_LAYOUT = 8 * MAX_LAYERS


# Feature -> whether these arguments use it. Names are explained in docs/support.md.
FEATURES = {
    "moe": ("num_experts",),
    "moe_grouped_gemm": ("moe_grouped_gemm",),
    "mtp": ("mtp_num_layers",),
    "fsdp": ("use_megatron_fsdp", "use_custom_fsdp"),
    "torch_fsdp": ("use_torch_fsdp2",),
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
    "cpu_offload": ("cpu_offloading_num_layers",),
    "activation_offload": ("fine_grained_activation_offloading",),
    "precision_aware_optimizer": ("use_precision_aware_optimizer",),
    "fp8_param_gather": ("fp8_param_gather",),
    "tp_comm_overlap": ("tp_comm_overlap",),
    "hierarchical_context_parallel": ("hierarchical_context_parallel_sizes",),
    "hybrid_context_parallel": ("hybrid_context_parallel",),
    "reinforcement_learning": ("perform_rl_step",),
    "encoder_decoder": ("decoder_num_layers",),
    "inprocess_restart": ("inprocess_restart",),
    "tp_pp_dp_order": ("use_tp_pp_dp_mapping",),
    "sharp": ("use_sharp",),
    "gpu_sniff_test": ("gpu_sniff_test_interval",),
    "step_param_gather": ("overlap_param_gather_with_optimizer_step",),
    "ddp_num_buckets": ("ddp_num_buckets",),
    "saved_params": ("save_params_interval",),
    "meta_init": ("init_model_with_meta_device",),
}

# The arguments beside which Megatron-FSDP stays on or off (`_sharding_features`).
_BOUND_TO_SHARDING = (
    *("moe_single_grouped_weight", "moe_single_grouped_bias", "verify_integrity"),
    *("check_weight_hash_across_dp_replicas_interval", "fsdp_manual_registration", "nccl_ub"),
    # By the flag of a command whose parser is not here.
    "use_nccl_ub",
)

# The arguments with which every activation of an offloaded module that is large enough leaves the device.
_WHOLE_OFFLOAD = {
    "activation_offload_fraction": 1.0,
    "delta_offload_bytes_across_pp_ranks": 0,
    "min_offloaded_tensor_size": 1024 * 1024,
}

# Arguments that no plan goes with, each with the reason. A custom schedule runs with any batch, but for steps
# of it see arguments.py and get_optimizer_param_scheduler in megatron/training of 0.18 and 0.19.
REFUSED_WITH_PLAN = {
    "yaml_cfg": "the configuration is not given by flags",
    "use_checkpoint_args": "the model's flags come from a checkpoint",
    "step_batch_size_schedule": "Megatron refuses --global-batch-size beside it and counts learning rates "
    "and data in batches of DP x micro-batch, which a plan may change",
    "rampup_batch_size": "a plan is for one global batch size",
}

# The losses of a router, which Megatron multiplies by `--moe-aux-loss-coeff` and logs.
ROUTER_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")

# The name among a job's settings of the heads that limit TP in models with gated delta nets.
LINEAR_ATTENTION_HEADS = "linear_attention_heads"

# The back ends of Megatron's flex dispatcher that a plan may have.
FLEX_BACKENDS = ("deepep", "hybridep")

# The letters of a pattern by the kinds of their layers; all others are MLPs.
_LETTERS_OF = {"attention": "*D+", "experts": "E", "state_space": "MG"}

# Parts of a layer that Megatron captures in CUDA graphs and whose share of its kernels is known.
GRAPHED_PARTS = ("attn", "mlp", "moe_router", "moe_preprocess")


def value_in_words(value: Any) -> Any:
    """A value as its flag takes it: of a member of an enumeration the name, any other value as it is."""
    return value.name if isinstance(value, Enum) else value


def shape_of(args: Namespace, *, vocab_size: int | None = None) -> ModelShape:
    """The model's shape; `vocab_size` is padded, None where the arguments already have it.

    Raises ConfigError for arguments without a size that every model needs.
    """
    num_layers = num_layers_of(args)
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if (num_layers if name == "num_layers" else getattr(args, name, None)) is None:
            raise ConfigError(
                f"--{name.replace('_', '-')}: not given; a plan needs the model's size in flags"
            )
    heads = args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    vocab = vocab_size if vocab_size is not None else getattr(args, "padded_vocab_size", None)
    if vocab is None:
        raise ConfigError("the vocabulary's size is not known before the tokenizer is built")
    return ModelShape(
        num_layers=num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=_ffn_hidden_size(args),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=_head_size(args),
        seq_length=args.seq_length,
        vocab_size=vocab,
        max_position_embeddings=args.max_position_embeddings or args.seq_length,
        gated_ffn=bool(args.swiglu) or _is_on(args, "quick_geglu"),
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        position_embedding=_position_embedding(args),
        layer_kinds=layer_kinds_of(args),
    )


def num_layers_of(args: Namespace) -> Any:
    """The number of layers: a hybrid model's pattern says it, whatever `--num-layers` has."""
    segments = _hybrid_segments(args)
    return args.num_layers if segments is None else sum(map(len, segments))


def num_mtp_layers_of(args: Namespace) -> int:
    """The layers of multi-token prediction: a hybrid model's pattern has theirs behind slashes."""
    pattern = hybrid_pattern(args)
    if "/" in pattern:
        return pattern.count("/")
    # Of a hybrid model Megatron builds none without their own pattern, which may be in a flag of its own.
    is_built = not pattern or bool(_optional(args, "mtp_hybrid_override_pattern"))
    return int(_optional(args, "mtp_num_layers") or 0) if is_built else 0


def hybrid_pattern(args: Namespace) -> str:
    """The pattern of a hybrid model, a letter a layer; empty without one."""
    pattern = _optional(args, "hybrid_layer_pattern") or _optional(args, "hybrid_override_pattern")
    return pattern if isinstance(pattern, str) else ""


def hybrid_pattern_of(args: Namespace, split: Split) -> str:
    """The pattern of a hybrid model with pipes between the stages of a split.

    Raises ConfigError for a split of another number of layers.
    """
    return with_stages(hybrid_pattern(args), split)


def with_stages(pattern: str, split: Split) -> str:
    """A hybrid model's pattern with pipes between the stages of a split; what follows a slash stays.

    Raises ConfigError for a split of another number of layers.
    """
    main, slash, further = pattern.partition("/")
    letters = main.replace("|", "")
    counts = split.transformer_layers_per_stage
    if sum(counts) != len(letters):
        raise ConfigError(f"split: {split.label}; must be the {len(letters)} layers of the pattern")
    ends = list(itertools.accumulate(counts, initial=0))
    stages = (letters[first:end] for first, end in itertools.pairwise(ends))
    return "|".join(stages) + slash + further


def logged_expert_layers_of(args: Namespace) -> tuple[int, ...]:
    """The layers of a hybrid model, from 0, whose routers record a loss for Megatron's log; else none."""
    if not _is_on(args, "num_experts"):
        return ()
    has_loss = not set(ROUTER_LOSSES).isdisjoint(_weighing_router_kinds(args))
    if not has_loss and _optional(args, "moe_z_loss_coeff") is None:
        return ()
    return hybrid_expert_layers_of(args)


def hybrid_expert_layers_of(args: Namespace) -> tuple[int, ...]:
    """The layers with experts of a hybrid model, from 0; none without a pattern.

    Layers of multi-token prediction with experts count as one layer behind the last.
    """
    letters = "".join(_hybrid_segments(args) or [])
    if not letters:
        return ()
    layers = [index for index, kind in enumerate(letters) if kind == "E"]
    return (*layers, *([len(letters)] if "E" in _further_pattern(args) else []))


def _hybrid_segments(args: Namespace) -> list[str] | None:
    """The layers of a hybrid model's stages as its pattern divides them; None without a pattern."""
    main = hybrid_pattern(args).partition("/")[0]
    return main.split("|") if main else None


def layer_kinds_of(args: Namespace) -> LayerKinds | None:
    """The layers of a hybrid model by their letters (hybrid_layer_allocation.py); None without a pattern.

    Sizes of state-space layers are as mamba_mixer.py has them.
    """
    segments = _hybrid_segments(args)
    if segments is None:
        return None
    layers = "".join(segments)
    kinds = _kinds_of(layers, args).with_pattern("".join(map(_letter_of, layers)))
    depths = _further_pattern(args) if num_mtp_layers_of(args) else ""
    written = f"{layers}/{depths}" if depths else layers
    return kinds if written == kinds.pattern else replace(kinds, framework_pattern=written)


def _letter_of(layer: str) -> str:
    """The letter of a layer's kind: several of Megatron's letters are one kind, and all others are MLPs."""
    name = next((name for name, letters in _LETTERS_OF.items() if layer in letters), "mlp")
    return LETTERS[name]


def mtp_kinds_of(args: Namespace) -> LayerKinds | None:
    """The layers of each depth of a hybrid model's multi-token prediction; None where it has none.

    All depths have the same pattern (hybrid_layer_allocation.py, parse_hybrid_pattern).
    """
    layers = _further_pattern(args).partition("/")[0]
    is_built = bool(hybrid_pattern(args) and layers and num_mtp_layers_of(args))
    return _kinds_of(layers, args) if is_built else None


def _further_pattern(args: Namespace) -> str:
    """The patterns of the depths of a hybrid model's multi-token prediction, with slashes between them.

    Empty without any. An older flag has the pattern of all depths (validate_args).
    """
    if further := hybrid_pattern(args).partition("/")[2]:
        return further
    depth = _optional(args, "mtp_hybrid_override_pattern")
    return "/".join([depth] * num_mtp_layers_of(args)) if isinstance(depth, str) else ""


def _kinds_of(layers: str, args: Namespace) -> LayerKinds:
    """Layers by their letters, with the sizes of state-space layers that the arguments say."""
    attention, experts, state_space = (sum(map(layers.count, letters)) for letters in _LETTERS_OF.values())
    head_size, groups = (
        int(_optional(args, f"mamba_{name}") or usual)
        for name, usual in (("head_dim", DEFAULT_HEAD), ("num_groups", DEFAULT_GROUPS))
    )
    heads = int(_optional(args, "mamba_num_heads") or 2 * args.hidden_size // head_size)
    state_size = int(_optional(args, "mamba_state_dim") or DEFAULT_STATE)
    return LayerKinds(
        attention=attention,
        mlp=len(layers) - attention - state_space - experts,
        experts=experts,
        state_space=state_space,
        state_space_heads=heads if state_space else 0,
        state_space_groups=groups if state_space else 0,
        projected_size=(3 * heads * head_size + 2 * groups * state_size + heads) if state_space else 0,
        state_size=state_size if state_space and state_size != DEFAULT_STATE else None,
    )


def _ffn_hidden_size(args: Namespace) -> int:
    if args.ffn_hidden_size is not None:
        return int(args.ffn_hidden_size)
    # arguments.py, validate_args: two thirds with --swiglu, not with --quick-geglu, in multiples of 64.
    return int((4 * args.hidden_size * 2 / 3) / 64) * 64 if args.swiglu else 4 * args.hidden_size


def _head_size(args: Namespace) -> int:
    if _has_latent_attention(args):
        # Latent attention has head sizes of its own; kv_channels plays no part in it.
        return int(args.v_head_dim)
    return int(args.kv_channels or args.hidden_size // args.num_attention_heads)


def _has_latent_attention(args: Namespace) -> bool:
    """Whether the attention is a latent one, by its flag or its letter in a pattern (validate_args)."""
    return bool(getattr(args, "multi_latent_attention", False) or {"+", "D"} & set(hybrid_pattern(args)))


def model_words(args: Namespace) -> dict[str, str]:
    """Precision, experts and attention in words, as a plan that was made without a run has them.

    Raises ConfigError where such a plan cannot describe them.
    """
    precision = "fp8" if getattr(args, "fp8", None) else precision_of(args)
    return words_of_model(precision, experts_of(args), latent_attention_of(args))


def experts_of(args: Namespace) -> Experts | None:
    """The experts that Megatron's arguments ask for; None where all layers are dense."""
    if getattr(args, "num_experts", None) is None:
        return None
    return Experts(
        num_experts=args.num_experts,
        experts_per_token=args.moe_router_topk,
        ffn_hidden_size=args.moe_ffn_hidden_size or _ffn_hidden_size(args),
        shared_ffn_hidden_size=args.moe_shared_expert_intermediate_size or 0,
        num_dense_layers=_num_dense_layers(args),
        capacity=expert_capacity_of(vars(args)),
    )


def _num_dense_layers(args: Namespace) -> int:
    """The dense layers before those with experts; of a hybrid model none: its pattern has their letters."""
    if hybrid_pattern(args):
        return 0
    pattern = args.moe_layer_freq
    if isinstance(pattern, int):
        pattern = [int(layer % pattern == 0) for layer in range(args.num_layers)]
    num_dense = pattern.index(1) if 1 in pattern else len(pattern)
    if 0 in pattern[num_dense:] or len(pattern) != args.num_layers:
        raise ConfigError(
            "--moe-layer-freq: `quartet plan` supports dense layers followed by expert layers only; use "
            "`quartet tune`"
        )
    return num_dense


def expert_capacity_of(values: Mapping[str, Any]) -> ExpertCapacity | None:
    """The limits on the tokens of experts by Megatron's names; None without any.

    A limit of an expert that is below 0 is none (transformer_config.py).
    """
    factor, rank_factor = (
        _positive(values.get(f"moe_expert_{name}capacity_factor")) for name in ("", "rank_")
    )
    if factor is None and rank_factor is None:
        return None
    is_stashed = rank_factor is not None and bool(values.get("moe_paged_stash"))
    stash_factor = values.get("moe_paged_stash_buffer_size_factor_cuda")
    return ExpertCapacity(
        factor=factor,
        is_padded=factor is not None and bool(values.get("moe_pad_expert_input_to_capacity")),
        rank_factor=rank_factor,
        stash_factor=float(STASH_FACTOR if stash_factor is None else stash_factor) if is_stashed else None,
    )


def _positive(value: Any) -> float | None:
    """A number above 0; None for any other value."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and value > 0 else None


def expert_degrees_of(args: Namespace) -> tuple[int, int]:
    """EP and expert TP as Megatron takes them from its arguments, whether or not the model has experts.

    Without a value EP is 1, and expert TP the layers' TP.
    """
    tensor = _optional(args, "expert_tensor_parallel_size") or args.tensor_model_parallel_size
    return int(_optional(args, "expert_model_parallel_size") or 1), int(tensor)


def latent_attention_of(args: Namespace) -> LatentAttention | None:
    """The sizes of multi-head latent attention; None where attention is another.

    Raises ConfigError where the queries are not compressed.
    """
    if not _has_latent_attention(args):
        return None
    if args.q_lora_rank is None:
        raise ConfigError(
            "--q-lora-rank: missing; `quartet plan` supports latent attention only with compressed queries; "
            "use `quartet tune`"
        )
    return LatentAttention(
        q_lora_rank=args.q_lora_rank,
        kv_lora_rank=args.kv_lora_rank,
        qk_head_dim=args.qk_head_dim,
        qk_pos_emb_head_dim=args.qk_pos_emb_head_dim,
        v_head_dim=args.v_head_dim,
    )


def linear_attention_heads_of(args: Namespace) -> int | None:
    """The heads of gated delta nets that TP x CP divides; None where the model has no such layer.

    Megatron has heads of keys and heads of values: what divides both divides this number.
    """
    is_present = _optional(args, "experimental_attention_variant") == "gated_delta_net"
    if not is_present and "G" not in hybrid_pattern(args):
        return None
    counts = [_optional(args, f"linear_num_{kind}_heads") for kind in ("key", "value")]
    known = [count for count in counts if isinstance(count, int) and count > 0]
    return math.gcd(*known) or None


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
        # Megatron-FSDP takes it for granted (validate_args).
        distributed_optimizer=bool(args.use_distributed_optimizer)
        or shards_whole_layers(args)
        or _is_on(args, "use_megatron_fsdp"),
        recompute=_recompute(args),
    )


def shards_whole_layers(args: Namespace) -> bool:
    """Whether copies of the model share the optimizer's state by whole layers, as Megatron resolved it.

    It takes --use-distributed-optimizer for that beside every optimizer but Adam and SGD, whose switch it
    then turns off; `dist_muon` says it by its name.
    """
    return _is_on(args, "use_layer_wise_distributed_optimizer") or _optional(args, "optimizer") == "dist_muon"


def _recompute(args: Namespace) -> Recompute:
    # --moe-layer-recompute is selective recompute of the module `moe` (TransformerConfig.__post_init__).
    if getattr(args, "recompute_activations", False) or _is_on(args, "moe_layer_recompute"):
        return "selective"
    granularity = args.recompute_granularity
    return granularity if granularity in ("selective", "full") else "none"


def _layout_stages(args: Namespace) -> list[int] | None:
    """Transformer layers of each stage in `--pipeline-model-parallel-layout`."""
    layout = _optional(args, "pipeline_model_parallel_layout")
    return None if layout is None else stages_of_layout(str(layout))


def has_mtp_before_last(args: Namespace) -> bool:
    """Whether the layout has the layers of multi-token prediction before the last stage: `Ett|tm|L`.

    Megatron takes them there where the last stage has no transformer layer. It does not keep their copy of
    the embedding equal on a rank whose first chunk has the embedding (`setup_embeddings_and_output_layer`).
    """
    layout = _optional(args, "pipeline_model_parallel_layout")
    if layout is None:
        return False
    *others, last = _written_stages(str(layout))
    has_embedding = len(others) > 1 and int(args.pipeline_model_parallel_size) == 2
    return bool(others) and "m" in others[-1] and last == "L" and not has_embedding


def has_mtp_on_inner_stage(args: Namespace) -> bool:
    """Whether the layout has layers of multi-token prediction where no plan has them."""
    layout = _optional(args, "pipeline_model_parallel_layout")
    if layout is None or has_mtp_before_last(args):
        return False
    return any("m" in stage for stage in _written_stages(str(layout))[:-1])


def stages_of_layout(text: str) -> list[int]:
    """Transformer layers of each stage in a layout such as `Ett|(tt|)*3tL`, as parse_str_to_list reads it.

    Raises ConfigError for a layout that Megatron could not read, or one of more layers than any model has.
    """
    return [stage.count("t") for stage in _written_stages(text)]


def _written_stages(text: str) -> list[str]:
    """The stages of a layout, every layer written out."""

    def repeated(match: re.Match[str]) -> str:
        count = int(match[2]) if len(match[2]) < 8 else _MAX_LAYOUT
        if len(match[1]) * count > _MAX_LAYOUT:
            raise ConfigError(
                f"--pipeline-model-parallel-layout: {text[:60]!r}; must have at most {_MAX_LAYOUT} layers"
            )
        return match[1] * count

    rest = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        rest = re.sub(pattern, repeated, rest)
    unknown = sorted(set(rest) - set("Etm|L"))
    if unknown:
        raise ConfigError(
            f"--pipeline-model-parallel-layout: {unknown[0]!r} in {text[:60]!r}; must be written in E, t, m, "
            "L and |"
        )
    return rest.split("|")


def _virtual_stages(args: Namespace) -> int:
    """Chunks on each device, as validate_args derives them."""
    pp = int(args.pipeline_model_parallel_size)
    if pp == 1:
        return 1
    segments = _hybrid_segments(args)
    if segments is not None:
        return max(1, len(segments) // pp)
    stages = _layout_stages(args)
    if stages is not None:
        return max(1, len(stages) // pp)
    if _optional(args, "num_virtual_stages_per_pipeline_rank") is not None:
        return int(_optional(args, "num_virtual_stages_per_pipeline_rank"))
    if _optional(args, "num_layers_per_virtual_pipeline_stage") is not None and args.num_layers is not None:
        return max(
            1, _num_split_layers(args) // pp // int(_optional(args, "num_layers_per_virtual_pipeline_stage"))
        )
    return 1


def _num_split_layers(args: Namespace) -> int:
    """Entries that are divided evenly: layers, and embedding and loss where they count as layers."""
    extra = bool(_optional(args, "account_for_embedding_in_pipeline_split")) + bool(
        _optional(args, "account_for_loss_in_pipeline_split")
    )
    return int(num_layers_of(args)) + extra


def split_of(args: Namespace) -> Split:
    """Layers of each stage, as transformer_block.get_num_layers_to_build counts them.

    A hybrid model's are those between the pipes of its pattern, if it has some (hybrid_layer_allocation.py).
    Raises InfeasibleError for layers that Megatron could not divide.
    """
    stages = _layout_stages(args)
    if stages is not None:
        is_before_last = has_mtp_before_last(args) and bool(num_mtp_layers_of(args))
        return Split(transformer_layers_per_stage=tuple(stages), mtp_before_last=is_before_last or None)
    pp, chunks = args.pipeline_model_parallel_size, _virtual_stages(args)
    segments = _hybrid_segments(args)
    if segments is not None and len(segments) > 1 and pp > 1:
        return Split(transformer_layers_per_stage=tuple(map(len, segments)))
    first, last = (
        _optional(args, "decoder_first_pipeline_num_layers"),
        _optional(args, "decoder_last_pipeline_num_layers"),
    )
    per_rank = [0] * pp
    if first is None and last is None:
        per_rank = [_even(_num_split_layers(args), pp)] * pp
    else:
        ends = {0: first, pp - 1: last}
        fixed = {rank: count for rank, count in ends.items() if count is not None}
        left = pp - len(fixed)
        rest = _even(num_layers_of(args) - sum(fixed.values()), left) if left else 0
        per_rank = [fixed.get(rank, rest) for rank in range(pp)]
    counts = [_even(per_rank[stage % pp], chunks) for stage in range(pp * chunks)]
    counts[0] -= bool(_optional(args, "account_for_embedding_in_pipeline_split"))
    counts[-1] -= bool(_optional(args, "account_for_loss_in_pipeline_split"))
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
        group = _optional(args, "microbatch_group_size_per_vp_stage") or args.pipeline_model_parallel_size
    return ScheduleChoice(name=name, group=group)


def precision_of(args: Namespace) -> str:
    """`bf16`, `fp16` or `fp32`."""
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def features_of(args: Namespace) -> list[str]:
    """The features of the command that limit its plans, by name."""
    features = [name for name, dests in FEATURES.items() if any(_is_on(args, dest) for dest in dests)]
    if args.context_parallel_size > 1:
        features.append("context_parallel")
    if getattr(args, "cuda_graph_impl", "none") not in (None, "none") or _is_on(args, "enable_cuda_graph"):
        features.append("cuda_graphs")
    if len(_listed(_optional(args, "cp_comm_type"))) > 1:
        features.append("cp_comm_by_layer")
    if _is_on(args, "window_size"):
        features.append("sliding_window")
    if _optional(args, "softmax_type") not in (None, "vanilla"):
        features.append("attention_sink")
    if "/" in hybrid_pattern(args):
        features.append("mtp")
    if "D" in hybrid_pattern(args):
        features.append("attention_variant")
    if "hybrid" in features:
        # A stage without layers was not tried.
        is_written = isinstance(_optional(args, "hybrid_layer_pattern"), str)
        features += ["bare_first_stage", "bare_last_stage"] if is_written else ["hybrid_without_pattern"]
    if getattr(args, "add_bias_linear", True) is False:
        features.append("no_linear_bias")
    if "mtp" in features and has_mtp_before_last(args):
        features.append("mtp_before_last")
    elif "mtp" in features and has_mtp_on_inner_stage(args):
        features.append("mtp_on_inner_stage")
    if "mtp" in features and not _is_on(args, "untie_embeddings_and_output_weights"):
        features.append("mtp_tied_head")
    if {"mtp", "moe"} <= set(features) and _is_last_layer_dense(args):
        # Of a stage without layers Megatron would make them with experts (training/models/gpt.py).
        features.append("bare_last_stage")
    if "activation_offload" in features and any(
        _optional(args, name) not in (None, whole) for name, whole in _WHOLE_OFFLOAD.items()
    ):
        features.append("activation_offload_part")
    if getattr(args, "num_distributed_optimizer_instances", 1) > 1:
        features.append("distributed_optimizer_instances")
    if _is_on(args, "async_save") and _is_on(args, "use_persistent_ckpt_worker"):
        features.append("persistent_checkpoint_worker")
    if getattr(args, "non_persistent_ckpt_type", None) == "local" and _is_on(args, "replication"):
        features.append("local_checkpoint_replication")
    if (getattr(args, "gtp_weight_remat_size", 1) or 1) > 1:
        features.append("weight_shards")
    # The loss of further tokens is a mean over the tokens of one microbatch, even then.
    is_per_token = _is_on(args, "calculate_per_token_loss") and "mtp" not in features
    if _is_on(args, "eod_mask_loss") and not is_per_token:
        features.append("masked_tokens")
    loader = getattr(args, "dataloader_type", None)
    if loader not in (None, "single"):
        features.append("cyclic_data" if loader == "cyclic" else "external_data")
    parts = (
        *(_router_features, _graphed_features, _optimizer_features),
        *(_evaluation_features, _layer_features, _sharding_features),
    )
    return sorted(set(features).union(*(features_of_part(args) for features_of_part in parts)))


def _optimizer_features(args: Namespace) -> list[str]:
    """An optimizer other than Adam and SGD, and whether its update of a matrix depends on TP.

    Blockwise Muon, and SOAP in every release, update the part of a matrix that a tensor-parallel rank has
    (megatron/core/optimizer/emerging_optimizers.py).
    """
    name = _optional(args, "optimizer")
    if name in (None, "adam", "sgd"):
        return []
    is_blockwise = "muon" in str(name) and _optional(args, "muon_tp_mode") in (None, "blockwise")
    features = ["muon_blockwise"] if is_blockwise else ["soap_optimizer"] if name == "soap" else []
    return ["emerging_optimizer", *features]


def _sharding_features(args: Namespace) -> list[str]:
    """`fsdp_bound` where an argument forbids turning Megatron-FSDP on or off; else no feature.

    With it Megatron refuses grouped expert weights, hashes of whole weights, and checkpoints with hashes
    (megatron/training/arguments.py); without it manual registration of buffers. Main weights of another
    precision than fp32 with it have fp32 without it.
    """
    is_on = any(_is_on(args, dest) for dest in _BOUND_TO_SHARDING)
    main_weights = str(getattr(args, "megatron_fsdp_main_params_dtype", "fp32"))
    is_other = main_weights not in ("fp32", "torch.float32")
    return ["fsdp_bound"] if is_on or is_other else []


def _evaluation_features(args: Namespace) -> list[str]:
    """The evaluation's own batch, which DP, and without its own micro-batch the training's, must divide.

    A multiple of the global batch is divided by all that divide the latter (validate_args).
    """
    if _optional(args, "eval_micro_batch_size") is not None:
        return ["eval_micro_batch"]
    batch, whole = _optional(args, "eval_global_batch_size"), _optional(args, "global_batch_size")
    is_known = isinstance(batch, int) and isinstance(whole, int) and whole > 0
    return [] if batch is None or (is_known and batch % whole == 0) else ["eval_batch"]


def _layer_features(args: Namespace) -> list[str]:
    """What binds the number of layers, or of stages: patterns by layer, and bf16 layers at the ends."""
    features = []
    # With 1 no layer has rotary embeddings.
    if _optional(args, "no_rope_freq") not in (None, 0, 1):
        features.append("no_rope_pattern")
    skipped = _optional(args, "window_attn_skip_freq")
    if isinstance(skipped, list) or "[" in str(skipped):
        features.append("window_by_layer")
    if _is_on(args, "fp8") and _is_on(args, "first_last_layers_bf16"):
        counts = [_optional(args, f"num_layers_at_{end}_in_bf16") for end in ("start", "end")]
        # Megatron's default is one layer.
        most = max(count if isinstance(count, int) else 1 for count in counts)
        features += ["bf16_end_layers"] if most > 1 else ["bf16_end_layer"] if most == 1 else []
    return features


def _router_features(args: Namespace) -> list[str]:
    """What of the experts depends on how samples are grouped, binds ranks, or limits settings.

    `seq_aux_loss` is of one sequence at a time; `sinkhorn` balances the tokens of one rank.
    """
    if not _is_on(args, "num_experts"):
        return []
    names = {"aux_loss": "moe_microbatch_loss", "sinkhorn": "moe_sinkhorn"}
    kinds = _weighing_router_kinds(args)
    features = [names.get(kind, "moe_global_loss") for kind in kinds if kind != "seq_aux_loss"]
    capacities = ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor")
    if any(_optional(args, name) is not None for name in capacities):
        features.append("moe_capacity")
    if _optional(args, "moe_token_dispatcher_type") == "flex":
        features.append("moe_flex_dispatcher")
        backend = flex_backend_of(args)
        features += [f"moe_{backend}"] if backend in FLEX_BACKENDS else []
    if _is_on(args, "moe_router_force_load_balancing"):
        features.append("moe_forced_balance")
    if _is_on(args, "moe_shared_expert_overlap"):
        features.append("moe_shared_expert_overlap")
    if _has_other_expert_shards(args):
        features.append("expert_tensor_parallel")
    if _is_on(args, "moe_router_padding_for_quantization") or _is_on(args, "moe_router_padding_for_fp8"):
        features.append("moe_router_padding")
    if _optional(args, "moe_router_dtype") == "fp64":
        features.append("moe_router_fp64")
    if getattr(args, "add_bias_linear", True) is not False:
        features.append("moe_linear_bias")
        if getattr(args, "bias_dropout_fusion", True) is False:
            features.append("moe_unfused_bias")
    return features


def flex_backend_of(args: Any) -> str:
    """The back end of the flex dispatcher, by arguments or a model's configuration.

    An older flag asks for DeepEP; without any flag Megatron takes it.
    """
    if getattr(args, "moe_enable_deepep", False):
        return "deepep"
    return str(getattr(args, "moe_flex_dispatcher_backend", None) or "deepep")


def _weighing_router_kinds(args: Namespace) -> list[str]:
    """The kinds of the router that take part in the objective: not `none`, nor a loss with the coefficient 0.

    Megatron's default is the coefficient 0.
    """
    kinds = _listed(_optional(args, "moe_router_load_balancing_type"))
    coefficients = [float(value) for value in _listed(_optional(args, "moe_aux_loss_coeff"))]
    weighing = []
    for place, kind in enumerate(kinds):
        weighs = any(coefficients) if place >= len(coefficients) else coefficients[place] != 0.0
        if kind != "none" and (weighs or kind not in ROUTER_LOSSES):
            weighing.append(kind)
    return weighing


def _graphed_features(args: Namespace) -> list[str]:
    """What is replayed from CUDA graphs: parts of a layer, whole layers or the iteration; and by what."""
    impl = _optional(args, "cuda_graph_impl")
    if impl in (None, "none"):
        return []
    # Releases before 0.19 name the parts a scope; 0.19 keeps the old flag's value apart until it validates.
    names = ("cuda_graph_modules", "cuda_graph_scope_deprecated", "cuda_graph_scope")
    parts = [str(value_in_words(part)) for name in names for part in _listed(_optional(args, name))]
    if impl == "full_iteration" or "full_iteration" in parts:
        return ["graphed_iteration"]
    features = [f"graphed_{part}" for part in parts if part in GRAPHED_PARTS] or (
        [] if set(parts) - {"full"} else ["graphed_layer"]
    )
    return [*features, "graphed_by_te"] if impl == "transformer_engine" else features


def _is_last_layer_dense(args: Namespace) -> bool:
    """Whether the last layer is none of those with experts; layers of multi-token prediction are like it."""
    pattern, num_layers = _optional(args, "moe_layer_freq"), _optional(args, "num_layers")
    if isinstance(pattern, int) and num_layers is not None:
        return bool((num_layers - 1) % pattern)
    return isinstance(pattern, list) and bool(pattern) and not pattern[-1]


def _has_other_expert_shards(args: Namespace) -> bool:
    """Whether experts are cut as no plan has it: neither whole nor in as many shares as layers."""
    shards = _optional(args, "expert_tensor_parallel_size")
    return shards not in (None, 1, args.tensor_model_parallel_size)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _optional(args: Namespace, dest: str) -> Any:
    """The value of an argument that not every release has; None where it is not there."""
    return getattr(args, dest, None)


def _is_on(args: Namespace, dest: str) -> bool:
    return bool(getattr(args, dest, None))
