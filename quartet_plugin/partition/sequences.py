"""PrimePar's partition sequences: each letter consumes bits of the device number and cuts one dimension.

B, M, N and K take one bit each and halve that dimension (batch, rows, inner, columns); P2 and P4 take two and
four bits and cut M, N and K over a grid of side 2 or 4 whose blocks go round. The bits of a device number are
consumed from the most significant on, so that the first letters cut across nodes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.partition.table import Phase

SEQUENCE_DIMS = ("B", "M", "N", "K")
# Side of the grid of each ring letter.
RING_SIDES: Mapping[str, int] = {"P2": 2, "P4": 4}
# The dimensions that a phase sums over, whose letters end in an all-reduce.
SUMMED: Mapping[Phase, tuple[str, ...]] = {Phase.F: ("N",), Phase.B: ("K",), Phase.G: ("B", "M")}

Sequence = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SliceLayout:
    """The slices of a tensor by device: `pieces` of each of its dimensions, `index` [device, dimension]."""

    pieces: tuple[int, ...]
    index: NDArray[np.int64]

    @property
    def key(self) -> tuple[tuple[int, ...], bytes]:
        """Equal for equal layouts."""
        return self.pieces, self.index.tobytes()


def num_bits(letter: str) -> int:
    """Bits of the device number that a letter consumes."""
    return 2 * (RING_SIDES[letter].bit_length() - 1) if letter in RING_SIDES else 1


@cache
def sequences(letters: tuple[str, ...], bits: int) -> tuple[Sequence, ...]:
    """Every sequence of these letters that consumes all bits."""
    if bits == 0:
        return ((),)
    return tuple(
        (letter, *rest)
        for letter in letters
        if num_bits(letter) <= bits
        for rest in sequences(letters, bits - num_bits(letter))
    )


def pieces_of(sequence: Sequence) -> dict[str, int]:
    """Pieces of each dimension."""
    pieces = dict.fromkeys(SEQUENCE_DIMS, 1)
    for letter in sequence:
        for dim in "MNK" if letter in RING_SIDES else letter:
            pieces[dim] *= RING_SIDES.get(letter, 2)
    return pieces


def summed_bits(sequence: Sequence, phase: Phase) -> tuple[int, ...]:
    """The bits, counted from the most significant, over which a phase ends in an all-reduce."""
    position, bits = 0, []
    for letter in sequence:
        if letter in SUMMED[phase]:
            bits.append(position)
        position += num_bits(letter)
    return tuple(bits)


def slice_layout(
    sequence: Sequence, phase: Phase, dims: tuple[str, ...], *, is_end: bool, bits: int
) -> SliceLayout:
    """The slices of a tensor with these dimensions at the first or the last step of a phase."""
    devices = np.arange(2**bits)
    index = {dim: np.zeros(2**bits, dtype=np.int64) for dim in SEQUENCE_DIMS}
    position = 0
    for letter in sequence:
        values = [(devices >> (bits - 1 - position - offset)) & 1 for offset in range(num_bits(letter))]
        position += num_bits(letter)
        if letter not in RING_SIDES:
            index[letter] = 2 * index[letter] + values[0]
            continue
        side = RING_SIDES[letter]
        row, column = _number(values[0::2]), _number(values[1::2])
        for dim, piece in _ring_indices(phase, row, column, side, is_end=is_end).items():
            index[dim] = side * index[dim] + piece % side
    pieces = pieces_of(sequence)
    return SliceLayout(tuple(pieces[dim] for dim in dims), np.stack([index[dim] for dim in dims], axis=1))


def overlaps(before: list[SliceLayout], after: list[SliceLayout]) -> NDArray[np.float64]:
    """The part of the whole tensor that a device needs afterwards and holds before, [before, after].

    It is the mean of all devices.
    """
    begin, end = _intervals(after)
    rows = []
    for first_begin, first_end in zip(*_intervals(before), strict=True):
        sides = np.maximum(0.0, np.minimum(first_end, end) - np.maximum(first_begin, begin))
        rows.append(np.multiply.reduce([sides[..., dim] for dim in range(sides.shape[2])]).mean(axis=1))
    return np.array(rows)


def _intervals(layouts: list[SliceLayout]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Where slices begin and end in their dimensions, as parts of 1: [layout, device, dimension]."""
    pieces = np.array([layout.pieces for layout in layouts], dtype=float)[:, None, :]
    index = np.array([layout.index for layout in layouts], dtype=float)
    return index / pieces, (index + 1) / pieces


def _number(bits: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    number = np.zeros_like(bits[0])
    for bit in bits:
        number = 2 * number + bit
    return number


def _ring_indices(
    phase: Phase, row: NDArray[np.int64], column: NDArray[np.int64], side: int, *, is_end: bool
) -> dict[str, NDArray[np.int64]]:
    """PrimePar's table at the first or the last step."""
    step, last = (side - 1 if is_end else 0), int(is_end)
    if phase is Phase.F:
        return {"M": row, "N": row + column + step, "K": column}
    if phase is Phase.B:
        return {"M": row, "N": row + column - 1, "K": column + step}
    return {"M": row + step, "N": row + column - 1 + last, "K": column - 1 + last}
