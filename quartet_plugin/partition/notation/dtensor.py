"""DeviceMesh and placements, as PyTorch's DTensor and veScale's n-D plans name them.

Weights are those of `torch.nn.Linear`, [K, N]: transposed beside the tables of this package.
"""

from typing import Any

from quartet_plugin.partition.layer import Linear
from quartet_plugin.partition.table import Partition, Tensor
from quartet_plugin.partition.tiles import COPY, SPLIT_COLUMNS, SPLIT_ROWS, mesh_placements

_WORDS = {SPLIT_ROWS: "Shard(0)", SPLIT_COLUMNS: "Shard(1)", COPY: "Replicate()"}
_TRANSPOSED = {SPLIT_ROWS: SPLIT_COLUMNS, SPLIT_COLUMNS: SPLIT_ROWS, COPY: COPY}


def mesh_to_dtensor(partition: Partition) -> str:
    """The mesh, of ranks in their order: `DeviceMesh("cuda", shape=(2, 2))`."""
    sizes = ", ".join(map(str, partition.mesh))
    return f'DeviceMesh("cuda", shape=({sizes}{"," if len(partition.mesh) == 1 else ""}))'


def to_dtensor(partition: Partition, tensor: Tensor) -> list[str]:
    """The placements of a tensor's home, one an axis of the mesh. Raises PlanError for permuted devices."""
    placements = mesh_placements(partition, tensor)
    if tensor in (Tensor.WEIGHT, Tensor.WEIGHT_GRAD):
        placements = tuple(_TRANSPOSED[placement] for placement in placements)
    return [_WORDS[placement] for placement in placements]


def layer_to_dtensor(linears: list[tuple[Linear, Partition]]) -> dict[str, Any]:
    """An n-D plan: the mesh, `parameter` and `forward` placements by the linears' names.

    Raises PlanError where a tensor's devices are permuted.
    """
    return {
        "mesh": mesh_to_dtensor(linears[0][1]),
        "parameter": {
            f"{linear.name}.weight": to_dtensor(partition, Tensor.WEIGHT) for linear, partition in linears
        },
        "forward": {
            f"{linear.name}.{side}": to_dtensor(partition, tensor)
            for linear, partition in linears
            for side, tensor in (("input", Tensor.INPUT), ("output", Tensor.OUTPUT))
        },
    }
