"""Weight gradients later: `torch.nn.Linear` layers leave them in a queue while an input gradient runs.

In an I action a linear layer's backward computes the gradient of its input alone and keeps what the weight's
needs; W works that off into `weight.grad`. All other parameters get theirs in I. Outside of I the layers do
what they always do, with the same numbers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from quartet_plugin.runtime.deferred import DeferredGradients


@dataclass(frozen=True, slots=True)
class _Pending:
    weight: Any
    layer_input: Any
    grad_output: Any


class WeightGradients(DeferredGradients[_Pending]):
    """The deferred gradients of linear layers."""

    def accumulate(self, pending: _Pending) -> None:
        """Through autograd's own door: DeepSpeed's hooks on the weight see it as any other gradient."""
        with torch.no_grad():
            rows = pending.grad_output.reshape(-1, pending.grad_output.shape[-1])
            columns = pending.layer_input.reshape(-1, pending.layer_input.shape[-1])
            gradient = rows.t().matmul(columns).to(pending.weight.dtype)
        torch.autograd.backward(pending.weight, gradient)


class _SplitLinear(torch.autograd.Function):  # type: ignore[misc]
    """A linear layer whose weight gradient may come later."""

    @staticmethod
    def forward(ctx: Any, gradients: WeightGradients, layer_input: Any, weight: Any, bias: Any) -> Any:
        ctx.gradients = gradients
        ctx.has_bias = bias is not None
        # The weight itself, not what autograd saves of it: W accumulates into its grad.
        ctx.weight = weight
        ctx.save_for_backward(layer_input)
        return functional.linear(layer_input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> tuple[Any, ...]:
        (layer_input,) = ctx.saved_tensors
        weight, queue = ctx.weight, ctx.gradients.open
        grad_input = grad_output.matmul(weight.to(grad_output.dtype)) if ctx.needs_input_grad[1] else None
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        grad_bias = rows.sum(dim=0) if ctx.has_bias and ctx.needs_input_grad[3] else None
        if queue is not None and ctx.needs_input_grad[2]:
            queue.append(_Pending(weight, layer_input, grad_output))
            return None, grad_input, None, grad_bias
        grad_weight = None
        if ctx.needs_input_grad[2]:
            grad_weight = rows.t().matmul(layer_input.reshape(-1, layer_input.shape[-1]))
        return None, grad_input, grad_weight, grad_bias


def install(module: nn.Module, gradients: WeightGradients) -> int:
    """Let the plain linear layers of a model defer; returns how many they are.

    Only `torch.nn.Linear` itself, without a forward of the instance: other layers keep their full backward.
    """
    count = 0
    for layer in module.modules():
        if type(layer) is nn.Linear and "forward" not in vars(layer) and layer.weight.requires_grad:
            layer.forward = _forward_of(layer, gradients)
            count += 1
    return count


def _forward_of(layer: nn.Linear, gradients: WeightGradients) -> Any:
    def forward(layer_input: Any) -> Any:
        if not torch.is_grad_enabled() or torch.is_autocast_enabled(layer_input.device.type):
            return functional.linear(layer_input, layer.weight, layer.bias)
        return _SplitLinear.apply(gradients, layer_input, layer.weight, layer.bias)

    return forward
