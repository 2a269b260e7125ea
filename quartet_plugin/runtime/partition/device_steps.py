"""What one device does in each phase of a partition: its products, and the messages beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quartet_plugin.errors import PlanError
from quartet_plugin.partition.table import (
    AXES,
    BlockIndex,
    Partition,
    Phase,
    Tensor,
    Triple,
)
from quartet_plugin.partition.transfers import BlockTransfer, transfers_of
from quartet_plugin.partition.validate import validate

# Weights are stored as torch stores them, [K, N]: rows of the table's matrix are columns in memory.
TRANSPOSED = frozenset({Tensor.WEIGHT, Tensor.WEIGHT_GRAD})


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One step of a phase: the product, None before the first and after the last, and its messages."""

    product: Triple | None
    sends: tuple[BlockTransfer, ...]
    receives: tuple[BlockTransfer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeOfDevice:
    """The rectangle of blocks of a tensor that a device holds between phases, as one matrix.

    `rows` and `columns` are the block numbers in order. With several `parts` the matrix has only part `part`
    of each block's rows. `owners` are the devices of each block, this one among them.
    """

    tensor: Tensor
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    part: int
    parts: int
    owners: Mapping[BlockIndex, tuple[int, ...]]

    @property
    def row_dim(self) -> int:
        """The dimension of the matrix in memory along which the table's rows lie."""
        return 1 if self.tensor in TRANSPOSED else 0

    @property
    def blocks(self) -> tuple[BlockIndex, ...]:
        """Every block of the rectangle, row by row."""
        return tuple((row, column) for row in self.rows for column in self.columns)

    def view(self, matrix: torch.Tensor, block: BlockIndex) -> torch.Tensor:
        """This device's part of one block of its matrix."""
        row_dim = self.row_dim
        height = matrix.shape[row_dim] // len(self.rows)
        width = matrix.shape[1 - row_dim] // len(self.columns)
        rows = matrix.narrow(row_dim, self.rows.index(block[0]) * height, height)
        return rows.narrow(1 - row_dim, self.columns.index(block[1]) * width, width)

    def piece_sizes(self, matrix: torch.Tensor) -> dict[int, int]:
        """The sizes of one piece of the two dimensions (0 for M, 1 for N, 2 for K), from the matrix."""
        row_axis, column_axis = AXES[self.tensor]
        return {
            row_axis: matrix.shape[self.row_dim] // len(self.rows) * self.parts,
            column_axis: matrix.shape[1 - self.row_dim] // len(self.columns),
        }

    def matrix_shape(self, sizes: Mapping[int, int]) -> tuple[int, int]:
        """The shape of the matrix in memory for pieces of `sizes`."""
        row_axis, column_axis = AXES[self.tensor]
        height, width = len(self.rows) * sizes[row_axis] // self.parts, len(self.columns) * sizes[column_axis]
        return (width, height) if self.row_dim else (height, width)


def block_shape(tensor: Tensor, sizes: Mapping[int, int], *, parts: int = 1) -> tuple[int, int]:
    """The shape in memory of one of `parts` parts of a block, for pieces of `sizes`."""
    row_axis, column_axis = AXES[tensor]
    height, width = sizes[row_axis] // parts, sizes[column_axis]
    return (width, height) if tensor in TRANSPOSED else (height, width)


def part_of(tensor: Tensor, block: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """A view of one part of a block's rows."""
    dim = 1 if tensor in TRANSPOSED else 0
    height = block.shape[dim] // parts
    return block.narrow(dim, part * height, height)


class DeviceSteps:
    """A valid partition as one device sees it.

    Raises PlanError for a table that is not valid, or whose homes are no rectangles.
    """

    def __init__(self, partition: Partition, device: int) -> None:
        validate(partition)
        self.partition = partition
        self.device = device
        self.homes = {tensor: _home_of_device(partition, tensor, device) for tensor in Tensor}
        transfers = transfers_of(partition)
        self.steps: dict[Phase, list[DeviceStep]] = {
            phase: _steps_of(partition, phase, device, [item for item in transfers if item.phase is phase])
            for phase in Phase
        }

    def is_moved(self, tensor: Tensor) -> bool:
        """Whether a phase leaves other blocks of the tensor to the next phase than those of its home."""
        return tensor in self.partition.carried or tensor in self.partition.kept


def _steps_of(
    partition: Partition, phase: Phase, device: int, transfers: Sequence[BlockTransfer]
) -> list[DeviceStep]:
    products: dict[int, Triple] = {
        step: triples[device] for step, triples in enumerate(partition.steps[phase])
    }
    numbers = range(-1, len(products) + 2)
    return [
        DeviceStep(
            products.get(number),
            tuple(item for item in transfers if item.step == number and item.source == device),
            tuple(item for item in transfers if item.step == number and item.target == device),
        )
        for number in numbers
    ]


def _home_of_device(partition: Partition, tensor: Tensor, device: int) -> HomeOfDevice:
    home = partition.homes[tensor]
    blocks = home.blocks[device]
    rows = tuple(sorted({row for row, _ in blocks}))
    columns = tuple(sorted({column for _, column in blocks}))
    owners = home.owners()
    device_home = HomeOfDevice(
        tensor=tensor,
        rows=rows,
        columns=columns,
        part=owners[blocks[0]].index(device) if home.parts > 1 else 0,
        parts=home.parts,
        owners={block: owners[block] for block in blocks},
    )
    is_one_part = home.parts == 1 or len({owners[block].index(device) for block in blocks}) == 1
    if not is_one_part or set(device_home.blocks) != set(blocks):
        raise PlanError(f"{partition.name}: the blocks of {tensor} on device {device} are no rectangle")
    return device_home
