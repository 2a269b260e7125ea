"""A Megatron command's arguments as Megatron's own parser leaves them, as far as a plan needs them.

`megatron_flags` tells what a command states, and None for the rest; here defaults are filled in, and what a
plan cannot describe is refused by the flag's name.

A contract test holds the table below to the installed Megatron's own parser.
"""

import ast
import math
import re
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.hybrid_words import PATTERN, num_pattern_layers
from quartet_plugin.launchers.megatron_flags import flags_among
from quartet_plugin.model.megatron_arguments import REFUSED_WITH_PLAN
from quartet_plugin.model.shape import MAX_LAYERS

# Destinations and defaults of the flags that are read; `NAMED` has the flags that are spelled otherwise.
NUMBERS: dict[str, int | None] = {
    "num_layers": None,
    "hidden_size": None,
    "num_attention_heads": None,
    "seq_length": None,
    "ffn_hidden_size": None,
    "kv_channels": None,
    "num_query_groups": 1,
    "max_position_embeddings": None,
    "padded_vocab_size": None,
    "vocab_size": None,
    "make_vocab_size_divisible_by": 128,
    "global_batch_size": None,
    "micro_batch_size": None,
    "train_iters": None,
    "train_samples": None,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "microbatch_group_size_per_vp_stage": None,
    "num_experts": None,
    "mtp_num_layers": None,
    "ddp_bucket_size": None,
    "recompute_num_layers": None,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "mamba_state_dim": 128,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "mamba_num_heads": None,
}
# The same of numbers that need not be whole, nor above 0.
FACTORS: dict[str, float | None] = {
    "moe_expert_capacity_factor": None,
    "moe_expert_rank_capacity_factor": None,
    "moe_paged_stash_buffer_size_factor_cuda": 1.1,
}
# Those of which 0 is a value: nothing of the kind, or a first or last stage without layers.
MAY_BE_ZERO = frozenset(
    {
        "train_iters",
        "train_samples",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "num_experts",
        "mtp_num_layers",
        "ddp_bucket_size",
        "recompute_num_layers",
        "moe_shared_expert_intermediate_size",
    }
)
TEXTS: dict[str, str | int | None] = {
    "position_embedding_type": "learned_absolute",
    "pipeline_model_parallel_layout": None,
    "recompute_granularity": None,
    "recompute_method": None,
    "fp8": None,
    "moe_layer_freq": 1,
    "moe_token_dispatcher_type": "allgather",
    "moe_flex_dispatcher_backend": "deepep",
    "moe_router_dtype": None,
    "moe_z_loss_coeff": None,
    "cuda_graph_impl": "none",
    "window_size": None,
    "softmax_type": "vanilla",
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "mtp_hybrid_override_pattern": None,
    "data_parallel_sharding_strategy": "optim_grads_params",
}
# Numbers from 0 to 1.
FRACTIONS = {"optimizer_offload_fraction": 1.0}
# Flags with several values.
LISTS: dict[str, list[str] | str | float | None] = {
    "cuda_graph_modules": [],
    "cuda_graph_scope_deprecated": None,
    "recompute_modules": None,
    "offload_modules": [],
    "cp_comm_type": ["p2p"],
    "hierarchical_context_parallel_sizes": None,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.0,
}
SWITCHES = (
    "group_query_attention",
    "swiglu",
    "quick_geglu",
    "untie_embeddings_and_output_weights",
    "use_rotary_position_embeddings",
    "sequence_parallel",
    "use_distributed_optimizer",
    "recompute_activations",
    "moe_layer_recompute",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "bf16",
    "fp16",
    "multi_latent_attention",
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
    "moe_shared_expert_overlap",
    "optimizer_cpu_offload",
    "use_precision_aware_optimizer",
    "moe_router_force_load_balancing",
    "moe_enable_deepep",
    "moe_grouped_gemm",
    "moe_pad_expert_input_to_capacity",
    "moe_paged_stash",
    "moe_router_padding_for_fp8",
    "moe_router_padding_for_quantization",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "fine_grained_activation_offloading",
    "use_megatron_fsdp",
)
# Switches that are on without their flag.
NEGATED = {
    "--disable-bias-linear": "add_bias_linear",
    "--no-bias-dropout-fusion": "bias_dropout_fusion",
}
# What a plan needs only where it searches settings.
FOR_SETTINGS = (
    "ddp_bucket_size",
    "recompute_num_layers",
    "recompute_method",
    "recompute_modules",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "disable_bias_linear",
    "no_bias_dropout_fusion",
    "moe_router_padding_for_fp8",
    "moe_router_padding_for_quantization",
    "moe_router_dtype",
    "window_size",
    "softmax_type",
    "ddp_num_buckets",
    "save_params_interval",
)
NAMED = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "cuda_graph_scope_deprecated": "--cuda-graph-scope",
}
_DESTS = {flag: dest for dest, flag in NAMED.items()}
# What makes a job that the planner cannot describe.
UNREADABLE = {
    **REFUSED_WITH_PLAN,
    "heterogeneous_layers_config_path": "its layers are not all equal",
    "heterogeneous_layers_config_encoded_json": "its layers are not all equal",
    "experimental_attention_variant": "the cost model does not support this attention",
    "linear_attention_freq": "the cost model does not support this attention",
    "decoder_num_layers": "the cost model does not support encoders",
    "moe_latent_size": "the cost model does not support latent experts",
    "use_torch_fsdp2": "the cost model does not support sharded parameters",
    "use_custom_fsdp": "the cost model does not support sharded parameters",
    "fp4": "the planner's precisions are bf16, fp16, fp8 and fp32",
    "cpu_offloading_num_layers": "the cost model does not support offloading of layers",
    "perform_rl_step": "the cost model does not support reinforcement learning",
}
# The flag by which older releases make a hybrid model, of ratios of its layers where it has no pattern.
_HYBRID = "--is-hybrid-model"
# Values that switch off what their flag is about.
_OFF = (["0"], ["none"])


def flag_of(dest: str) -> str:
    """The flag that stores into a destination."""
    return NAMED.get(dest, f"--{dest.replace('_', '-')}")


def read_arguments(words: Sequence[str]) -> tuple[Namespace, tuple[str, ...]]:
    """The values of a command's arguments, by Megatron's destinations, and the flags that a plan leaves.

    Those of `FOR_SETTINGS` are read and left.

    Raises ConfigError, naming the flag, for a value that is none and for a job that no plan describes.
    """
    switches = {**dict.fromkeys(SWITCHES, False), **dict.fromkeys(NEGATED.values(), True)}
    values: dict[str, Any] = {**NUMBERS, **FACTORS, **FRACTIONS, **TEXTS, **LISTS, **switches}
    unread: list[str] = []
    for flag, given in flags_among(words):
        dest = _DESTS.get(flag, flag[2:].replace("-", "_"))
        if flag_of(dest) != flag:
            dest = ""
        if dest in UNREADABLE and list(given) not in _OFF:
            raise ConfigError(f"{flag}: {UNREADABLE[dest]}; omit it, or tune the command with `quartet tune`")
        if dest in FOR_SETTINGS:
            unread.append(flag)
        if flag in NEGATED:
            values[NEGATED[flag]] = False
        elif dest in SWITCHES:
            values[dest] = True
        elif dest in NUMBERS:
            values[dest] = _number(flag, given, least=0 if dest in MAY_BE_ZERO else 1)
        elif dest in FACTORS:
            values[dest] = _factor(flag, given)
        elif dest in TEXTS:
            values[dest] = _value(flag, given)
        elif dest in FRACTIONS:
            values[dest] = _fraction(flag, given)
        elif dest in LISTS:
            values[dest] = list(given)
            if dest == "cp_comm_type" and len(given) > 1:
                unread.append(flag)
        else:
            unread.append(flag)
    if isinstance(values["moe_layer_freq"], str):
        values["moe_layer_freq"] = layer_pattern(values["moe_layer_freq"])
    num_layers = num_pattern_layers(values)
    if num_layers is not None:
        values["num_layers"] = num_layers
    elif _HYBRID in unread:
        raise ConfigError(f"{_HYBRID}: its layers are not in flags; write them with {PATTERN}")
    return Namespace(**values), tuple(dict.fromkeys(unread))


def arguments_in(words: Sequence[str]) -> Namespace:
    """The arguments of a command as far as its flags determine them, for finding features."""
    values = {**NUMBERS, **TEXTS, **dict.fromkeys(SWITCHES, False)}
    for flag, given in flags_among(words):
        text = given[0] if given else ""
        is_number = text.isascii() and text.isdigit() and len(text) < 16
        if flag in NEGATED:
            values[NEGATED[flag]] = False
        else:
            values[_DESTS.get(flag, flag[2:].replace("-", "_"))] = int(text) if is_number else text or True
    return Namespace(**values)


def _value(flag: str, given: Sequence[str]) -> str:
    if not given:
        raise ConfigError(f"{flag}: its value is missing")
    return given[0]


def _number(flag: str, given: Sequence[str], *, least: int) -> int:
    text = _value(flag, given)
    if not re.fullmatch(r"[0-9]{1,15}", text, re.ASCII) or int(text) < least:
        above = " above 0" if least else ""
        raise ConfigError(f"{flag}: {text[:60]!r}; must be a whole number{above}")
    return int(text)


def _factor(flag: str, given: Sequence[str]) -> float:
    return _float(flag, given, least=-math.inf, most=math.inf, rule="a number")


def _fraction(flag: str, given: Sequence[str]) -> float:
    return _float(flag, given, least=0.0, most=1.0, rule="a number from 0 to 1")


def _float(flag: str, given: Sequence[str], *, least: float, most: float, rule: str) -> float:
    text = _value(flag, given)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not least <= value <= most:
        raise ConfigError(f"{flag}: {text[:60]!r}; must be {rule}")
    return value


def layer_pattern(text: str) -> int | list[int]:
    """`--moe-layer-freq`: a number, or a list expression such as `([0]*3+[1]*58)`.

    Raises ConfigError for another expression, or one of more layers than any model has.
    """
    if re.fullmatch(r"[0-9]{1,6}", text, re.ASCII) and int(text):
        return int(text)
    try:
        return _pattern(ast.parse(text.strip()[:10_000], mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"--moe-layer-freq: {text[:60]!r}; must be a number or a list expression such as ([0]*3+[1]*58)"
        ) from error


def _pattern(node: ast.expr) -> list[int]:
    layers: list[int]
    if isinstance(node, ast.List):
        layers = [_constant(element) for element in node.elts]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        layers = _pattern(node.left) + _pattern(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        part, count = _pattern(node.left), _constant(node.right)
        if len(part) * count > MAX_LAYERS:
            raise ValueError("too many layers")
        layers = part * count
    else:
        raise ValueError("no list expression")
    if len(layers) > MAX_LAYERS or not set(layers) <= {0, 1}:
        raise ValueError("no pattern of layers")
    return layers


def _constant(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("no whole number")
