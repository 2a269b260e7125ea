"""One device of a test: linears and an MLP by every table of four devices, compared with plain torch.

Prints `TABLE KIND DTYPE ERROR` lines from rank 0, the largest error over the largest value, of all ranks.
"""

import os
import sys
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from quartet_plugin.partition.named import named_partition
from quartet_plugin.partition.table import AXES, Partition, Tensor
from quartet_plugin.partition.traffic import messages, sent_by_tensor
from quartet_plugin.runtime.partition.device_steps import TRANSPOSED, DeviceSteps
from quartet_plugin.runtime.partition.linear import partitioned_linear
from quartet_plugin.runtime.partition.messages import BlockMessages
from quartet_plugin.runtime.partition.phases import PartitionExecutor

HOME_TABLES = [
    f"home2x2-{skew}-{''.join(walk)}" for skew in ("in", "out") for walk in product("MNK", repeat=3)
]
OTHER_TABLES = [
    "P2x2", "ring-column4", "ring-row4", "column4", "row4", "column4-replicated", "row4-replicated", "2D2x2",
    "2.5D1x1x4",
]  # fmt: skip
TOKENS, INNER, OUTER = 16, 24, 40


def main() -> None:
    """All tables in fp64, the paper's and two of ours in fp32, and the MLP."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name in HOME_TABLES + OTHER_TABLES:
        report(f"{name} linear fp64", linear_error(named_partition(name), torch.float64))
    for name in ("P2x2", *HOME_TABLES):
        report(f"{name} linear fp32", linear_error(named_partition(name), torch.float32))
    for dtype, label in ((torch.float64, "fp64"), (torch.float32, "fp32")):
        report(f"home2x2 mlp {label}", mlp_error("home2x2-in", "home2x2-out", dtype))
        report(f"ring mlp {label}", mlp_error("ring-column4", "ring-row4", dtype))
    dist.barrier()
    print(f"rank {dist.get_rank()} done", flush=True)
    os._exit(0)


def report(label: str, error: float) -> None:
    """The largest error of all ranks, from rank 0."""
    errors = torch.tensor([error], dtype=torch.float64)
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{label} {errors.item():.3e}", flush=True)


def whole_matrix(rows: int, columns: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """A matrix that all ranks have."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(dtype)


def at_home(steps: DeviceSteps, tensor: Tensor, whole: torch.Tensor) -> torch.Tensor:
    """This device's blocks of a matrix that is stored as torch stores it."""
    home = steps.homes[tensor]
    rows, columns = (steps.partition.pieces[axis] for axis in AXES[tensor])
    table = whole.t() if tensor in TRANSPOSED else whole
    height, width = table.shape[0] // rows, table.shape[1] // columns
    part = height // home.parts
    blocks = [
        [
            table[
                row * height + home.part * part : row * height + (home.part + 1) * part,
                column * width : (column + 1) * width,
            ]
            for column in home.columns
        ]
        for row in home.rows
    ]
    matrix = torch.cat([torch.cat(line, 1) for line in blocks], 0)
    return (matrix.t() if tensor in TRANSPOSED else matrix).contiguous()


def executor_of(partition: Partition) -> PartitionExecutor:
    """The executor of this process's device."""
    steps = DeviceSteps(partition, dist.get_rank())
    return PartitionExecutor(steps, BlockMessages(dist.group.WORLD, range(dist.get_world_size())))


def relative(value: Any, expected: torch.Tensor) -> float:
    """The largest error over the largest value."""
    return float((value - expected).abs().max() / expected.abs().max())


def linear_error(partition: Partition, dtype: torch.dtype) -> float:
    """Two microbatches of one linear, and its messages and bytes, which must be the table's."""
    executor = executor_of(partition)
    steps = executor.steps
    whole_weight = whole_matrix(OUTER, INNER, 1, dtype)
    weight = at_home(steps, Tensor.WEIGHT, whole_weight).requires_grad_()
    before = weight.detach().clone()
    errors = []
    weight_grad = torch.zeros_like(whole_weight)
    for microbatch in range(2):
        whole_input = whole_matrix(TOKENS, INNER, 10 + microbatch, dtype)
        whole_grad = whole_matrix(TOKENS, OUTER, 20 + microbatch, dtype)
        input_ = at_home(steps, Tensor.INPUT, whole_input).requires_grad_()
        output = partitioned_linear(input_, weight, executor)
        output.backward(at_home(steps, Tensor.OUTPUT_GRAD, whole_grad))
        weight_grad += whole_grad.t() @ whole_input
        errors += [
            relative(output, at_home(steps, Tensor.OUTPUT, whole_input @ whole_weight.t())),
            relative(input_.grad, at_home(steps, Tensor.INPUT_GRAD, whole_grad @ whole_weight)),
        ]
    errors.append(relative(weight.grad, at_home(steps, Tensor.WEIGHT_GRAD, weight_grad)))
    assert torch.equal(weight.detach(), before)
    check_traffic(executor, partition, dtype)
    return max(errors)


def check_traffic(executor: PartitionExecutor, partition: Partition, dtype: torch.dtype) -> None:
    """Messages and bytes by phase and tensor, the mean of all ranks: exactly twice those of one microbatch."""
    counted = executor._messages
    all_counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_counts, (dict(counted.num_sent), dict(counted.bytes_sent)))
    elements = sent_by_tensor(partition, (TOKENS, INNER, OUTER))
    numbers = messages(partition)
    assert set().union(*(sent for sent, _ in all_counts)) == set(elements) == set(numbers)
    for key in elements:
        num_sent = sum(sent.get(key, 0) for sent, _ in all_counts)
        bytes_sent = sum(size.get(key, 0) for _, size in all_counts)
        assert num_sent == 2 * numbers[key] * len(all_counts), key
        assert bytes_sent == 2 * elements[key] * len(all_counts) * dtype.itemsize, key
        if partition.name.startswith(("home", "P")):
            own = all_counts[dist.get_rank()]
            assert own[0][key] == 2 * numbers[key], key
            assert own[1][key] == 2 * elements[key] * dtype.itemsize, key


def mlp_error(first: str, second: str, dtype: torch.dtype) -> float:
    """Two linears with GeLU between, without a redistribution."""
    one, two = executor_of(named_partition(first)), executor_of(named_partition(second))
    w1, w2 = whole_matrix(OUTER, INNER, 1, dtype), whole_matrix(INNER, OUTER, 2, dtype)
    x, dz = whole_matrix(TOKENS, INNER, 3, dtype), whole_matrix(TOKENS, INNER, 4, dtype)
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
            relative(local_x.grad, at_home(one.steps, Tensor.INPUT_GRAD, x.grad)),
            relative(local_w1.grad, at_home(one.steps, Tensor.WEIGHT_GRAD, w1.grad)),
            relative(local_w2.grad, at_home(two.steps, Tensor.WEIGHT_GRAD, w2.grad)),
        )


if __name__ == "__main__":
    sys.exit(main())
