"""Whole matrices, and the blocks of them that a device has at home."""

from typing import Any

import torch

from quartet_plugin.partition.named import named_partition
from quartet_plugin.partition.table import AXES, Partition, Tensor
from quartet_plugin.runtime.partition.device_steps import TRANSPOSED, DeviceSteps
from quartet_plugin.runtime.partition.linear import partitioned_linear
from quartet_plugin.runtime.partition.messages import BlockMessages
from quartet_plugin.runtime.partition.phases import PartitionExecutor

# Tokens, and a linear's columns in and out.
SIZES = (16, 24, 40)


def whole_matrix(rows: int, columns: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """A matrix that all devices have."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(dtype)


def at_home(steps: DeviceSteps, tensor: Tensor, whole: torch.Tensor) -> torch.Tensor:
    """This device's blocks of a matrix that is stored as torch stores it."""
    home = steps.homes[tensor]
    rows, columns = (steps.partition.pieces[axis] for axis in AXES[tensor])
    table = whole.t() if tensor in TRANSPOSED else whole
    height, width = table.shape[0] // rows, table.shape[1] // columns
    part = height // home.parts

    def block(row: int, column: int) -> torch.Tensor:
        first = row * height + home.part * part
        return table[first : first + part, column * width : (column + 1) * width]

    lines = [torch.cat([block(row, column) for column in home.columns], 1) for row in home.rows]
    matrix = torch.cat(lines, 0)
    return (matrix.t() if tensor in TRANSPOSED else matrix).contiguous()


def relative(value: Any, expected: torch.Tensor) -> float:
    """The largest error over the largest value."""
    return float((value - expected).abs().max() / expected.abs().max())


def linear_error(
    partition: Partition, device: int, messages: BlockMessages, dtype: torch.dtype
) -> tuple[float, BlockMessages]:
    """The largest error of two microbatches of a linear, and what the device has sent.

    The weight is bit-equal afterwards to what it was.
    """
    executor = PartitionExecutor(DeviceSteps(partition, device), messages)
    steps = executor.steps
    tokens, inner, outer = SIZES
    whole_weight = whole_matrix(outer, inner, 1, dtype)
    weight = at_home(steps, Tensor.WEIGHT, whole_weight).requires_grad_()
    before = weight.detach().clone()
    errors = []
    weight_grad = torch.zeros_like(whole_weight)
    for microbatch in range(2):
        whole_input = whole_matrix(tokens, inner, 10 + microbatch, dtype)
        whole_grad = whole_matrix(tokens, outer, 20 + microbatch, dtype)
        input_ = at_home(steps, Tensor.INPUT, whole_input).requires_grad_()
        output = partitioned_linear(input_, weight, executor)
        output.backward(at_home(steps, Tensor.OUTPUT_GRAD, whole_grad))
        weight_grad += whole_grad.t() @ whole_input
        with torch.no_grad():
            errors += [
                relative(output, at_home(steps, Tensor.OUTPUT, whole_input @ whole_weight.t())),
                relative(input_.grad, at_home(steps, Tensor.INPUT_GRAD, whole_grad @ whole_weight)),
            ]
    errors.append(relative(weight.grad, at_home(steps, Tensor.WEIGHT_GRAD, weight_grad)))
    assert torch.equal(weight.detach(), before)
    return max(errors), messages


def mlp_error(first: str, second: str, device: int, messages: BlockMessages, dtype: torch.dtype) -> float:
    """The largest error of two linears with GeLU between, without a redistribution."""
    one, two = (
        PartitionExecutor(DeviceSteps(named_partition(name), device), messages) for name in (first, second)
    )
    tokens, inner, outer = SIZES
    w1, w2 = whole_matrix(outer, inner, 1, dtype), whole_matrix(inner, outer, 2, dtype)
    x, dz = whole_matrix(tokens, inner, 3, dtype), whole_matrix(tokens, inner, 4, dtype)
    local_x = at_home(one.steps, Tensor.INPUT, x).requires_grad_()
    local_w1 = at_home(one.steps, Tensor.WEIGHT, w1).requires_grad_()
    local_w2 = at_home(two.steps, Tensor.WEIGHT, w2).requires_grad_()
    hidden = torch.nn.functional.gelu(partitioned_linear(local_x, local_w1, one))
    local_z = partitioned_linear(hidden, local_w2, two)
    local_z.backward(at_home(two.steps, Tensor.OUTPUT_GRAD, dz))
    for tensor in (x, w1, w2):
        tensor.requires_grad_()
    z = torch.nn.functional.gelu(x @ w1.t()) @ w2.t()
    z.backward(dz)
    with torch.no_grad():
        return max(
            relative(local_z, at_home(two.steps, Tensor.OUTPUT, z)),
            relative(local_x.grad, at_home(one.steps, Tensor.INPUT_GRAD, grad_of(x))),
            relative(local_w1.grad, at_home(one.steps, Tensor.WEIGHT_GRAD, grad_of(w1))),
            relative(local_w2.grad, at_home(two.steps, Tensor.WEIGHT_GRAD, grad_of(w2))),
        )


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient, which is there."""
    assert tensor.grad is not None
    return tensor.grad
