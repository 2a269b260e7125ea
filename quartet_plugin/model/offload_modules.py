"""The modules of a layer whose saved inputs go to the host, as one text: their names in order, with +."""

from collections.abc import Iterable

# Megatron's names (megatron/core/transformer/transformer_config.py).
MODULES = (
    "attn_norm",
    "attn_proj",
    "core_attn",
    "expert_fc1",
    "fused_group_mlp",
    "mlp_norm",
    "moe_act",
    "qkv_linear",
)
NONE = "none"


def offload_modules_of(text: str) -> tuple[str, ...]:
    """The modules of a set's text."""
    return () if text == NONE else tuple(text.split("+"))


def offload_modules_text(modules: Iterable[str]) -> str | None:
    """The text of a set; None for one with a module that Megatron does not have."""
    names = sorted(set(modules))
    return ("+".join(names) or NONE) if set(names) <= set(MODULES) else None
