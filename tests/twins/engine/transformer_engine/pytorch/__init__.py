"""The layers that Megatron's GPT is built of."""

from transformer_engine.pytorch import distributed, fp8, module
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.module.layernorm import LayerNorm, RMSNorm
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.linear import GroupedLinear, Linear

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "fp8",
    "module",
]
