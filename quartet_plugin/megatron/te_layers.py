"""Defers the weight gradients of Transformer Engine's layers, through their delayed weight gradients.

A layer keeps the tensors of a weight's gradient in its store, first in, first out, and computes the oldest
gradient at each `backward_dw`. Megatron enables the store only together with expert overlap; `delay` enables
it on the layers, once they are built and before DDP reads them. A W action calls every layer of its stage
once. Where the orders of I and W differ, a W computes another microbatch's gradient: the sum is the same.
"""

import importlib.metadata
import re
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

# The first in which DDP's overlapped reductions go with delayed weight gradients (Megatron's own condition).
_OLDEST = (2, 8)
_MARK = "_quartet_is_delayed"
_NEEDED = ("wgrad_store", "backward_dw", "register_wgrad_accumulation_and_reduce_hooks", "weight_names")
_FULL_BACKWARD = "backwards are not split"
_NOT_SPLIT = {
    "fp8": f"--fp8-format: {_FULL_BACKWARD}, because delayed gradients of quantized layers were not tried",
    "fp4": f"--fp4-format: {_FULL_BACKWARD}, because delayed gradients of quantized layers were not tried",
    "tp_comm_overlap": f"--tp-comm-overlap: {_FULL_BACKWARD}, because it computes weight gradients by itself",
    "use_transformer_engine_op_fuser": (
        f"--use-transformer-engine-op-fuser: {_FULL_BACKWARD}, because fused layers have no such store"
    ),
}


# Computes the oldest gradient in a layer's store; the layer calls DDP's hooks.
DelayedGradient = Callable[[], None]


def obstacle(args: Namespace, *, version: str | None = None) -> str | None:
    """Why Transformer Engine's layers need full backwards, in one line; None where they do not.

    `version` is Transformer Engine's, None for the installed one.
    """
    for dest, line in _NOT_SPLIT.items():
        if getattr(args, dest, None):
            return line
    version = version or _installed()
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _OLDEST:
        return (
            f"--transformer-impl transformer_engine: {_FULL_BACKWARD}; that needs Transformer Engine "
            f"{'.'.join(map(str, _OLDEST))}, here is {version or 'none'}"
        )
    return None


def delay(model: Any) -> None:
    """Enable the stores of weight gradients in the layers of a model that is built.

    Layers without a store are left alone: they compute their weight gradients in I.
    """
    for layer in model.modules():
        store = getattr(layer, "wgrad_store", None)
        if (
            store is None
            or _engine_method(layer) is None
            or not all(hasattr(layer, name) for name in _NEEDED)
        ):
            continue
        if not any(p.requires_grad for name, p in layer.named_parameters(recurse=False)):
            continue
        layer.wgrad_store = type(store)(True, False)
        names = {*layer.weight_names, *getattr(layer, "bias_names", ())}
        for name, parameter in layer.named_parameters():
            if name in names:
                parameter.skip_backward_post_hook = True
        setattr(layer, _MARK, True)


def delayed_gradients(model: Any) -> list[DelayedGradient]:
    """The gradients of the layers of a chunk that `delay` has changed."""
    layers = [layer for layer in model.modules() if getattr(layer, _MARK, False)]
    return [partial(method, layer) for layer in layers if (method := _engine_method(layer)) is not None]


def _engine_method(layer: Any) -> Callable[[Any], None] | None:
    """Transformer Engine's `backward_dw`, which Megatron's method of that name hides.

    Megatron's first reads the configuration, which does not say that gradients are delayed.
    """
    for base in type(layer).__mro__:
        if base.__module__.partition(".")[0] == "transformer_engine" and "backward_dw" in vars(base):
            method: Callable[[Any], None] = vars(base)["backward_dw"]
            return method
    return None


def _installed() -> str | None:
    try:
        return importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return None
