"""The store of weight gradients that are to be computed later."""

from collections.abc import Callable, Sequence
from queue import Queue
from typing import Any

import torch


class WeightGradStore:
    """Tensors and functions of weight gradients, first in, first out."""

    def __init__(self, delay_wgrad_compute: bool = False, ub_bulk_wgrad: bool = False) -> None:
        assert not ub_bulk_wgrad
        self.enabled = delay_wgrad_compute
        self.context: Queue[Any] | None = Queue() if delay_wgrad_compute else None

    def delay_wgrad_compute(self) -> bool:
        """Whether weight gradients are computed later."""
        return self.enabled

    def enable_delay_wgrad_compute(self) -> None:
        """Compute weight gradients later from now on."""
        self.enabled = True

    def disable_delay_wgrad_compute(self) -> None:
        """Compute weight gradients at once from now on."""
        self.enabled = False

    def put(self, tensor_list: Sequence[Any], func: Callable[..., Any]) -> None:
        """Keep the tensors of a weight gradient."""
        assert self.enabled
        assert self.context is not None
        self.context.put([tensor_list, func])

    def pop(self) -> tuple[Any, Any]:
        """Compute the oldest weight gradient. Raises RuntimeError where there is none."""
        assert self.enabled
        assert self.context is not None
        if not self.context.qsize():
            raise RuntimeError("Pop empty queue.")
        tensor_list, func = self.context.get()
        return func(*tensor_list), tensor_list


def bound_weight_gradient(ctx: Any, bias: Any, main_grad: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """The function of a layer's input and output gradient that computes weight and bias gradient.

    A fused one adds to `main_grad`, or overwrites it for the microbatch whose forward came first.
    """
    is_added = ctx.fuse_wgrad_accumulation and not ctx.is_first_microbatch

    def weight_gradient(layer_input: Any, grad_output: Any) -> tuple[Any, Any]:
        with torch.no_grad():
            layer_input = layer_input.reshape(-1, layer_input.shape[-1])
            gradient = grad_output.t() @ layer_input
            bias_gradient = grad_output.sum(dim=0) if bias is not None else None
            if not ctx.fuse_wgrad_accumulation:
                return gradient, bias_gradient
            if is_added:
                main_grad.add_(gradient)
            else:
                main_grad.copy_(gradient)
            return main_grad, bias_gradient

    return weight_gradient
