"""Delayed weight gradients of Transformer Engine's layers, with the stand-in for them and DDP's real hook."""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel

from quartet_plugin.megatron.profiling import LayerProfiler, _Chunk
from quartet_plugin.megatron.split_backward import WeightGradients
from quartet_plugin.megatron.te_layers import delay, delayed_layers, obstacle
from quartet_plugin.runtime.activation_tracker import SavedTensorTracker
from quartet_plugin.runtime.records import HostClock
from tests.twins import ENGINE

SIZE = 3
NUM_MICROBATCHES = 2


@pytest.fixture
def linear() -> Iterator[Any]:
    """The stand-in's Linear as Megatron wraps it: its method asks a configuration that has the flag off."""
    sys.path.insert(0, str(ENGINE))
    try:
        from transformer_engine.pytorch import Linear

        class MegatronsLinear(Linear):  # type: ignore[misc]
            def backward_dw(self) -> None:
                """Nothing, unless Megatron's own flag is on."""

        yield MegatronsLinear
    finally:
        sys.path.remove(str(ENGINE))
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
            del sys.modules[name]


def layers_of(make: Callable[..., Any], **kwargs: Any) -> list[Any]:
    """Two layers with weights and biases of their own."""
    layers = [make(SIZE, SIZE, init_method=torch.nn.init.eye_, **kwargs) for _ in range(2)]
    for number, layer in enumerate(layers):
        with torch.no_grad():
            layer.weight.mul_(1.5 + number)
    return layers


def output_of(layers: list[Any], value: Any) -> Any:
    """Both layers with a nonlinear function between them; a returned bias is added, as Megatron does."""
    for layer in layers:
        value = layer(value)
        value = torch.tanh(value[0] + value[1] if isinstance(value, tuple) else value)
    return value


def hook_gradients(layers: list[Any]) -> None:
    """Give the parameters `main_grad` and the hooks of DDP with overlapped reductions."""
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    group = SimpleNamespace(register_grad_ready=lambda *_: None)
    ddp = SimpleNamespace(
        ddp_config=SimpleNamespace(overlap_grad_reduce=True),
        param_to_bucket_group=dict.fromkeys(parameters, group),
        force_all_reduce=False,
        grad_accs=[],
    )
    for layer in layers:
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)
            parameter.grad_added_to_main_grad = False
            hook = DistributedDataParallel._make_backward_post_hook(ddp, parameter)
            if getattr(parameter, "skip_backward_post_hook", False):
                layer.register_wgrad_accumulation_and_reduce_hooks(hook)
            else:
                accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                accumulator.register_hook(hook)
                ddp.grad_accs.append(accumulator)
    layers[0].kept = ddp


def sample(microbatch: int) -> Any:
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(microbatch)).requires_grad_()


def expected(layers: list[Any]) -> list[Any]:
    """The gradients of all parameters by plain autograd."""
    parameters = [
        parameter.detach().clone().requires_grad_() for layer in layers for parameter in layer.parameters()
    ]
    for microbatch in range(NUM_MICROBATCHES):
        value, left = sample(microbatch), iter(parameters)
        for layer in layers:
            weight, bias = next(left), next(left) if layer.use_bias else None
            value = torch.tanh(torch.nn.functional.linear(value, weight, bias))
        value.square().sum().backward()
    return [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("is_tracked", [False, True])
@pytest.mark.parametrize("bias", ["none", "applied", "returned"])
@pytest.mark.parametrize("zero_out", [False, True])
@pytest.mark.parametrize("is_fused", [False, True])
def test_gradients_come_with_w(
    linear: Any, *, is_fused: bool, zero_out: bool, bias: str, is_tracked: bool
) -> None:
    """I of both microbatches, then W of both, the later one first."""
    layers = layers_of(
        linear, bias=bias != "none", return_bias=bias == "returned", fuse_wgrad_accumulation=is_fused
    )
    model = torch.nn.ModuleList(layers)
    delay(model)
    hook_gradients(layers)
    tracker, gradients = SavedTensorTracker(), WeightGradients()
    outputs = []
    for microbatch in range(NUM_MICROBATCHES):
        for layer in layers:
            layer.weight.zero_out_wgrad = zero_out
        if is_tracked:
            with tracker.saving():
                outputs.append(output_of(layers, sample(microbatch)))
        else:
            outputs.append(output_of(layers, sample(microbatch)))
    for microbatch, output in enumerate(outputs):
        gradients.begin()
        output.square().sum().backward()
        gradients.end(0, microbatch, delayed_layers(model))
        assert all(layer.weight.grad is None and not layer.weight.main_grad.any() for layer in layers)
    for microbatch in (1, 0):
        gradients.run(0, microbatch)
    for parameter, gradient in zip(model.parameters(), expected(layers), strict=True):
        assert parameter.grad is None
        assert torch.allclose(parameter.main_grad, gradient, atol=1e-5)
    assert all(layer.wgrad_store.context.empty() and layer.use_bias == (bias != "none") for layer in layers)


@pytest.mark.parametrize("bias", ["none", "applied", "returned"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_backwards_of_a_profile_take_turns(linear: Any, *, is_fused: bool, bias: str) -> None:
    """A full backward, and one whose weight gradients come later."""
    layers = layers_of(
        linear, bias=bias != "none", return_bias=bias == "returned", fuse_wgrad_accumulation=is_fused
    )
    model = torch.nn.ModuleList(layers)
    delay(model)
    hook_gradients(layers)
    for microbatch in range(NUM_MICROBATCHES):
        delayed = delayed_layers(model)
        # A W completes the bucket groups in the order in which a backward does.
        assert [layer.layer for layer in delayed] == layers[::-1]
        for layer in delayed:
            layer.delay(is_on=microbatch == 1)
        output_of(layers, sample(microbatch)).square().sum().backward()
        for layer in delayed:
            if microbatch == 1:
                layer.end_input_grad()
                layer.accumulate()
            else:
                layer.end_full_backward()
    for parameter, gradient in zip(model.parameters(), expected(layers), strict=True):
        assert parameter.grad is None
        assert torch.allclose(parameter.main_grad, gradient, atol=1e-5)


class Block(torch.nn.Module):  # type: ignore[misc]
    """A layer of a model, with one product."""

    layer_number = 1

    def __init__(self, product: Any) -> None:
        super().__init__()
        self.product = product

    def forward(self, hidden_states: Any) -> Any:
        """The product's output, nonlinear."""
        return torch.tanh(self.product(hidden_states))


class Chunk(torch.nn.Module):  # type: ignore[misc]
    """A stage in the middle of a pipeline."""

    pre_process = post_process = False

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([block])

    def forward(self, value: Any) -> Any:
        """All layers."""
        return self.decoder.layers[0](value)


@pytest.mark.parametrize("delays_te", [False, True])
def test_a_profile_tells_input_and_weight_gradients_apart(linear: Any, *, delays_te: bool) -> None:
    layers = layers_of(linear, bias=False)[:1]
    chunk = Chunk(Block(layers[0]))
    if delays_te:
        delay(chunk)
    hook_gradients(layers)
    spec = SimpleNamespace(warmup=0, num_iterations=9)
    profiler = LayerProfiler(SimpleNamespace(spec=spec), clock=HostClock())  # type: ignore[arg-type]
    profiler._gradients, profiler.delays_te = WeightGradients(), delays_te
    profiler._chunks = [_Chunk(profiler, chunk)]
    samples = iter(map(sample, range(NUM_MICROBATCHES)))

    def train_step(*_args: Any, **_kwargs: Any) -> None:
        chunk(next(samples)).square().sum().backward()

    step = profiler.wrap(train_step)
    for _ in range(NUM_MICROBATCHES):
        step(None, None, [chunk], None, None, None, lambda: None)
    (part,) = [part for part in profiler._parts() if part.name == "layer.0"]
    assert part.backward_s is not None
    assert part.input_grad_s is not None
    assert (part.weight_grad_s is not None) == delays_te
    assert torch.allclose(layers[0].weight.main_grad, expected(layers)[0], atol=1e-5)


def test_biases_after_the_ranks_sum_come_with_i(linear: Any) -> None:
    layers = layers_of(linear, bias=True, parallel_mode="row")
    delay(torch.nn.ModuleList(layers))
    assert all(layer.weight.skip_backward_post_hook for layer in layers)
    assert not any(hasattr(layer.bias, "skip_backward_post_hook") for layer in layers)


def test_other_layers_are_left_alone(linear: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), linear(2, 2, bias=False))
    model[1].weight.requires_grad_(False)
    delay(model)
    assert delayed_layers(model) == []
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
        ({"mtp_use_repeated_layer": True}, "2.9.0", "--mtp-use-repeated-layer"),
        ({"experimental_attention_variant": "dsa"}, "2.9.0", "--experimental-attention-variant dsa"),
        ({"experimental_attention_variant": "gated_delta_net"}, "2.9.0", None),
    ],
)
def test_what_keeps_backwards_whole_is_said(changes: dict[str, Any], version: str, words: str | None) -> None:
    line = obstacle(Namespace(**changes), version=version)
    assert (line is None) if words is None else (line is not None and words in line)
    assert line is None or "\n" not in line


def test_an_installed_release_is_read(linear: Any) -> None:
    assert obstacle(Namespace()) is None


def test_it_is_not_installed_here() -> None:
    line = obstacle(Namespace())
    assert line is not None
    assert "here is none" in line
