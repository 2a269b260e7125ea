"""Holds what all partitioned layers of a process share: messages of the tensor-parallel group, and tables."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from quartet_plugin.errors import PlanError
from quartet_plugin.model.tensor_partition import BlockPartition, TensorPartition
from quartet_plugin.partition.layer import BLOCK_OF, Linear, Role, planned_partition
from quartet_plugin.rank.device import device_name
from quartet_plugin.rank.nccl import backend_name, uses_nccl
from quartet_plugin.runtime.partition.device_steps import DeviceSteps
from quartet_plugin.runtime.partition.linear import WeightGradientPhase
from quartet_plugin.runtime.partition.messages import BlockMessages
from quartet_plugin.runtime.partition.phases import PartitionExecutor
from quartet_plugin.runtime.process_groups import new_group, rank_groups

_ROLES: dict[str, Role] = {"qkv": "in", "proj": "out", "fc1": "in", "fc2": "out"}


@dataclass(frozen=True, slots=True)
class GridPlace:
    """Where a device stands in `outer` grids of side `side`: the grid, the row and the column."""

    outer: int
    side: int
    grid: int
    row: int
    column: int

    @classmethod
    def of(cls, device: int, *, outer: int, side: int) -> "GridPlace":
        """The place of a tensor-parallel rank: grids, rows and columns are numbered row by row."""
        return cls(outer, side, device // side**2, device // side % side, device % side)

    @property
    def row_peers(self) -> tuple[int, ...]:
        """The devices of this one's row, in the order of columns."""
        first = (self.grid * self.side + self.row) * self.side
        return tuple(range(first, first + self.side))

    @property
    def column_peers(self) -> tuple[int, ...]:
        """The devices of this one's column, in the order of rows."""
        first = self.grid * self.side**2 + self.column
        return tuple(range(first, first + self.side**2, self.side))


@dataclass(slots=True)
class PartitionContext:
    """The plan's partition in one process. Groups are made with the first model, on all ranks in one order.

    `gradients` are the queues of a schedule that splits backwards; None without one.
    """

    partition: TensorPartition
    gradients: Any = None
    _messages: BlockMessages | None = None
    _executors: dict[str, PartitionExecutor] = field(default_factory=dict)

    def open(self) -> None:
        """Make the groups; every rank calls this before its first model. A later call does nothing."""
        if self._messages is None:
            self._messages = _open_messages()

    @property
    def messages(self) -> BlockMessages:
        """The messages among the tensor-parallel ranks."""
        assert self._messages is not None, "open() must be called before the first layer"
        return self._messages

    @property
    def device(self) -> int:
        """This process's device of every table: its tensor-parallel rank."""
        return int(parallel_state.get_tensor_model_parallel_rank())

    @property
    def num_devices(self) -> int:
        """Devices of every table."""
        return len(self.messages.ranks)

    def block(self, name: str) -> BlockPartition:
        """The form of the block of the linear called `name`: qkv, proj, fc1 or fc2."""
        return self.partition.blocks[BLOCK_OF[name]]

    def place(self, name: str) -> GridPlace:
        """This device's place in the grids of a linear's block."""
        block = self.block(name)
        return GridPlace.of(self.device, outer=block.num_outer, side=block.side(self.num_devices))

    def executor(self, name: str) -> PartitionExecutor:
        """The executor of a linear's table; layers with one table share it."""
        linear = Linear(name=name, role=_ROLES[name], sizes=(1, 1, 1))
        table = planned_partition(self.block(name), linear, self.num_devices)
        if table.name not in self._executors:
            self._executors[table.name] = PartitionExecutor(DeviceSteps(table, self.device), self.messages)
        return self._executors[table.name]

    def defer(self, phase: WeightGradientPhase) -> bool:
        """Leave a weight's gradient to W, where an I action runs and DDP has handed out the weight's hook."""
        queues = self.gradients
        if queues is None or queues.open is None or not hasattr(phase.weight, "_quartet_grad_ready"):
            return False
        queues.open.append(phase)
        return True


def _open_messages() -> BlockMessages:
    """Messages in a process group apart from Megatron's, whose collectives would wait for them."""
    ranks = tuple(dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()))
    device = torch.device("cpu" if device_name() == "cpu" else "cuda")
    if device.type == "cuda" and not uses_nccl(backend_name()):
        raise PlanError("layout.tensor_partition: blocks are sent between GPUs, which needs the nccl backend")
    group: Any = None
    for members in rank_groups(ranks, device):
        made = new_group(members, name="partition")
        group = made if members == ranks else group
    # A batch of messages may be a group's first operation only where all of its ranks take part.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    return BlockMessages(group, ranks)
