"""Homes of tensors as tiles on devices, and each phase's signature: what other systems' notations say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from quartet_plugin.errors import PlanError
from quartet_plugin.partition.table import AXES, PRODUCTS, Home, Partition, Phase, Tensor

# Along one axis of the devices a tensor is split by rows (0) or columns (1), copied, or a partial sum.
SPLIT_ROWS, SPLIT_COLUMNS, COPY, PARTIAL = "S(0)", "S(1)", "B", "P"
Placements = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TileAssignment:
    """A matrix in rows x columns equal tiles; `devices` lists each tile's devices, row by row.

    Every tile has `copies` devices, in ascending order.
    """

    rows: int
    columns: int
    copies: int
    devices: tuple[int, ...]

    @classmethod
    def of_tiles(cls, tiles: Sequence[tuple[int, int]], rows: int, columns: int) -> "TileAssignment":
        """The assignment from each device's tile. Raises PlanError where tiles have unequal numbers."""
        owners: dict[tuple[int, int], list[int]] = {
            place: [] for place in product(range(rows), range(columns))
        }
        for device, tile in enumerate(tiles):
            owners[tile].append(device)
        counts = {len(devices) for devices in owners.values()}
        if len(counts) != 1 or 0 in counts:
            raise PlanError("tiles have unequally many devices")
        return cls(
            rows, columns, counts.pop(), tuple(device for devices in owners.values() for device in devices)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSignature:
    """A phase as one product over an array of devices whose axes split dimensions.

    `sizes` are in how many pieces the axes split, `devices` the array row by row. `placements` says of each
    tensor of the product how it lies along each axis.
    """

    sizes: tuple[int, ...]
    devices: tuple[int, ...]
    placements: Mapping[Tensor, Placements]


def home_tiles(partition: Partition, tensor: Tensor) -> TileAssignment:
    """The tiles of a tensor's home. Raises PlanError where a device's blocks are no rectangle."""
    home = partition.homes[tensor]
    sides = [
        _ranges(
            partition, tensor, [tuple(sorted({block[side] for block in blocks})) for blocks in home.blocks]
        )
        for side in (0, 1)
    ]
    for blocks, row, column in zip(home.blocks, sides[0][0], sides[1][0], strict=True):
        if sorted(blocks) != sorted(product(row, column)):
            raise PlanError(f"{partition.name}: the blocks of {tensor} on a device are no rectangle")
    rows, columns = sides[0][1], sides[1][1]
    tiles = [
        (rows.index(row) * home.parts + _part_of(home, device), columns.index(column))
        for device, (row, column) in enumerate(zip(sides[0][0], sides[1][0], strict=True))
    ]
    return TileAssignment.of_tiles(tiles, len(rows) * home.parts, len(columns))


def signature(partition: Partition, phase: Phase) -> PhaseSignature | None:
    """The signature of a phase over all of its steps; None where devices do not compute equal boxes of it.

    What a device walks along it covers whole, so that along every axis one dimension is split.
    """
    covered = [
        tuple(
            tuple(sorted({triples[device][axis] for triples in partition.steps[phase]})) for axis in range(3)
        )
        for device in range(partition.num_devices)
    ]
    split = [axis for axis in range(3) if len({ranges[axis] for ranges in covered}) > 1]
    pieces = {axis: sorted({ranges[axis] for ranges in covered}) for axis in split}
    for axis in split:
        if sum(map(len, pieces[axis])) != partition.pieces[axis]:
            return None
    places = {
        tuple(pieces[axis].index(ranges[axis]) for axis in split): device
        for device, ranges in enumerate(covered)
    }
    sizes = tuple(len(pieces[axis]) for axis in split)
    if len(places) != partition.num_devices:
        return None
    return PhaseSignature(
        sizes=sizes,
        devices=tuple(places[place] for place in product(*map(range, sizes))),
        placements={
            tensor: tuple(_placement(tensor, axis, is_result=tensor is PRODUCTS[phase][2]) for axis in split)
            for tensor in PRODUCTS[phase]
        },
    )


def mesh_placements(partition: Partition, tensor: Tensor) -> Placements:
    """How a tensor's home lies along each axis of the partition's mesh, in the mesh's order of devices.

    Raises PlanError where the mesh would have to be permuted.
    """
    tiles = home_tiles(partition, tensor)
    for placements in product((SPLIT_ROWS, SPLIT_COLUMNS, COPY), repeat=len(partition.mesh)):
        if tiles_of_placements(partition.mesh, placements) == tiles:
            return placements
    raise PlanError(
        f"{partition.name}: {tensor} lies on a permuted mesh ({', '.join(map(str, tiles.devices))}), whose "
        "groups DTensor would sort; use --gspmd or --sbp"
    )


def tiles_of_placements(mesh: Sequence[int], placements: Sequence[str]) -> TileAssignment:
    """The tiles of a matrix that is split along axes of a mesh, the first axis outermost."""
    tiles = []
    counts = [1, 1]
    for size, placement in zip(mesh, placements, strict=True):
        for side, split in enumerate((SPLIT_ROWS, SPLIT_COLUMNS)):
            counts[side] *= size if placement == split else 1
    for place in product(*map(range, mesh)):
        tile = [0, 0]
        for index, size, placement in zip(place, mesh, placements, strict=True):
            for side, split in enumerate((SPLIT_ROWS, SPLIT_COLUMNS)):
                if placement == split:
                    tile[side] = tile[side] * size + index
        tiles.append((tile[0], tile[1]))
    return TileAssignment.of_tiles(tiles, counts[0], counts[1])


def _ranges(
    partition: Partition, tensor: Tensor, ranges: list[tuple[int, ...]]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The pieces of one side by device, and the different ones in order, which must tile the side."""
    different = sorted(set(ranges))
    if len({index for pieces in different for index in pieces}) != sum(map(len, different)):
        raise PlanError(f"{partition.name}: blocks of {tensor} overlap between devices; no notation says so")
    return ranges, different


def _part_of(home: Home, device: int) -> int:
    return home.owners()[home.blocks[device][0]].index(device) if home.parts > 1 else 0


def _placement(tensor: Tensor, axis: int, *, is_result: bool) -> str:
    if axis not in AXES[tensor]:
        return PARTIAL if is_result else COPY
    return (SPLIT_ROWS, SPLIT_COLUMNS)[AXES[tensor].index(axis)]
