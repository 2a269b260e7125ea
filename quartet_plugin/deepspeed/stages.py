"""The work of one device's stages, in terms of DeepSpeed's engine: what its instructions do, a buffer apart.

Loss, inputs and outputs are kept for every stage and microbatch: an order may hold any number of them. In an
I action the backward of a `torch.nn.Linear` computes the gradient of its input alone and queues what the
weight's needs; W works that off into `weight.grad`. All other parameters get theirs in I. Outside of I the
layers do what they always do, with the same numbers.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.nn import functional

from quartet_plugin.deepspeed.transport import Value, parts
from quartet_plugin.errors import ConfigError
from quartet_plugin.runtime.deferred import DeferredGradients


@dataclass(frozen=True, slots=True)
class _PendingGradient:
    weight: Any
    layer_input: Any
    grad_output: Any


class WeightGradients(DeferredGradients[_PendingGradient]):
    """The deferred gradients of linear layers."""

    def accumulate(self, pending: _PendingGradient) -> None:
        """Pass the gradient through autograd, so that DeepSpeed's hooks on the weight see it as any other."""
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
            queue.append(_PendingGradient(weight, layer_input, grad_output))
            return None, grad_input, None, grad_bias
        grad_weight = None
        if ctx.needs_input_grad[2]:
            grad_weight = rows.t().matmul(layer_input.reshape(-1, layer_input.shape[-1]))
        return None, grad_input, grad_weight, grad_bias


def defer_weight_gradients(module: nn.Module, gradients: WeightGradients) -> int:
    """Let the plain linear layers of a model defer their weight gradients; returns how many they are.

    Only `torch.nn.Linear` itself, without a forward of the instance or a weight that is computed anew in
    every forward (torch's old weight_norm): other layers keep their full backward.
    """
    count = 0
    for layer in module.modules():
        is_plain = type(layer) is nn.Linear and "forward" not in vars(layer)
        if is_plain and layer.weight.is_leaf and layer.weight.requires_grad:
            layer.forward = partial(_linear, layer, gradients)
            count += 1
    return count


def _linear(layer: nn.Linear, gradients: WeightGradients, layer_input: Any) -> Any:
    if not torch.is_grad_enabled() or torch.is_autocast_enabled(layer_input.device.type):
        return functional.linear(layer_input, layer.weight, layer.bias)
    return _SplitLinear.apply(gradients, layer_input, layer.weight, layer.bias)


class EngineStages:
    """`StageCompute` for one step of an engine (training, or with `forward_only` evaluation)."""

    def __init__(
        self, engine: Any, *, gradients: WeightGradients, num_microbatches: int, forward_only: bool
    ) -> None:
        self._engine = engine
        self._gradients = gradients
        self._forward_only = forward_only
        self._last_stage = engine.quartet_pipeline.num_stages - 1
        self._held: dict[tuple[int, int], tuple[Value, Value]] = {}
        self._losses: dict[int, Any] = {}
        self._num_loaded = 0
        self._first_offset = engine.module.micro_offset
        self._end_offset = engine.module.micro_offset + num_microbatches

    def forward(self, stage: int, microbatch: int, received: Value | None) -> Value | None:
        """F, as `ForwardPass` with what it loads or receives."""
        engine = self._engine
        engine.tput_timer.start()
        value = self._loaded(microbatch) if received is None else self._leaf(received)
        with engine.running_stage(stage):
            # Layer seeds depend on it, not on how often a device has run.
            engine.module.micro_offset = self._first_offset + microbatch
            outputs = DeepSpeedEngine.forward(engine, _cloned(value))
            if stage == self._last_stage:
                self._losses[microbatch] = self._loss(outputs, microbatch)
        if not self._forward_only:
            self._held[stage, microbatch] = (value, outputs)
        return None if stage == self._last_stage else outputs

    def backward(self, stage: int, microbatch: int, received: Value | None) -> Value | None:
        """B, as `BackwardPass`; returns the gradients of the stage's floating-point inputs."""
        engine = self._engine
        value, outputs = self._held.pop((stage, microbatch))
        with engine.running_stage(stage):
            if stage == self._last_stage:
                engine.loss = self._losses.pop(microbatch)
                DeepSpeedEngine.backward(engine, engine.loss)
            else:
                assert received is not None
                self._backward_from(outputs, received)
        return None if stage == 0 else _gradients_of(value)

    def input_grad(self, stage: int, microbatch: int, received: Value | None) -> Value | None:
        """I: the same while the linear layers leave out their weights."""
        self._gradients.begin()
        result = self.backward(stage, microbatch, received)
        self._gradients.end(stage, microbatch)
        return result

    def weight_grad(self, stage: int, microbatch: int) -> None:
        """W: what the linear layers left out."""
        engine = self._engine
        with self._engine_backward():
            self._gradients.run(stage, microbatch)
        if engine.using_bf16_optimizer:
            engine.optimizer.update_hp_grads(clear_lp_grads=False)
        elif engine.zero_optimization():
            engine.optimizer.backward_epilogue()

    def end(self) -> None:
        """Count the microbatches as DeepSpeed does: one each, whatever the number of chunks."""
        self._engine.module.micro_offset = self._end_offset
        assert not self._held

    def _loaded(self, microbatch: int) -> Value:
        self._load_until(microbatch)
        value: Value = self._engine.pipe_buffers["inputs"][microbatch]
        self._engine.pipe_buffers["inputs"][microbatch] = None
        return value

    def _load_until(self, microbatch: int) -> None:
        """Load the batches up to the one of `microbatch`.

        The iterator gives them in order, whatever order they run in.
        """
        while self._num_loaded <= microbatch:
            self._engine._exec_load_micro_batch(self._num_loaded)
            self._num_loaded += 1

    def _leaf(self, received: Value) -> Value:
        leaves = tuple(tensor.detach() for tensor in parts(received))
        if not self._forward_only:
            for leaf in leaves:
                leaf.requires_grad_(leaf.is_floating_point())
        return leaves if isinstance(received, tuple) else leaves[0]

    def _loss(self, outputs: Value, microbatch: int) -> Any:
        engine = self._engine
        self._load_until(microbatch)
        labels = engine.pipe_buffers["labels"][microbatch]
        engine.pipe_buffers["labels"][microbatch] = None
        has_function = engine._compute_loss and engine.module.loss_fn is not None
        loss: Any = engine.module.loss_fn(outputs, labels) if has_function else outputs
        if engine.eval_return_logits:
            engine.outputs = outputs
        is_tensor = isinstance(loss, torch.Tensor)
        engine.fwd_outputs.append(loss.detach() if is_tensor else [part.detach() for part in loss])
        engine.total_loss = _added(engine.total_loss, loss)
        additional = engine.module.get_additional_losses()
        if additional is not None:
            totals = engine.total_additional_losses or OrderedDict()
            for name, value in additional.items():
                totals[name] = _added(totals.get(name), value)
            engine.total_additional_losses = totals
        return loss

    @contextlib.contextmanager
    def _engine_backward(self) -> Iterator[None]:
        engine = self._engine
        if engine.using_bf16_optimizer:
            engine.optimizer.clear_lp_grads()
        engine._running_engine_backward = True
        try:
            yield
        finally:
            engine._running_engine_backward = False

    def _backward_from(self, outputs: Value, received: Value) -> None:
        engine = self._engine
        with self._engine_backward():
            tensors = [tensor for tensor in parts(outputs) if tensor.is_floating_point()]
            if not all(tensor.requires_grad for tensor in tensors):
                raise ConfigError(
                    "pipeline.use_reentrant: a stage's output has no gradient; activation checkpointing "
                    "behind integer inputs needs pipeline.use_reentrant false in the ds_config"
                )
            torch.autograd.backward(tensors, list(parts(received)))
        if engine.using_bf16_optimizer and not engine._config.bfloat16_config.immediate_grad_update:
            engine.optimizer.update_hp_grads(clear_lp_grads=False)


def _cloned(value: Value) -> Value:
    """A copy that layers may write to, as DeepSpeed gives them."""
    copies = tuple(tensor.clone() for tensor in parts(value))
    return copies if isinstance(value, tuple) else copies[0]


def _gradients_of(value: Value) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        for tensor in parts(value)
        if tensor.is_floating_point()
    )


def _added(total: Any, loss: Any) -> Any:
    if isinstance(loss, torch.Tensor):
        return (torch.zeros_like(loss) if total is None else total) + loss.detach()
    totals = [torch.zeros_like(part) for part in loss] if total is None else total
    return [before + part.detach() for before, part in zip(totals, loss, strict=True)]
