"""The layers of a HybridModel from Megatron's own parts, where its specification has Transformer Engine's.

Transformer Engine fuses a norm with the linear behind it; here the norm stands before. The letters of the
pattern are `*` attention, `+` latent attention, `-` MLP, `E` experts, `M` state space. The others keep
Megatron's layers, which ask for Transformer Engine as they are built.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from quartet_plugin.rank.seams import Redirect

SPECS, BLOCK = "megatron.core.models.hybrid.hybrid_layer_specs", "megatron.core.models.hybrid.hybrid_block"
_BUILDER = "megatron.training.models.hybrid"
_ATTENTION = ("input_layernorm", "self_attention", "self_attn_bda")
_MLP = ("pre_mlp_layernorm", "mlp", "mlp_bda")


def local_stack(stack: Any) -> Any:
    """The specification of a stack whose layers are local; unchanged where this Megatron has other parts."""
    try:
        return _local_stack(stack)
    except (AttributeError, TypeError):
        return stack


def _local_stack(stack: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    dense = get_gpt_layer_local_spec().submodules
    latent = get_gpt_layer_local_spec(multi_latent_attention=True).submodules
    # Megatron's own specification has a number of experts for the sake of the function, too.
    experts = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False).submodules
    layers = stack.submodules
    changes = {
        "attention_layer": _with_parts(layers.attention_layer, _chosen(dense, _ATTENTION)),
        "mlp_layer": _with_parts(layers.mlp_layer, _chosen(dense, _MLP)),
        "moe_layer": _with_parts(layers.moe_layer, _chosen(experts, _MLP)),
        "mamba_layer": _state_space(layers.mamba_layer),
        "mtp_block_spec": _further_tokens(layers.mtp_block_spec),
    }
    if hasattr(layers, "mla_layer"):
        changes["mla_layer"] = _with_parts(layers.mla_layer, _chosen(latent, _ATTENTION))
    return dataclasses.replace(stack, submodules=dataclasses.replace(layers, **changes))


def _chosen(submodules: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(submodules, name) for name in names}


def _with_parts(layer: Any, parts: Mapping[str, Any]) -> Any:
    """A layer that is built of these submodules alone."""
    return dataclasses.replace(layer, submodules=type(layer.submodules)(**parts))


def _state_space(layer: Any) -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    mixer = dataclasses.replace(
        layer.submodules.mixer,
        submodules=dataclasses.replace(
            layer.submodules.mixer.submodules, in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
        ),
    )
    return dataclasses.replace(
        layer, submodules=dataclasses.replace(layer.submodules, norm=WrappedTorchNorm, mixer=mixer)
    )


def _further_tokens(block: Any) -> Any:
    """The layers of multi-token prediction, which take their inner layers from the stack."""
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    norms = dict.fromkeys(("enorm", "hnorm", "layer_norm"), WrappedTorchNorm)
    layers = [
        dataclasses.replace(
            layer, submodules=dataclasses.replace(layer.submodules, eh_proj=ColumnParallelLinear, **norms)
        )
        for layer in block.submodules.layer_specs
    ]
    return dataclasses.replace(block, submodules=dataclasses.replace(block.submodules, layer_specs=layers))


def _torch_norm(_norm: Any) -> Any:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return WrappedTorchNorm


REDIRECTS = (
    Redirect(SPECS, "hybrid_stack_spec", local_stack),
    Redirect(BLOCK, "TENorm", _torch_norm),
    Redirect(_BUILDER, "default_hybrid_stack_spec", local_stack),
)
