"""Megatron's arguments that keep layers as Megatron cuts them, each by name; nothing of it is imported."""

from argparse import Namespace
from typing import Any

from quartet_plugin.space.runtime_refusals import Refused, first_refused

_LAYERS = "the plan replaces only a layer's four dense linear layers"
_OTHER_LINEARS = "it needs Megatron's own linear layers"
_FP8 = "the plan's linear layers have no scaling factors"
_GRAPHS = "a graph cannot contain point-to-point messages"
_MATRICES = "its updates of whole matrices were not tried with the plan's shards"


def _is_above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _is_emerging(value: Any) -> bool:
    return value not in ("adam", "sgd")


def _is_graphed(value: Any) -> bool:
    return value not in (None, False, "none")


REFUSED = (
    Refused("num_experts", _LAYERS),
    Refused("num_moe_experts", _LAYERS),
    Refused("multi_latent_attention", _LAYERS),
    Refused("experimental_attention_variant", _LAYERS),
    Refused("attention_output_gate", _LAYERS),
    Refused("mtp_num_layers", _LAYERS),
    Refused("hybrid_layer_pattern", _LAYERS),
    Refused("hybrid_override_pattern", _LAYERS),
    Refused("heterogeneous_layers_config_path", _LAYERS),
    Refused("fp8", _FP8, alias="fp8_format"),
    Refused("fp4", _FP8, alias="fp4_format"),
    Refused("enable_cuda_graph", _GRAPHS),
    Refused("external_cuda_graph", _GRAPHS),
    Refused("cuda_graph_impl", _GRAPHS, is_on=_is_graphed),
    Refused("tp_comm_overlap", "it overlaps the framework's own collectives, which the plan replaces"),
    Refused("context_parallel_size", "tokens are also divided over its ranks", is_on=_is_above_one),
    Refused("use_torch_fsdp2", _OTHER_LINEARS),
    Refused("use_megatron_fsdp", _OTHER_LINEARS),
    Refused("use_te_activation_func", _OTHER_LINEARS),
    Refused("use_transformer_engine_op_fuser", _OTHER_LINEARS),
    Refused("use_kitchen", _OTHER_LINEARS),
    Refused("cpu_offloading", _OTHER_LINEARS),
    Refused("fine_grained_activation_offloading", _OTHER_LINEARS),
    Refused("gtp_weight_remat_size", _OTHER_LINEARS, is_on=_is_above_one),
    Refused("optimizer", _MATRICES, is_on=_is_emerging),
)


def argument_refusal(args: Namespace) -> str | None:
    """Why a command's layers stay as Megatron cuts them; None where they need not."""
    if getattr(args, "ckpt_format", None) == "torch" and (
        getattr(args, "save", None) or getattr(args, "load", None)
    ):
        return "--ckpt-format torch: other layouts could not read such checkpoints; use torch_dist"
    return first_refused(REFUSED, args)


def config_refusal(config: Any) -> str | None:
    """The same of a model's configuration, which a script may have made itself."""
    reason = first_refused(REFUSED, config)
    if reason is not None:
        return reason
    if not getattr(config, "sequence_parallel", False):
        return "--sequence-parallel: it must be on, because the grid's layouts match its shards"
    return None


def size_refusal(config: Any, devices: int) -> str | None:
    """Which size of the model its devices do not divide, for attention's parts that stay with each device."""
    for name in ("num_attention_heads", "num_query_groups"):
        size = getattr(config, name)
        if size % devices:
            return f"{name}: {size}; must be a multiple of the {devices} tensor-parallel devices"
    return None
