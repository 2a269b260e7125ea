"""Weight gradients later: Megatron's local linear layers leave them in a queue while an input gradient runs.

In an I action the layers' backward computes the gradient of the input only and appends what the weight's
needs; the W action works that off. Gradients reach `main_grad` through DDP's own door for delayed weight
gradients, so that its buffers, gradient accumulation fusion and reductions see nothing unusual. All other
parameters (norms, biases, embeddings) get theirs in I. Outside I everything is Megatron's own.

Under sequence parallelism the queue holds the local shard of a layer's input, and W gathers it again, as the
whole backward would have: Megatron's gather buffer is one for all layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.tensor_parallel import layers

from quartet_plugin.errors import SeamError
from quartet_plugin.megatron.seams import rebind
from quartet_plugin.runtime.deferred import DeferredGradients

_NAME = "LinearWithGradAccumulationAndAsyncCommunication"
_INPUTS = (
    "ctx",
    "input",
    "weight",
    "bias",
    "gradient_accumulation_fusion",
    "allreduce_dgrad",
    "sequence_parallel",
    "grad_output_buffer",
    "wgrad_deferral_limit",
    "tp_group",
    "gtp_remat_size",
)


@dataclass(slots=True)
class PendingGradient:
    """One layer's weight gradient still to be computed."""

    weight: Any
    main_grad: Any
    layer_input: Any
    grad_output: Any
    is_fused: bool
    is_sequence_parallel: bool
    tp_group: Any


class WeightGradients(DeferredGradients[PendingGradient]):
    """The deferred gradients of Megatron's local linear layers."""

    def accumulate(self, pending: PendingGradient) -> None:
        """As the layer's own backward does, but for the weight alone."""
        _accumulate(pending)


def _accumulate(pending: PendingGradient) -> None:
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


def install(gradients: WeightGradients) -> Callable[[], None]:
    """Let Megatron's local linear layers defer; returns what undoes it.

    Must run before models are built. Raises SeamError when the layers' function or DDP is not as known.
    """
    original = getattr(layers, _NAME, None)
    _check(original)
    installed = rebind([(original, _splitting(original, gradients))])
    initialise = DistributedDataParallel.__init__
    if initialise.__module__ != DistributedDataParallel.__module__:
        raise SeamError("DistributedDataParallel.__init__: already replaced; load quartet_plugin before it")

    def init_with_door(
        self: Any, config: Any, ddp_config: Any, module: Any, *args: Any, **kwargs: Any
    ) -> None:
        _mark(module)
        before = ddp_config.delay_wgrad_compute
        ddp_config.delay_wgrad_compute = True
        try:
            initialise(self, config, ddp_config, module, *args, **kwargs)
        finally:
            ddp_config.delay_wgrad_compute = before

    DistributedDataParallel.__init__ = init_with_door

    def undo() -> None:
        DistributedDataParallel.__init__ = initialise
        installed.uninstall()

    return undo


def _check(original: Any) -> None:
    forward = getattr(original, "forward", None)
    code = getattr(getattr(forward, "__wrapped__", forward), "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    if original is None or original.__module__ != layers.__name__ or names != _INPUTS:
        raise SeamError(
            f"{layers.__name__}.{_NAME}: takes {names}, {_INPUTS} is known; "
            "use a schedule with whole backwards, or the supported Megatron"
        )


def _mark(module: Any) -> None:
    """Open DDP's door for the weights of local linear layers: their hook is handed to us."""
    for layer in module.modules():
        if not isinstance(layer, (layers.ColumnParallelLinear, layers.RowParallelLinear)):
            continue
        weight = getattr(layer, "weight", None)
        if weight is None or not weight.requires_grad:
            continue
        weight.skip_backward_post_hook = True
        layer.register_wgrad_accumulation_and_reduce_hooks = _Door(weight)


class _Door:
    """What DDP calls with the hook of a marked weight."""

    def __init__(self, weight: Any) -> None:
        self._weight = weight

    def __call__(self, hook: Callable[..., None]) -> None:
        weight = self._weight
        weight._quartet_grad_ready = hook
        # A whole backward computes the weight's gradient at once and needs the hook right then.
        weight.register_post_accumulate_grad_hook(_whole(hook))


def _whole(hook: Callable[..., None]) -> Callable[[Any], None]:
    def after(weight: Any) -> None:
        if weight.grad is not None:
            hook()

    return after


def _splitting(original: Any, gradients: WeightGradients) -> Any:
    """The layers' function with a backward that defers while a queue is open."""

    class SplitLinear(torch.autograd.Function):  # type: ignore[misc]
        """Megatron's linear, its weight gradient later where asked for."""

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            return original.forward(ctx, *inputs)

        @staticmethod
        def backward(ctx: Any, grad_output: Any) -> Any:
            if gradients.open is None or not _can_defer(ctx):
                return original.backward(ctx, grad_output)
            return _input_gradient(ctx, grad_output, gradients.open)

    SplitLinear.__name__ = SplitLinear.__qualname__ = _NAME
    return SplitLinear


def _can_defer(ctx: Any) -> bool:
    if not ctx.needs_input_grad[1] or ctx.gtp_remat_size > 1 or ctx.grad_output_buffer is not None:
        return False
    return hasattr(ctx.saved_tensors[1], "_quartet_grad_ready")


def _input_gradient(ctx: Any, grad_output: Any, queue: list[PendingGradient]) -> tuple[Any, ...]:
    layer_input, weight = ctx.saved_tensors
    grad_input = grad_output.matmul(weight)
    handle = None
    if ctx.allreduce_dgrad:
        handle = torch.distributed.all_reduce(grad_input, group=ctx.tp_group, async_op=True)
    elif ctx.sequence_parallel:
        whole = grad_input
        grad_input = torch.empty(layer_input.size(), dtype=layer_input.dtype, device=layer_input.device)
        handle = layers.dist_reduce_scatter_func(grad_input, whole, group=ctx.tp_group, async_op=True)
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
    return (grad_input, None, grad_bias) + (None,) * 7
