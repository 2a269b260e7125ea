"""A norm and the linear layer behind it, in one."""

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


class _LayerNormLinear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        layer_input: Any,
        norm_weight: Any,
        norm_bias: Any,
        weight: Any,
        bias: Any,
        layer: Any,
        is_first_microbatch: bool | None,
    ) -> Any:
        width = [layer_input.shape[-1]]
        normed, mean, deviation = torch.native_layer_norm(
            layer_input, width, norm_weight, norm_bias, layer.eps
        )
        total = gathered(normed, layer.tp_group) if layer.sequence_parallel else normed
        output = torch.nn.functional.linear(total, weight, bias)
        ctx.save_for_backward(layer_input, norm_weight, norm_bias, weight, bias, normed, mean, deviation)
        remember(ctx, layer, weight, is_first_microbatch)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> Any:
        layer_input, norm_weight, norm_bias, weight, bias, normed, mean, deviation = ctx.saved_tensors
        is_fused = ctx.fuse_wgrad_accumulation and ctx.requires_wgrad
        main_grad = ctx.main_grad_of_weight() if is_fused else None
        grad_output = whole_grad_output(ctx, grad_output)
        total = gathered(normed, ctx.tp_group) if ctx.requires_wgrad and ctx.sequence_parallel else normed
        grad_normed = (grad_output @ weight).view(-1, *normed.shape[1:])
        if ctx.tp_size > 1:
            combine = reduce_scattered if ctx.sequence_parallel else reduced
            grad_normed = combine(grad_normed, ctx.tp_group)
        weight_grad = bias_grad = None
        if ctx.requires_wgrad:
            compute = bound_weight_gradient(ctx, bias, main_grad)
            if ctx.wgrad_store.delay_wgrad_compute():
                ctx.wgrad_store.put([total, grad_output], compute)
            else:
                weight_grad, bias_grad = compute(total, grad_output)
            if ctx.fuse_wgrad_accumulation:
                weight_grad = placeholder_gradient(ctx, weight)
        width = [layer_input.shape[-1]]
        grad_input, grad_norm_weight, grad_norm_bias = torch.ops.aten.native_layer_norm_backward(
            grad_normed, layer_input, width, mean, deviation, norm_weight, norm_bias, [True, True, True]
        )
        return grad_input, grad_norm_weight, grad_norm_bias, weight_grad, bias_grad, None, None


class LayerNormLinear(TransformerEngineBaseModule):  # type: ignore[misc]
    """y = norm(x) A^T + b, column parallel."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, **kwargs)
        assert normalization == "LayerNorm"
        assert not return_layernorm_output
        assert not zero_centered_gamma
        assert self.parallel_mode == "column"
        self.eps = eps
        dtype = self.weight.dtype
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=dtype))
        self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, dtype=dtype))
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            parameter.sequence_parallel = self.sequence_parallel

    def forward(self, layer_input: Any, is_first_microbatch: bool | None = None) -> Any:
        """The output, and the bias where it is returned."""
        output = _LayerNormLinear.apply(
            layer_input,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.weight,
            self.product_bias,
            self,
            is_first_microbatch,
        )
        return self.with_bias(output)
