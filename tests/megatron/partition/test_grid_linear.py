"""Linears on grids whose devices are threads: products, biases and gradients are those of whole matrices."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quartet_plugin.errors import PlanError
from quartet_plugin.megatron.partition.borders import Border, gather_tokens, gather_vector, scatter_tokens
from quartet_plugin.model.tensor_partition import partition_from_label
from quartet_plugin.runtime.partition.messages import BlockMessages
from tests.runtime.partition.blocks import grad_of, relative, whole_matrix
from tests.runtime.partition.thread_devices import run_devices

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("megatron")]

BATCH = 2
_TOLERANCE = 1e-12
GRIDS = [("grid", 4), ("grid outer 2", 8), ("grid", 9)]


@pytest.fixture(scope="module")
def megatron() -> None:
    """Megatron is imported before there are threads."""
    import quartet_plugin.megatron.partition.grid_linear  # noqa: F401


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes that so many devices divide."""

    tokens: int
    hidden: int
    inner: int


def sizes_of(devices: int) -> Sizes:
    """Nine devices divide other sizes than four and eight."""
    return Sizes(tokens=18, hidden=9, inner=36) if devices == 9 else Sizes(tokens=16, hidden=8, inner=32)


def context_of(label: str, device: int, messages: BlockMessages) -> Any:
    """A context without Megatron's groups."""
    from quartet_plugin.megatron.partition.context import PartitionContext

    class OfThread(PartitionContext):
        @property
        def device(self) -> int:
            return device

    partition = partition_from_label(label)
    assert partition is not None
    context = OfThread(partition)
    context._messages = messages
    return context


def linear_of(context: Any, name: str, weight: torch.Tensor, *, stride: int = 1) -> Any:
    """One linear with biases that are not zero, from the whole weight."""
    from quartet_plugin.megatron.partition.grid_linear import GridLinear

    config = SimpleNamespace(
        use_cpu_initialization=True, perform_initialization=True, params_dtype=torch.float64
    )
    linear: Any = GridLinear(
        weight.shape[1],
        weight.shape[0],
        context=context,
        name=name,
        config=config,
        init_method=lambda tensor: tensor.copy_(weight),
        bias=True,
        stride=stride,
    )
    with torch.no_grad():
        linear.bias.copy_(bias_of(linear, bias_like(weight)))
    return linear


def bias_like(weight: torch.Tensor) -> torch.Tensor:
    """The whole bias of a linear."""
    return whole_matrix(1, weight.shape[0], 9, torch.float64)[0]


def bias_of(linear: Any, whole: torch.Tensor) -> torch.Tensor:
    """A device's piece of a whole bias."""
    if linear.bias_place is None:
        return whole
    piece, pieces = linear.bias_place
    return whole.unflatten(0, (linear.stride, pieces, -1))[:, piece].flatten()


def weight_of(linear: Any, whole: torch.Tensor) -> torch.Tensor:
    """A device's block of a whole weight."""
    (row, rows), (column, columns) = linear.block_place
    return whole.unflatten(0, (linear.stride, rows, -1))[:, row].flatten(0, 1).chunk(columns, 1)[column]


def chain(weights: list[torch.Tensor], x: torch.Tensor, activation: Any) -> torch.Tensor:
    """The block with whole matrices."""
    first, second = weights
    hidden = activation(x @ first.t() + bias_like(first))
    return hidden @ second.t() + bias_like(second)


def glu(hidden: torch.Tensor) -> torch.Tensor:
    """A gated activation."""
    gate, up = hidden.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize(("label", "devices"), GRIDS)
@pytest.mark.parametrize(
    ("names", "stride", "activation"),
    [
        (("qkv", "proj"), 1, lambda hidden: hidden),
        (("fc1", "fc2"), 1, torch.nn.functional.gelu),
        (("fc1", "fc2"), 2, glu),
    ],
)
def test_a_block_between_sequence_shards(
    label: str, devices: int, names: tuple[str, str], stride: int, activation: Any
) -> None:
    size = sizes_of(devices)
    # Weights are drawn in single precision, as Megatron draws them.
    weights = [
        whole_matrix(size.inner * stride, size.hidden, 1, torch.float32).double().requires_grad_(),
        whole_matrix(size.hidden, size.inner, 2, torch.float32).double().requires_grad_(),
    ]
    x = whole_matrix(size.tokens * BATCH, size.hidden, 3, torch.float64).view(size.tokens, BATCH, -1)
    dz = whole_matrix(size.tokens * BATCH, size.hidden, 4, torch.float64).view(size.tokens, BATCH, -1)
    whole_x = x.clone().requires_grad_()
    z = chain(weights, whole_x, activation)
    z.backward(dz)

    def work(device: int, messages: BlockMessages) -> list[float]:
        context = context_of(label, device, messages)
        first = linear_of(context, names[0], weights[0].detach().float(), stride=stride)
        second = linear_of(context, names[1], weights[1].detach().float())
        part = x.chunk(devices)[device].clone().requires_grad_()
        hidden, bias = first(part)
        output, last_bias = second(activation(hidden if bias is None else hidden + bias))
        (output + last_bias).backward(dz.chunk(devices)[device])
        with torch.no_grad():
            return [
                relative(output + last_bias, z.chunk(devices)[device]),
                relative(part.grad, grad_of(whole_x).chunk(devices)[device]),
                relative(first.weight.grad, weight_of(first, grad_of(weights[0]))),
                relative(second.weight.grad, weight_of(second, grad_of(weights[1]))),
                relative(first.bias.grad, bias_of(first, expected_bias_grad(x, weights, dz, activation))),
                relative(last_bias.grad, dz.chunk(devices)[device].sum((0, 1))),
            ]

    errors = run_devices(devices, work)
    assert max(max(of_device) for of_device in errors) < _TOLERANCE


def expected_bias_grad(
    x: torch.Tensor, weights: list[torch.Tensor], dz: torch.Tensor, activation: Any
) -> torch.Tensor:
    """The whole gradient of the first linear's bias."""
    first, second = (weight.detach() for weight in weights)
    bias = bias_like(first).requires_grad_()
    with torch.enable_grad():
        output = activation(x @ first.t() + bias) @ second.t()
        (grad,) = torch.autograd.grad(output, bias, dz)
    return grad


@pytest.mark.parametrize(
    ("outputs", "inputs", "line"),
    [
        (30, 8, "grid; fc1 has 30 outputs; must be a multiple of 4"),
        (32, 9, "grid; fc1 has 9 inputs; must be a multiple of 2"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(outputs: int, inputs: int, line: str) -> None:
    messages = BlockMessages(None, range(4))
    with pytest.raises(PlanError, match=f"^layout.tensor_partition: {line}$"):
        linear_of(context_of("grid", 0, messages), "fc1", torch.zeros(outputs, inputs))


def test_an_exchange_and_its_inverse() -> None:
    """Columns in any order of devices; the backward of each is the other."""
    columns, whole = [2, 0, 1], whole_matrix(6, 12, 1, torch.float64).view(6, 1, 12)

    def work(device: int, messages: BlockMessages) -> list[torch.Tensor]:
        border = Border("row", messages, device, range(3), columns)
        part = whole.chunk(3)[device].clone().requires_grad_()
        gathered = gather_tokens(part, border)
        assert torch.equal(gathered, whole.chunk(3, -1)[columns[device]])
        back = scatter_tokens(gathered, border)
        assert torch.equal(back, part)
        back.backward(part.detach())
        return [part.grad, part.detach()]

    for grad, part in run_devices(3, work):
        assert torch.equal(grad, part)


def test_a_gathered_vector_sums_its_gradients() -> None:
    def work(device: int, messages: BlockMessages) -> torch.Tensor:
        border = Border("column", messages, device, range(2), range(2))
        vector = torch.full((3,), float(device), requires_grad=True)
        gathered = gather_vector(vector, border)
        assert gathered.tolist() == [[0.0] * 3, [1.0] * 3]
        (gathered * torch.tensor([[1.0], [10.0]]) * (device + 1)).sum().backward()
        return grad_of(vector)

    assert [grad.tolist() for grad in run_devices(2, work)] == [[3.0] * 3, [30.0] * 3]


@pytest.mark.parametrize(("label", "devices"), GRIDS)
def test_a_checkpoint_has_stocks_matrices(label: str, devices: int) -> None:
    """The blocks of all devices tile the whole weight and bias, gated halves apart, under stock's keys."""
    from quartet_plugin.megatron.partition import sharded_state

    size = sizes_of(devices)
    whole = whole_matrix(2 * size.inner, size.hidden, 1, torch.float32)

    def work(device: int, messages: BlockMessages) -> Any:
        linear = linear_of(context_of(label, device, messages), "fc1", whole, stride=2)
        (row, rows), (column, columns) = linear.block_place
        factory = sharded_state._halves(
            "fc1.weight", linear.weight.detach(), ((0, row, rows), (1, column, columns)), (), (0, 0, 0), False
        )
        return factory.build()

    found = torch.full_like(whole, float("nan")).double()
    for tensors in run_devices(devices, work):
        for tensor in tensors:
            assert tensor.key == "fc1.weight"
            assert tensor.global_shape == tuple(whole.shape)
            found[tensor.global_slice()] = tensor.data
    assert torch.equal(found, whole.double())
