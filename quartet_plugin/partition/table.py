"""A partition as data: which block product each device computes in each step, and where blocks lie between.

A linear layer is O[M, K] = I[M, N] W[N, K]; its backward is dI = dO W' and dW = I' dO (phases F, B, G). Each
dimension is cut into equal pieces. In a step every device multiplies two blocks and adds the result to a
third; a triple (m, n, k) of piece numbers names the product. All else follows from the table: what moves
(`transfers.py`), how many bytes (`traffic.py`), and whether it is right (`validate.py`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from math import prod


class Phase(StrEnum):
    """The products of a linear layer: forward, input gradient (B) and weight gradient (G)."""

    F = "F"
    B = "B"
    G = "G"


class Tensor(StrEnum):
    """The matrices of a linear layer, named as in the products."""

    INPUT = "I"
    WEIGHT = "W"
    OUTPUT = "O"
    OUTPUT_GRAD = "dO"
    INPUT_GRAD = "dI"
    WEIGHT_GRAD = "dW"


DIMS = ("M", "N", "K")
# The places of a tensor's rows and columns in (m, n, k).
AXES: Mapping[Tensor, tuple[int, int]] = {
    Tensor.INPUT: (0, 1),
    Tensor.WEIGHT: (1, 2),
    Tensor.OUTPUT: (0, 2),
    Tensor.OUTPUT_GRAD: (0, 2),
    Tensor.INPUT_GRAD: (0, 1),
    Tensor.WEIGHT_GRAD: (1, 2),
}
# The left and the right factor of a phase's product, and its result.
PRODUCTS: Mapping[Phase, tuple[Tensor, Tensor, Tensor]] = {
    Phase.F: (Tensor.INPUT, Tensor.WEIGHT, Tensor.OUTPUT),
    Phase.B: (Tensor.OUTPUT_GRAD, Tensor.WEIGHT, Tensor.INPUT_GRAD),
    Phase.G: (Tensor.INPUT, Tensor.OUTPUT_GRAD, Tensor.WEIGHT_GRAD),
}

Triple = tuple[int, int, int]
BlockIndex = tuple[int, int]
# Products of one phase, [step][device].
Steps = tuple[tuple[Triple, ...], ...]


@dataclass(frozen=True, slots=True)
class Home:
    """The blocks of a tensor that each device holds between phases, [device][block].

    `parts` is 1 where a device holds whole blocks; several owners of a block then hold copies. Otherwise it
    is the number of a block's owners: each holds one part of its rows, in the order of device numbers.
    """

    blocks: tuple[tuple[BlockIndex, ...], ...]
    parts: int = 1

    def owners(self) -> dict[BlockIndex, tuple[int, ...]]:
        """The devices that hold a block or a part of it, in ascending order, by block."""
        owners: dict[BlockIndex, tuple[int, ...]] = {}
        for device, blocks in enumerate(self.blocks):
            for block in blocks:
                owners[block] = (*owners.get(block, ()), device)
        return owners


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One way to cut a linear layer over the devices of a mesh, numbered row by row.

    `pieces` counts the pieces of M, N and K. `carried` tensors have one copy, which moves from product to
    product and from phase to phase; of all others the home's copy stays, and received blocks go after the
    step, or, of `kept` tensors, after the last phase.
    """

    name: str
    mesh: tuple[int, ...]
    pieces: tuple[int, int, int]
    steps: Mapping[Phase, Steps]
    homes: Mapping[Tensor, Home]
    carried: frozenset[Tensor] = field(default_factory=frozenset)
    kept: frozenset[Tensor] = field(default_factory=frozenset)

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return prod(self.mesh)

    def blocks_of(self, tensor: Tensor) -> Iterable[BlockIndex]:
        """Every block of a tensor, row by row."""
        rows, columns = AXES[tensor]
        return product(range(self.pieces[rows]), range(self.pieces[columns]))

    def num_elements(self, tensor: Tensor, sizes: Triple) -> int:
        """Elements of one block of a tensor for a layer of `sizes` (M, N, K)."""
        rows, columns = AXES[tensor]
        return sizes[rows] // self.pieces[rows] * (sizes[columns] // self.pieces[columns])


def block_of(tensor: Tensor, triple: Triple) -> BlockIndex:
    """The block of a tensor that the product (m, n, k) needs or adds to."""
    rows, columns = AXES[tensor]
    return triple[rows], triple[columns]


def coordinates(mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The place of each device in the mesh, by device number."""
    return list(product(*map(range, mesh)))
