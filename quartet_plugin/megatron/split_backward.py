"""Defers the weight gradients of Megatron's local linear layers from I actions to W actions.

In an I action the layers' backward computes the input's gradient only and queues the tensors of the weight's
gradient; the W action computes it. Gradients reach `main_grad` through DDP's hook for delayed weight
gradients, so that its buffers, gradient accumulation fusion and reductions see nothing unusual. All other
parameters (norms, biases, embeddings) get their gradients in I. Outside I Megatron's backward is unchanged.

Under sequence parallelism the queue holds the local shard of a layer's input, and W gathers it again, as the
full backward would have: all layers share one gather buffer of Megatron's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import layers

from quartet_plugin.megatron import seams
from quartet_plugin.megatron.seams import Seam, Wrapper, resolve
from quartet_plugin.megatron.seams.declared import DDP_INIT, LINEAR, SPLIT_BACKWARD
from quartet_plugin.megatron.te_layers import DelayedLayer, delay
from quartet_plugin.runtime.deferred import DeferredGradients, by_layer
from quartet_plugin.runtime.partition.linear import WeightGradientPhase


@dataclass(slots=True)
class PendingGradient:
    """The tensors of a layer's weight gradient that is still to be computed."""

    weight: Any
    main_grad: Any
    layer_input: Any
    grad_output: Any
    is_fused: bool
    is_sequence_parallel: bool
    tp_group: Any


class WeightGradients(DeferredGradients[PendingGradient | WeightGradientPhase]):
    """The deferred gradients of Megatron's local linears, of partitioned ones and of Transformer Engine's."""

    def __init__(self) -> None:
        super().__init__()
        self._delayed: dict[tuple[int, int], Sequence[DelayedLayer]] = {}

    def accumulate(self, pending: PendingGradient | WeightGradientPhase) -> None:
        """Compute the weight's gradient as the layer's backward does, without the input's."""
        if isinstance(pending, WeightGradientPhase):
            pending.weight.grad = pending.run()
            pending.weight._quartet_grad_ready()
            return
        weight, total_input = pending.weight, pending.layer_input
        if pending.is_sequence_parallel:
            size = list(total_input.size())
            size[0] *= pending.tp_group.size()
            gathered = layers.get_global_memory_buffer().get_tensor(size, total_input.dtype, "mpu")
            layers.dist_all_gather_func(gathered, total_input, group=pending.tp_group)
            total_input = gathered
        with torch.no_grad():
            grad_output, total_input = layers.prepare_input_tensors_for_wgrad_compute(
                pending.grad_output, total_input
            )
            if pending.is_fused:
                _accumulate_fused(pending, grad_output, total_input)
            else:
                weight.grad = grad_output.t().matmul(total_input)
            weight._quartet_grad_ready()

    def tensors_of(self, pending: PendingGradient | WeightGradientPhase) -> tuple[Any, ...]:
        """The layer's input and its output's gradient; Transformer Engine's stores are not counted."""
        if isinstance(pending, WeightGradientPhase):
            return tuple(pending.tensors())
        return pending.layer_input, pending.grad_output

    def end(self, stage: int, microbatch: int, delayed: Sequence[DelayedLayer] = ()) -> None:
        """End the I action; its W also computes the oldest gradient of each of the `delayed` layers."""
        super().end(stage, microbatch)
        for layer in delayed:
            layer.end_input_grad()
        self._delayed[stage, microbatch] = delayed

    def order_by_layer(self, stage: int) -> None:
        """Let the W's to come of a stage go layer by layer; a store gives its oldest gradient first."""
        super().order_by_layer(stage)
        keys = [key for key in self._delayed if key[0] == stage]
        self._delayed |= zip(keys, by_layer([self._delayed[key] for key in keys]), strict=True)

    def run_stored(self, stage: int, microbatch: int) -> bool:
        """Compute the oldest gradient of each of Transformer Engine's layers."""
        delayed = self._delayed.pop((stage, microbatch))
        for layer in delayed:
            layer.accumulate()
        return bool(delayed)

    def clear(self) -> None:
        """Drop all deferred gradients after an interrupted step."""
        super().clear()
        self._delayed.clear()


def _accumulate_fused(pending: PendingGradient, grad_output: Any, total_input: Any) -> None:
    weight = pending.weight
    weight.main_grad = pending.main_grad
    kernels = layers.fused_weight_gradient_mlp_cuda
    if weight.main_grad.dtype == torch.float32:
        kernels.wgrad_gemm_accum_fp32(total_input, grad_output, weight.main_grad)
    else:
        kernels.wgrad_gemm_accum_fp16(total_input, grad_output, weight.main_grad)
    # DDP's hook wants some gradient where it overlaps; it adds it only when it must (zero_out_wgrad: zeros).
    zeros = getattr(weight, "zero_out_wgrad", False)
    make = torch.zeros if zeros else torch.empty
    weight.grad = make(weight.main_grad.shape, dtype=total_input.dtype, device=total_input.device)
    weight.grad_added_to_main_grad = True


def install(gradients: WeightGradients, *, delays_te: bool = False) -> Callable[[], None]:
    """Let linear layers defer weight gradients, as `wrappers` says; returns the function that undoes it.

    Must run before models are built. Raises SeamError when the layers' function or DDP is not as known.
    """
    for seam in SPLIT_BACKWARD:
        resolve(seam)
    return seams.install(wrappers(gradients, delays_te=delays_te)).uninstall


def wrappers(gradients: WeightGradients, *, delays_te: bool = False) -> dict[Seam, Wrapper]:
    """The layers' function with a backward that may defer, and DDP with hooks for their weights.

    `delays_te`: Transformer Engine's layers store theirs too, and the runtime computes them in B and W.
    """
    return {
        LINEAR: lambda original: _splitting(original, gradients),
        DDP_INIT: lambda original: _with_hooks(original, delays_te=delays_te),
    }


def _with_hooks(initialise: Callable[..., Any], *, delays_te: bool) -> Callable[..., Any]:
    def init_with_hooks(
        self: Any, config: Any, ddp_config: Any, module: Any, *args: Any, **kwargs: Any
    ) -> None:
        _mark(module)
        if delays_te:
            delay(module)
        before = ddp_config.delay_wgrad_compute
        ddp_config.delay_wgrad_compute = True
        try:
            initialise(self, config, ddp_config, module, *args, **kwargs)
        finally:
            ddp_config.delay_wgrad_compute = before

    return init_with_hooks


def _mark(module: Any) -> None:
    """Mark the weights of local linear layers: DDP then hands their hooks to `_receive_hook`."""
    for layer in module.modules():
        is_linear = isinstance(layer, (layers.ColumnParallelLinear, layers.RowParallelLinear))
        if not is_linear and not getattr(layer, "is_partitioned", False):
            continue
        weight = getattr(layer, "weight", None)
        if weight is None or not weight.requires_grad:
            continue
        weight.skip_backward_post_hook = True
        layer.register_wgrad_accumulation_and_reduce_hooks = partial(_receive_hook, weight)


def _receive_hook(weight: Any, hook: Callable[..., None]) -> None:
    """Receive from DDP the hook of a marked weight."""

    def after_full_backward(weight: Any) -> None:
        if weight.grad is not None:
            hook()

    weight._quartet_grad_ready = hook
    # A full backward computes the weight's gradient at once and needs the hook right then.
    weight.register_post_accumulate_grad_hook(after_full_backward)


def _splitting(original: Any, gradients: WeightGradients) -> Any:
    """The layers' function with a backward that defers while a queue is open."""

    class SplitLinear(torch.autograd.Function):  # type: ignore[misc]
        """Megatron's linear, whose weight gradient is deferred while a queue is open."""

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            # Under hooks on saved tensors autograd hands the weight out as another one, without attributes.
            ctx.quartet_weight = inputs[1]
            return original.forward(ctx, *inputs)

        @staticmethod
        def backward(ctx: Any, grad_output: Any) -> Any:
            if gradients.open is None or not _can_defer(ctx):
                return original.backward(ctx, grad_output)
            return _input_gradient(ctx, grad_output, gradients.open)

    SplitLinear.__name__, SplitLinear.__qualname__ = original.__name__, original.__qualname__
    return SplitLinear


def _can_defer(ctx: Any) -> bool:
    # Releases before 0.19 have no weights that are sharded and gathered again.
    is_sharded = getattr(ctx, "gtp_remat_size", 1) > 1
    if not ctx.needs_input_grad[1] or is_sharded or ctx.grad_output_buffer is not None:
        return False
    return hasattr(ctx.quartet_weight, "_quartet_grad_ready")


def _input_gradient(
    ctx: Any, grad_output: Any, queue: list[PendingGradient | WeightGradientPhase]
) -> tuple[Any, ...]:
    layer_input, weight = ctx.saved_tensors[0], ctx.quartet_weight
    grad_input = grad_output.matmul(weight)
    handle = None
    if ctx.allreduce_dgrad:
        handle = torch.distributed.all_reduce(grad_input, group=ctx.tp_group, async_op=True)
    elif ctx.sequence_parallel:
        unscattered = grad_input
        grad_input = torch.empty(layer_input.size(), dtype=layer_input.dtype, device=layer_input.device)
        handle = layers.dist_reduce_scatter_func(grad_input, unscattered, group=ctx.tp_group, async_op=True)
    queue.append(
        PendingGradient(
            weight=weight,
            main_grad=ctx.main_grad,
            layer_input=layer_input,
            grad_output=grad_output,
            is_fused=ctx.gradient_accumulation_fusion,
            is_sequence_parallel=ctx.sequence_parallel,
            tp_group=ctx.tp_group,
        )
    )
    grad_bias = grad_output.sum(dim=0) if ctx.use_bias else None
    if handle is not None:
        handle.wait()
    return (grad_input, None, grad_bias) + (None,) * (len(ctx.needs_input_grad) - 3)
