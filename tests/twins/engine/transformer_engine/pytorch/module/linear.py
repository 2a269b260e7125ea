"""The linear layer."""

from typing import Any

import torch

from transformer_engine.pytorch.distributed import gathered, reduce_scattered, reduced
from transformer_engine.pytorch.module._common import bound_weight_gradient
from transformer_engine.pytorch.module.base import (
    TransformerEngineBaseModule,
    placeholder_gradient,
    remember,
    whole_grad_output,
)


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, weight: Any, layer_input: Any, bias: Any, layer: Any, is_first_microbatch: bool | None
    ) -> Any:
        is_gathered = layer.parallel_mode == "column" and layer.sequence_parallel
        total_input = gathered(layer_input, layer.tp_group) if is_gathered else layer_input
        output = torch.nn.functional.linear(total_input, weight, bias)
        if layer.parallel_mode == "row" and layer.tp_size > 1:
            combine = reduce_scattered if layer.sequence_parallel else reduced
            output = combine(output, layer.tp_group)
        # The weight comes back from the saved tensors: under hooks as another object.
        ctx.save_for_backward(layer_input, weight, bias)
        remember(ctx, layer, weight, is_first_microbatch)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> Any:
        layer_input, weight, bias = ctx.saved_tensors
        is_column_split = ctx.parallel_mode == "column" and ctx.tp_size > 1
        is_fused = ctx.fuse_wgrad_accumulation and ctx.requires_wgrad
        main_grad = ctx.main_grad_of_weight() if is_fused else None
        grad_output = whole_grad_output(ctx, grad_output)
        total_input = layer_input
        if ctx.requires_wgrad and is_column_split and ctx.sequence_parallel:
            total_input = gathered(layer_input, ctx.tp_group)
        grad_input = (grad_output @ weight).view(-1, *layer_input.shape[1:])
        if is_column_split:
            combine = reduce_scattered if ctx.sequence_parallel else reduced
            grad_input = combine(grad_input, ctx.tp_group)
        weight_grad = bias_grad = None
        if ctx.requires_wgrad:
            compute = bound_weight_gradient(ctx, bias, main_grad)
            if ctx.wgrad_store.delay_wgrad_compute():
                ctx.wgrad_store.put([total_input, grad_output], compute)
            else:
                weight_grad, bias_grad = compute(total_input, grad_output)
            if ctx.fuse_wgrad_accumulation:
                weight_grad = placeholder_gradient(ctx, weight)
        return weight_grad, grad_input, bias_grad, None, None


class Linear(TransformerEngineBaseModule):  # type: ignore[misc]
    """y = x A^T + b."""

    def forward(self, layer_input: Any, is_first_microbatch: bool | None = None) -> Any:
        """The output, and the bias where it is returned."""
        output = _Linear.apply(self.weight, layer_input, self.product_bias, self, is_first_microbatch)
        return self.with_bias(output)


class GroupedLinear(TransformerEngineBaseModule):  # type: ignore[misc]
    """A name to inherit from; the stand-in has no experts."""
