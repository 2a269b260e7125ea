"""Delayed weight gradients of Transformer Engine's layers, with a stand-in for them.

They need a GPU to be installed. The stand-in does what version 2.9 does at this boundary, in plain torch.
"""

import queue
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quartet_plugin.megatron.split_backward import WeightGradients
from quartet_plugin.megatron.te_layers import delay, delayed_gradients, obstacle


class StandInStore:
    """`WeightGradStore`."""

    def __init__(self, delay_wgrad_compute: bool = False, ub_bulk_wgrad: bool = False) -> None:
        self.context: queue.Queue[Any] = queue.Queue()
        self._enabled = delay_wgrad_compute

    def delay_wgrad_compute(self) -> bool:
        """Whether it is open."""
        return self._enabled


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, layer_input: Any, weight: Any, store: StandInStore) -> Any:
        ctx.save_for_backward(layer_input, weight)
        ctx.store = store
        return layer_input @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> Any:
        layer_input, weight = ctx.saved_tensors
        grad_weight = None
        if ctx.store.delay_wgrad_compute():
            ctx.store.context.put((layer_input, grad_output))
        else:
            grad_weight = grad_output.t() @ layer_input
        return grad_output @ weight, grad_weight, None


class StandInLinear(torch.nn.Module):  # type: ignore[misc]
    """`transformer_engine.pytorch.Linear`, without a bias."""

    __module__ = "transformer_engine.pytorch.module.linear"

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(size) * 1.5)
        self.weight_names, self.bias_names = ["weight"], ["bias"]
        self.wgrad_store = StandInStore()
        self.hooks: list[Callable[[], None]] = []

    def forward(self, layer_input: Any) -> Any:
        """The layer."""
        return _Linear.apply(layer_input, self.weight, self.wgrad_store)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """DDP's hooks."""
        self.hooks.append(hook)

    def backward_dw(self) -> None:
        """The oldest weight gradient."""
        layer_input, grad_output = self.wgrad_store.context.get_nowait()
        self.weight.grad = grad_output.t() @ layer_input
        for hook in self.hooks:
            hook()


class MegatronsLinear(StandInLinear):
    """As Megatron wraps it: its method asks the configuration, which has the flag off."""

    __module__ = "megatron.core.extensions.transformer_engine"

    def backward_dw(self) -> None:
        """Nothing, unless Megatron's own flag is on."""


def into(layer: MegatronsLinear, main_grad: Any) -> Callable[[], None]:
    def hook() -> None:
        main_grad.add_(layer.weight.grad)
        layer.weight.grad = None

    return hook


def test_what_is_delayed_comes_with_w_in_any_order() -> None:
    model = torch.nn.Sequential(MegatronsLinear(3), torch.nn.Tanh(), MegatronsLinear(3))
    plain = torch.nn.Sequential(MegatronsLinear(3), torch.nn.Tanh(), MegatronsLinear(3))
    delay(model)
    assert all(layer.weight.skip_backward_post_hook for layer in (model[0], model[2]))
    main_grads = [torch.zeros(3, 3) for _ in range(2)]
    for layer, main_grad in zip((model[0], model[2]), main_grads, strict=True):
        layer.register_wgrad_accumulation_and_reduce_hooks(into(layer, main_grad))
    gradients = WeightGradients()
    samples = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    for microbatch, sample in enumerate(samples):
        plain(sample).square().sum().backward()
        output = model(sample)
        gradients.begin()
        output.square().sum().backward()
        gradients.end(0, microbatch, delayed_gradients(model))
        assert all(layer.weight.grad is None for layer in (model[0], model[2]))
    for microbatch in (1, 0):
        gradients.run(0, microbatch)
    for layer, main_grad in zip((plain[0], plain[2]), main_grads, strict=True):
        assert torch.allclose(main_grad, layer.weight.grad)
    assert model[0].wgrad_store.context.empty()


def test_other_layers_are_left_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), StandInLinear(2))
    model[1].weight.requires_grad_(False)
    delay(model)
    assert delayed_gradients(model) == []
    assert not model[1].wgrad_store.delay_wgrad_compute()


@pytest.mark.parametrize(
    ("changes", "version", "words"),
    [
        ({}, "2.8.0", None),
        ({}, "2.11.1+cu12", None),
        ({}, "2.7.0", "needs Transformer Engine 2.8, here is 2.7.0"),
        ({}, "garbage", "here is garbage"),
        ({"fp8": "hybrid"}, "2.9.0", "--fp8-format"),
        ({"tp_comm_overlap": True}, "2.9.0", "--tp-comm-overlap"),
        ({"use_transformer_engine_op_fuser": True}, "2.9.0", "--use-transformer-engine-op-fuser"),
    ],
)
def test_what_keeps_backwards_whole_is_said(changes: dict[str, Any], version: str, words: str | None) -> None:
    line = obstacle(Namespace(**changes), version=version)
    assert (line is None) if words is None else (line is not None and words in line)
    assert line is None or "\n" not in line


def test_it_is_not_installed_here() -> None:
    line = obstacle(Namespace())
    assert line is not None
    assert "here is none" in line
