"""Checks how devices share the heads of state-space layers (megatron/core/ssm/mamba_context_parallel.py)."""

from quartet_plugin.model.shape import ModelShape


def fault_of_shared_heads(shape: ModelShape, *, tensor: int, context: int) -> str | None:
    """The rule that TP and CP break together for a model's state-space layers; None where they break none.

    TP alone divides heads and groups. Ranks that share a sequence have different heads, too, and a group each
    or one together.
    """
    kinds = shape.layer_kinds
    if kinds is None or not kinds.state_space or context == 1:
        return None
    heads, groups = kinds.state_space_heads, max(1, kinds.state_space_groups // tensor)
    if heads % (tensor * context):
        return f"TP {tensor} x CP {context} must divide the {heads} heads of a state-space layer"
    if groups % context and context % groups:
        return (
            f"CP {context} must divide the {groups} groups of a state-space layer that TP {tensor} leaves, "
            "or be a multiple of them"
        )
    return None
