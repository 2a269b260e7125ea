"""One device of a test: linears and MLPs by tables of four devices over gloo, compared with plain torch.

Rank 0 prints a line `TABLE KIND DTYPE ERROR` for each, the largest error of all ranks over the largest value.
"""

import os
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from quartet_plugin.partition.named import named_partition
from quartet_plugin.partition.table import Partition
from quartet_plugin.runtime.partition.messages import BlockMessages
from tests.runtime.partition.blocks import linear_error, mlp_error
from tests.runtime.partition.test_phases import check_traffic

HOME_TABLES = [
    f"home2x2-{skew}-{''.join(walk)}" for skew in ("in", "out") for walk in product("MNK", repeat=3)
]
TABLES = ["P2x2", *HOME_TABLES, "ring-column4", "ring-row4"]
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


def main() -> None:
    """Every table in both precisions, and the MLPs."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for label, dtype in DTYPES.items():
        for name in TABLES:
            report(f"{name} linear {label}", check_linear(named_partition(name), dtype))
        for first, second in (("home2x2-in", "home2x2-out"), ("ring-column4", "ring-row4")):
            error = mlp_error(first, second, dist.get_rank(), all_messages(), dtype)
            report(f"{first} mlp {label}", error)
    dist.barrier()
    print(f"rank {dist.get_rank()} done", flush=True)
    os._exit(0)


def all_messages() -> BlockMessages:
    """Messages among all ranks."""
    return BlockMessages(dist.group.WORLD, range(dist.get_world_size()))


def check_linear(partition: Partition, dtype: torch.dtype) -> float:
    """The error of one linear, whose messages and bytes are the table's on every rank."""
    error, messages = linear_error(partition, dist.get_rank(), all_messages(), dtype)
    sent: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sent, (messages.num_sent, messages.bytes_sent))
    check_traffic(partition, sent, dtype)
    return error


def report(label: str, error: float) -> None:
    """The largest error of all ranks, from rank 0."""
    errors = torch.tensor([error], dtype=torch.float64)
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{label} {errors.item():.3e}", flush=True)


if __name__ == "__main__":
    main()
