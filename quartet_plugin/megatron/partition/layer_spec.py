"""A model's layer specification with the linears of a plan's tensor partition in it.

Specifications are data; the user's is left as it is. Transformer Engine's fused norm and linear become its
norm, then the plan's linear.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from quartet_plugin.errors import PlanError
from quartet_plugin.megatron.partition.context import PartitionContext
from quartet_plugin.megatron.partition.grid_linear import GridLinear
from quartet_plugin.megatron.partition.ring_linear import RingColumnLinear, RingRowLinear
from quartet_plugin.megatron.partition.sharded_state import GridMlp

# A norm that Transformer Engine fuses has its name in its linear's state; a norm of its own gets that name.
_NORM_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def with_partition(spec: Any, context: PartitionContext) -> Any:
    """The specification of a layer, or of a block of layers, with the plan's linears.

    Raises PlanError for layers that have no such linears, by the name of what stands there.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        layers = [with_partition(layer, context) for layer in spec.layer_specs]
        return replace(spec, layer_specs=layers)
    if isinstance(spec, ModuleSpec) and isinstance(spec.submodules, TransformerBlockSubmodules):
        return replace(spec, submodules=with_partition(spec.submodules, context))
    submodules = getattr(spec, "submodules", None)
    if (
        not isinstance(submodules, TransformerLayerSubmodules)
        or getattr(spec, "module", None) is not TransformerLayer
    ):
        raise _refusal("transformer layer", getattr(spec, "module", spec))
    changed = submodules
    if context.partition.attention.form != "stock":
        changed = replace(changed, self_attention=_attention(changed.self_attention, context))
    if context.partition.mlp.form != "stock":
        changed = replace(changed, mlp=_mlp(changed.mlp, context))
    return replace(spec, submodules=_with_norms(submodules, changed))


def _attention(spec: Any, context: PartitionContext) -> Any:
    submodules = getattr(spec, "submodules", None)
    if not isinstance(submodules, SelfAttentionSubmodules) or spec.module is not SelfAttention:
        raise _refusal("self attention", getattr(spec, "module", spec))
    linears = replace(submodules, linear_qkv=_linear("qkv", context), linear_proj=_linear("proj", context))
    return replace(spec, submodules=linears)


def _mlp(spec: Any, context: PartitionContext) -> Any:
    """An MLP's builder, or a specification as releases and scripts before it have."""
    if isinstance(spec, ModuleSpec):
        submodules, owner = spec.submodules, spec.module
    else:
        submodules = getattr(spec, "keywords", {}).get("submodules")
        owner = getattr(getattr(spec, "func", None), "__self__", spec)
    if not isinstance(submodules, MLPSubmodules) or owner is not MLP:
        raise _refusal("MLP", owner)
    linears = replace(submodules, linear_fc1=_linear("fc1", context), linear_fc2=_linear("fc2", context))
    kind = GridMlp if context.partition.mlp.form == "grid" else MLP
    return partial(kind.as_mlp_submodule, submodules=linears)


def _linear(name: str, context: PartitionContext) -> Callable[..., Any]:
    """The builder of one linear, called as Megatron calls its own."""
    if context.block(name).form == "grid":
        return partial(_grid_linear, context, name)
    return partial(_ring_linear, context, name)


def _grid_linear(
    context: PartitionContext,
    linear: str,
    input_size: int,
    output_size: int,
    *,
    config: Any,
    init_method: Any,
    bias: bool,
    stride: int = 1,
    **rest: Any,
) -> GridLinear:
    del rest
    return GridLinear(
        input_size,
        output_size,
        context=context,
        name=linear,
        config=config,
        init_method=init_method,
        bias=bias,
        stride=stride,
    )


def _ring_linear(context: PartitionContext, linear: str, *sizes: int, **options: Any) -> Any:
    kind = RingColumnLinear if linear in ("qkv", "fc1") else RingRowLinear
    return kind(*sizes, context=context, linear=linear, **options)


def _with_norms(submodules: Any, changed: Any) -> Any:
    """The layer with norms before linears that had one fused; as it is where none had."""
    norms, keys = {}, dict(submodules.sharded_state_dict_keys_map)
    fused = {
        "input_layernorm": changed.self_attention is not submodules.self_attention,
        "pre_mlp_layernorm": changed.mlp is not submodules.mlp,
    }
    for name, is_replaced in fused.items():
        if is_replaced and getattr(submodules, name) is IdentityOp:
            from megatron.core.extensions.transformer_engine import TENorm

            norms[name] = TENorm
            keys[f"{name}."] = _NORM_KEYS[f"{name}."]
    return replace(changed, **norms, sharded_state_dict_keys_map=keys) if norms else changed


def _refusal(kind: str, present: Any) -> PlanError:
    name = getattr(present, "__name__", None) or repr(present)
    return PlanError(
        f"layout.tensor_partition: the model's {kind} is {name}, whose linear layers are not Megatron's; "
        "keep the partition stock"
    )
