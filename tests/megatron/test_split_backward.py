"""Deferred weight gradients of one local linear layer, compared with the layer's own full backward."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers

from quartet_plugin.megatron.split_backward import WeightGradients, _splitting
from quartet_plugin.runtime.activation_tracker import SavedTensorTracker

LINEAR = layers.LinearWithGradAccumulationAndAsyncCommunication
ROWS, BATCH, WIDTH, OUT = 3, 2, 4, 5


class FakeFusedKernels:
    """In place of `fused_weight_gradient_mlp_cuda`, which only exists on a GPU: the same sums in torch."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def wgrad_gemm_accum_fp32(self, total_input: Any, grad_output: Any, main_grad: Any) -> None:
        """Into a gradient of 32 bits."""
        self._add("fp32", total_input, grad_output, main_grad)

    def wgrad_gemm_accum_fp16(self, total_input: Any, grad_output: Any, main_grad: Any) -> None:
        """Into a gradient of 16 bits."""
        self._add("fp16", total_input, grad_output, main_grad)

    def _add(self, name: str, total_input: Any, grad_output: Any, main_grad: Any) -> None:
        assert total_input.dim() == grad_output.dim() == 2
        self.calls.append(name)
        main_grad += (grad_output.t() @ total_input).to(main_grad.dtype)


def is_idle(gradients: WeightGradients) -> bool:
    """Whether no gradient is deferred."""
    return gradients.open is None and not gradients._pending


def weight(*, main_dtype: torch.dtype | None = None, **attributes: Any) -> Any:
    made = torch.nn.Parameter(torch.randn(OUT, WIDTH, generator=torch.Generator().manual_seed(0)))
    made.grad_added_to_main_grad = False
    if main_dtype is not None:
        made.main_grad = torch.zeros(OUT, WIDTH, dtype=main_dtype)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def sample(microbatch: int) -> Any:
    generator = torch.Generator().manual_seed(10 + microbatch)
    return torch.randn(ROWS, BATCH, WIDTH, generator=generator).requires_grad_()


def forward(function: Any, layer_input: Any, parameter: Any, *, is_fused: bool = False) -> Any:
    return function.apply(layer_input, parameter, None, is_fused, False, False, None, None, None, 1)


def expected(num_microbatches: int) -> tuple[list[Any], Any]:
    """Megatron's own full backward: input gradients, and the sum of the weight's."""
    parameter, inputs = weight(), [sample(m) for m in range(num_microbatches)]
    for layer_input in inputs:
        forward(LINEAR, layer_input, parameter).square().sum().backward()
    return [layer_input.grad for layer_input in inputs], parameter.grad


def ready(parameter: Any) -> Callable[[], None]:
    """DDP's hook, as far as it matters here: adds what is not there yet."""

    def hook() -> None:
        if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
            parameter.main_grad += parameter.grad
        parameter.grad = None

    return hook


@pytest.mark.parametrize(
    ("attributes", "is_fused", "kernel"),
    [
        ({}, False, None),
        ({}, True, "fp32"),
        ({"zero_out_wgrad": True}, True, "fp32"),
        ({"main_dtype": torch.bfloat16}, True, "fp16"),
    ],
)
def test_deferred_is_what_the_whole_backward_gives(
    attributes: dict[str, Any], is_fused: bool, kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeFusedKernels()
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", fake, raising=False)
    gradients = WeightGradients()
    function = _splitting(LINEAR, gradients)
    parameter = weight(**{"main_dtype": torch.float32, **attributes})
    parameter._quartet_grad_ready = ready(parameter)
    inputs = [sample(microbatch) for microbatch in range(2)]
    for microbatch, layer_input in enumerate(inputs):
        output = forward(function, layer_input, parameter, is_fused=is_fused)
        gradients.begin()
        output.square().sum().backward()
        gradients.end(0, microbatch)
        assert parameter.grad is None
        assert [tuple(one.shape) for one in gradients.held(0, microbatch)] == [
            (ROWS, BATCH, WIDTH),
            (ROWS, BATCH, OUT),
        ]
    assert not parameter.main_grad.any()
    for microbatch in (1, 0):  # in any order
        gradients.run(0, microbatch)
    assert is_idle(gradients)
    input_grads, weight_grad = expected(2)
    assert all(torch.equal(one.grad, other) for one, other in zip(inputs, input_grads, strict=True))
    tolerance = 2e-2 if kernel == "fp16" else 1e-6
    assert torch.allclose(parameter.main_grad.float(), weight_grad, rtol=tolerance, atol=tolerance)
    assert fake.calls == ([] if kernel is None else [kernel] * 2)
    assert parameter.grad_added_to_main_grad is is_fused


def test_nothing_is_deferred_where_nobody_asks_or_ddp_has_no_door() -> None:
    gradients = WeightGradients()
    function = _splitting(LINEAR, gradients)
    parameter, layer_input = weight(), sample(0)
    forward(function, layer_input, parameter).square().sum().backward()
    gradients.begin()
    forward(function, sample(1), parameter).square().sum().backward()
    gradients.end(0, 1)
    assert gradients.held(0, 1) == []
    assert torch.allclose(parameter.grad, expected(2)[1])


def test_layers_defer_under_hooks_that_count_what_autograd_saves() -> None:
    """With such hooks autograd hands a saved weight out as another tensor, without its attributes."""
    gradients = WeightGradients()
    function = _splitting(LINEAR, gradients)
    first, second = (weight(main_dtype=torch.float32) for _ in range(2))
    for parameter in (first, second):
        parameter._quartet_grad_ready = ready(parameter)
    tracker = SavedTensorTracker()
    with tracker.saving():
        hidden = forward(function, sample(0), first)
        output = forward(function, hidden[..., :WIDTH], second)
    gradients.begin()
    output.square().sum().backward()
    gradients.end(0, 0)
    assert len(gradients.held(0, 0)) == 2 * 2
    gradients.run(0, 0)
    assert all(parameter.grad is None and parameter.main_grad.any() for parameter in (first, second))


def test_a_step_that_broke_off_leaves_nothing() -> None:
    gradients = WeightGradients()
    gradients.begin()
    gradients.open = [SimpleNamespace()]  # type: ignore[list-item]
    gradients.end(0, 0)
    gradients.begin()
    gradients.clear()
    assert is_idle(gradients)
