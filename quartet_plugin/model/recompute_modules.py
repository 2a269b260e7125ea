"""The modules of a layer that selective recompute repeats, as one text: their names in order, joined by +."""

from collections.abc import Iterable

# Megatron's names (megatron/core/transformer/transformer_config.py).
MODULES = (
    "core_attn",
    "gdn_norm_out",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "moe_act",
    "shared_experts",
)


def modules_of(text: str) -> tuple[str, ...]:
    """The modules of a set's text."""
    return tuple(text.split("+"))


def modules_text(modules: Iterable[str]) -> str | None:
    """The text of a set; None for an empty set, or one with a module that Megatron does not have."""
    names = sorted(set(modules))
    return "+".join(names) if names and set(names) <= set(MODULES) else None
