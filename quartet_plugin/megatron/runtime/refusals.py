"""Lists what a custom schedule changes in a command: alignment off, full backwards."""

from argparse import Namespace
from typing import Any

from quartet_plugin.megatron.te_layers import obstacle
from quartet_plugin.model.megatron_arguments import hybrid_pattern
from quartet_plugin.space.runtime_refusals import engine_layers_refusal

# Letters of a hybrid model's pattern: state-space layers, and two kinds of attention like them.
_NOT_TRIED = frozenset("MGD")


def without_alignment(args: Namespace) -> dict[str, Any]:
    """The arguments that a custom schedule turns off, by destination; empty where they are off.

    Megatron by default starts the reductions of all pipeline ranks together, counted in stock's order, when a
    deferred weight gradient may be missing. The runtime starts each chunk's reduction after its last
    microbatch. Aligned parameter gathers stay: the runtime also starts them together, at the start of a step.
    """
    is_aligned = getattr(args, "overlap_grad_reduce", False) and getattr(args, "align_grad_reduce", False)
    return {"align_grad_reduce": False} if is_aligned else {}


def delays_engine_layers(args: Namespace) -> bool:
    """Whether the model has Transformer Engine's layers, and their weight gradients can come later."""
    has_them = getattr(args, "transformer_impl", "local") == "transformer_engine"
    return has_them and needs_full_backwards(args) is None


def needs_full_backwards(args: Namespace) -> str | None:
    """Why every backward must be a full backward (B), in one line; None where I and W may be separate.

    Full recomputation would keep all recomputed inputs until W, which undoes it.
    """
    if getattr(args, "recompute_granularity", None) == "full":
        return "--recompute-granularity full: backwards are not split, or recomputed tensors would be kept"
    return layers_need_full_backwards(args)


def layers_need_full_backwards(args: Namespace) -> str | None:
    """The same of the model's layers, under any layout: a plan changes what is recomputed, not the layers.

    Local layers call the function that is split, experts one after the other too; Transformer Engine's delay
    their weight gradients themselves.
    """
    layers = getattr(args, "transformer_impl", "local")
    if layers == "transformer_engine":
        refusal = engine_layers_refusal(
            has_experts=bool(getattr(args, "num_experts", None)),
            has_state_space=not _NOT_TRIED.isdisjoint(hybrid_pattern(args)),
        )
        return refusal or obstacle(args)
    if layers != "local":
        return "--transformer-impl: backwards are not split with such layers"
    return None
