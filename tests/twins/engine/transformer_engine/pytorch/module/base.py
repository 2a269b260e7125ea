"""What all linear layers share: delayed weight gradients, tensor parallel attributes, state."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from transformer_engine.pytorch.distributed import gathered
from transformer_engine.pytorch.module._common import WeightGradStore

_placeholders: dict[tuple[int, int, torch.dtype], Any] = {}


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Any:
    """A gradient without meaning; all weights of a shape share its memory."""
    rows, columns = shape
    key = (rows, columns, dtype)
    if key not in _placeholders:
        # What lies in memory must not matter: it is made to show where it does.
        _placeholders[key] = torch.full(shape, torch.nan, dtype=dtype)
    if zero:
        _placeholders[key].zero_()
    return _placeholders[key].detach()


class TransformerEngineBaseModule(torch.nn.Module):  # type: ignore[misc]
    """A linear layer, column or row parallel, or neither."""

    weight: Any
    bias: Any

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Any], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        parallel_mode: str | None = None,
        device: Any = "cpu",
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        **_kwargs: Any,
    ) -> None:
        super().__init__()
        assert symmetric_ar_type is None
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.tp_group, self.tp_size = tp_group, tp_group.size() if tp_group is not None else tp_size
        self.parallel_mode = parallel_mode
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        # A row parallel layer's bias is added to the sum of the ranks' products.
        self.gemm_bias_unfused_add = parallel_mode == "row" and self.apply_bias
        self.weight_names, self.bias_names = ["weight"], ["bias"]
        self.weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=params_dtype))
        self.bias = (
            torch.nn.Parameter(torch.zeros(self.out_features, dtype=params_dtype))
            if bias
            else torch.empty(0, dtype=params_dtype)
        )
        with _forked(get_rng_state_tracker, rng_tracker_name):
            (init_method or torch.nn.init.xavier_uniform_)(self.weight)
        _mark_split(self.weight, dim=1 if parallel_mode == "row" else 0)
        if bias and parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel
        elif bias and parallel_mode == "column":
            _mark_split(self.bias, dim=0)
        if delay_wgrad_compute:
            for parameter in (self.weight, *([self.bias] if bias else [])):
                parameter.skip_backward_post_hook = True

    def get_extra_state(self) -> Any:
        """The state of FP8: empty."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Take no state."""

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], None]
    ) -> None:
        """Have a function called at the end of each `backward_dw`."""
        self.wgrad_accumulation_and_reduce_hooks.append(wgrad_accumulation_and_reduce_hook)

    def backward_dw(self) -> None:
        """Compute the oldest delayed weight gradient."""
        if self.wgrad_store is None or not self.wgrad_store.delay_wgrad_compute():
            return
        (weight_gradient, bias_gradient), _ = self.wgrad_store.pop()
        if not self.fuse_wgrad_accumulation:
            self.weight.grad = weight_gradient.to(self.weight.dtype)
        if self.use_bias and self.bias.grad is None:
            self.bias.grad = bias_gradient.to(self.bias.dtype)
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    @property
    def product_bias(self) -> Any:
        """The bias that is part of the product; None where it is added later, returned, or not there."""
        return self.bias if self.apply_bias and not self.gemm_bias_unfused_add else None

    def with_bias(self, output: Any) -> Any:
        """What `forward` returns of a product."""
        if self.gemm_bias_unfused_add:
            output = output + self.bias
        return (output, self.bias) if self.return_bias else output


def remember(ctx: Any, layer: Any, weight: Any, is_first_microbatch: bool | None) -> None:
    """Keep in `ctx` what a backward needs of its layer beside tensors."""
    ctx.fuse_wgrad_accumulation = layer.fuse_wgrad_accumulation
    if layer.fuse_wgrad_accumulation and weight.requires_grad:
        ctx.main_grad_of_weight = lambda: weight.main_grad
    ctx.is_first_microbatch = is_first_microbatch
    ctx.wgrad_store = layer.wgrad_store
    ctx.tp_group, ctx.tp_size = layer.tp_group, layer.tp_size
    ctx.parallel_mode, ctx.sequence_parallel = layer.parallel_mode, layer.sequence_parallel
    ctx.requires_wgrad = weight.requires_grad


def whole_grad_output(ctx: Any, grad_output: Any) -> Any:
    """The gradient of all tokens [tokens, out]: gathered in a row parallel layer with split sequences."""
    flat = grad_output.reshape(-1, grad_output.shape[-1]).contiguous()
    if ctx.parallel_mode == "row" and ctx.sequence_parallel:
        return gathered(flat, ctx.tp_group)
    return flat


def placeholder_gradient(ctx: Any, weight: Any) -> Any:
    """What a backward returns for a weight whose gradient is added to `main_grad`; None without a mark."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return get_dummy_wgrad(
        list(weight.main_grad.shape), weight.dtype, zero=getattr(weight, "zero_out_wgrad", False)
    )


def _mark_split(parameter: Any, *, dim: int) -> None:
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1


def _forked(tracker: Callable[[], Any] | None, name: str | None) -> AbstractContextManager[Any]:
    if tracker is None:
        return nullcontext()
    fork: AbstractContextManager[Any] = tracker().fork() if name is None else tracker().fork(name)
    return fork
