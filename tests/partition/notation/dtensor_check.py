"""Compares DTensor's shards and products with the tables, in a process of its own: names as arguments."""

import re
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from quartet_plugin.partition.named import named_partition
from quartet_plugin.partition.notation.dtensor import to_dtensor
from quartet_plugin.partition.table import AXES, DIMS, Partition, Phase, Tensor
from quartet_plugin.partition.tiles import COPY, PARTIAL, SPLIT_COLUMNS, SPLIT_ROWS, home_tiles, signature
from tests.partition.notation.parsers import tiles_of
from tests.partition.test_lockstep import sizes_for

OF_TABLE: dict[str, Placement] = {
    SPLIT_ROWS: Shard(0),
    SPLIT_COLUMNS: Shard(1),
    COPY: Replicate(),
    PARTIAL: Partial(),
}


def placement(word: str) -> Placement:
    match = re.fullmatch(r"Shard\(([01])\)", word)
    return Shard(int(match[1])) if match else Replicate()


def check_homes(partition: Partition, mesh: DeviceMesh, rank: int) -> None:
    """The local shape and offset of each tensor on this rank, weights transposed as in nn.Linear."""
    sizes = sizes_for(partition)
    for tensor in (Tensor.INPUT, Tensor.WEIGHT, Tensor.OUTPUT):
        rows, columns = (sizes[axis] for axis in AXES[tensor])
        shape = (columns, rows) if tensor is Tensor.WEIGHT else (rows, columns)
        words = [placement(word) for word in to_dtensor(partition, tensor)]
        local, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, words)
        tiles = home_tiles(partition, tensor)
        tile = tiles_of(tiles)[rank]
        size = (rows // tiles.rows, columns // tiles.columns)
        expected = (size, (tile[0] * size[0], tile[1] * size[1]))
        if tensor is Tensor.WEIGHT:
            expected = (expected[0][::-1], expected[1][::-1])
        assert (tuple(local), tuple(offset)) == expected, (partition.name, tensor, rank)


def check_product(partition: Partition, mesh: DeviceMesh) -> None:
    """DTensor's own placements of the product, where each axis of the mesh splits one dimension."""
    known = signature(partition, Phase.F)
    if known is None or known.sizes != partition.mesh or known.devices != tuple(range(partition.num_devices)):
        return
    sizes = sizes_for(partition)
    made = {}
    for tensor in (Tensor.INPUT, Tensor.WEIGHT):
        places = [OF_TABLE[word] for word in known.placements[tensor]]
        shape = torch.Size([sizes[axis] for axis in AXES[tensor]])
        local, _ = compute_local_shape_and_global_offset(shape, mesh, places)
        made[tensor] = DTensor.from_local(torch.zeros(local), mesh, places, run_check=False)
    output = made[Tensor.INPUT] @ made[Tensor.WEIGHT]
    expected = tuple(OF_TABLE[word] for word in known.placements[Tensor.OUTPUT])
    assert output.placements == expected, (partition.name, output.placements, DIMS)


for name in sys.argv[1:]:
    table = named_partition(name)
    for rank in range(table.num_devices):
        dist.init_process_group("fake", rank=rank, world_size=table.num_devices, store=FakeStore())
        devices = DeviceMesh("cpu", torch.arange(table.num_devices).reshape(table.mesh))
        check_homes(table, devices, rank)
        if rank == 0:
            check_product(table, devices)
        dist.destroy_process_group()
    print(name)
