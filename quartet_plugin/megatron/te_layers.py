"""Defers the weight gradients of Transformer Engine's layers, through their delayed weight gradients.

A layer keeps the tensors of a weight's gradient in its store, first in, first out, and computes the oldest
gradient at each `backward_dw`. Megatron enables the store only together with expert overlap; `delay` enables
it on the layers, once they are built and before DDP reads them. A W action calls every layer of its stage
once. Where the orders of I and W differ, a W computes another microbatch's gradient: the sum is the same.

A gradient that is fused is added to `main_grad` by the layer itself; the weight's `grad` is then a
placeholder for DDP's hook. The layer's backward leaves one in I, its `backward_dw` does not: `DelayedLayer`
takes it away after I, where the next I would add to it, and brings it for W.
"""

import importlib.metadata
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# The first in which DDP's overlapped reductions go with delayed weight gradients (Megatron's own condition).
_OLDEST = (2, 8)
_MARK = "_quartet_is_delayed"
_NEEDED = (
    "wgrad_store",
    "backward_dw",
    "register_wgrad_accumulation_and_reduce_hooks",
    "weight_names",
    "use_bias",
    "apply_bias",
    "fuse_wgrad_accumulation",
    "wgrad_accumulation_and_reduce_hooks",
)
_FULL_BACKWARD = "backwards are not split"
_NOT_SPLIT = {
    "fp8": f"--fp8-format: {_FULL_BACKWARD}, because delayed gradients of quantized layers were not tried",
    "fp4": f"--fp4-format: {_FULL_BACKWARD}, because delayed gradients of quantized layers were not tried",
    "tp_comm_overlap": f"--tp-comm-overlap: {_FULL_BACKWARD}, because it computes weight gradients itself",
    "use_transformer_engine_op_fuser": (
        f"--use-transformer-engine-op-fuser: {_FULL_BACKWARD}, because fused layers have no store for weight "
        "gradients"
    ),
    "mtp_use_repeated_layer": (
        f"--mtp-use-repeated-layer: {_FULL_BACKWARD}, because a layer then stores several gradients a "
        "microbatch"
    ),
}


@dataclass(frozen=True, slots=True)
class DelayedLayer:
    """A layer with weight gradients in its store; `compute` is Transformer Engine's `backward_dw`."""

    layer: Any
    compute: Callable[[Any], None]

    @property
    def weights(self) -> list[Any]:
        """The layer's weights."""
        return [getattr(self.layer, name) for name in self.layer.weight_names]

    def delay(self, *, is_on: bool) -> None:
        """Have the next backwards leave weight gradients in the store, or compute them."""
        store = self.layer.wgrad_store
        (store.enable_delay_wgrad_compute if is_on else store.disable_delay_wgrad_compute)()

    def end_full_backward(self) -> None:
        """Call DDP's hooks, as the layer's W would, after a backward that has computed all gradients."""
        for weight in self._fused_weights():
            if weight.grad is None:
                _mark_as_added(weight)
        for hook in self.layer.wgrad_accumulation_and_reduce_hooks:
            hook()

    def end_input_grad(self) -> None:
        """Take away the placeholders that the layer's backward has left."""
        for weight in self._fused_weights():
            weight.grad = None

    def accumulate(self) -> None:
        """Compute the oldest gradient in the store; the layer calls DDP's hooks."""
        for weight in self._fused_weights():
            _mark_as_added(weight)
        layer, uses_bias = self.layer, self.layer.use_bias
        # Else `backward_dw` sets the gradient of a bias that has had it in I.
        layer.use_bias = uses_bias and _delays_bias(layer)
        try:
            self.compute(layer)
        finally:
            layer.use_bias = uses_bias

    def _fused_weights(self) -> list[Any]:
        return self.weights if self.layer.fuse_wgrad_accumulation else []


def _mark_as_added(weight: Any) -> None:
    """Let DDP's hook know that the weight's gradient is in `main_grad` already.

    A backward under hooks on saved tensors could not mark the weight.
    """
    # Where DDP overlaps reductions its hook wants some gradient; with zero_out_wgrad it adds it.
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    weight.grad = make(weight)
    weight.grad_added_to_main_grad = True


def obstacle(args: Namespace, *, version: str | None = None) -> str | None:
    """Why Transformer Engine's layers need full backwards, in one line; None where they do not.

    `version` is Transformer Engine's, None for the installed one.
    """
    for dest, line in _NOT_SPLIT.items():
        if getattr(args, dest, None):
            return line
    if getattr(args, "experimental_attention_variant", None) == "dsa":
        return (
            f"--experimental-attention-variant dsa: {_FULL_BACKWARD}, because its indexer may store no "
            "gradients"
        )
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
        names = {*layer.weight_names, *(layer.bias_names if _delays_bias(layer) else ())}
        for name, parameter in layer.named_parameters():
            if name in names:
                parameter.skip_backward_post_hook = True
        setattr(layer, _MARK, True)


def delayed_layers(model: Any) -> list[DelayedLayer]:
    """The layers of a chunk that `delay` has changed, in the order of a backward.

    DDP's bucket groups are in that order too: the first can be reduced while a W computes the others.
    """
    layers = [layer for layer in model.modules() if getattr(layer, _MARK, False)][::-1]
    return [DelayedLayer(layer, method) for layer in layers if (method := _engine_method(layer)) is not None]


def _delays_bias(layer: Any) -> bool:
    """Whether a layer's bias is part of its product, so that its gradient comes with the weight's.

    Else the bias is returned, or added after the ranks' sum, and autograd computes its gradient in I.
    """
    return bool(layer.apply_bias) and not getattr(layer, "gemm_bias_unfused_add", False)


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
