"""Reads the annotations of `quartet_plugin.partition.notation` back, each from its text alone."""

import ast
import re
from collections.abc import Mapping
from itertools import product
from typing import Any

from quartet_plugin.partition.table import PRODUCTS, Phase, Tensor
from quartet_plugin.partition.tiles import (
    COPY,
    PARTIAL,
    SPLIT_COLUMNS,
    SPLIT_ROWS,
    Placements,
    TileAssignment,
    tiles_of_placements,
)

OF_GSPMD = re.compile(
    r"\{devices=\[([0-9]+(?:,[0-9]+){1,2})\]([0-9]+(?:,[0-9]+)*)( last_tile_dim_replicate)?\}"
)
OF_SBP = re.compile(r'placement\("cuda", ranks=(\[[0-9,\[\] ]+\])\), sbp=\(([a-z0-9_(), ]+)\)')
SBP_WORDS = {"split(0)": SPLIT_ROWS, "split(1)": SPLIT_COLUMNS, "broadcast": COPY, "partial_sum": PARTIAL}
DTENSOR_WORDS = {"Shard(0)": SPLIT_ROWS, "Shard(1)": SPLIT_COLUMNS, "Replicate()": COPY}
TRANSPOSED = {SPLIT_ROWS: SPLIT_COLUMNS, SPLIT_COLUMNS: SPLIT_ROWS}


def matched(pattern: str | re.Pattern[str], text: str) -> re.Match[str]:
    match = re.fullmatch(pattern, text)
    assert match is not None, text
    return match


def tiles_of(assignment: TileAssignment) -> list[tuple[int, int]]:
    """The tile (row, column) of each device, by device number."""
    places = list(product(range(assignment.rows), range(assignment.columns)))
    by_device = {device: places[i // assignment.copies] for i, device in enumerate(assignment.devices)}
    return [by_device[device] for device in range(len(assignment.devices))]


def from_gspmd(text: str) -> TileAssignment:
    match = matched(OF_GSPMD, text)
    dims = [int(word) for word in match[1].split(",")]
    devices = tuple(int(word) for word in match[2].split(","))
    assert (match[3] is not None) == (len(dims) == 3)
    rows, columns, copies = (*dims, 1)[:3]
    assert sorted(devices) == list(range(rows * columns * copies))
    return TileAssignment(rows, columns, copies, devices)


def from_sbp(text: str) -> TileAssignment:
    match = matched(OF_SBP, text)
    ranks = ast.literal_eval(match[1])
    placements = [SBP_WORDS[word] for word in words_in(match[2])]
    devices, sizes = flat(ranks), sizes_of(ranks)
    assert sorted(devices) == list(range(len(devices)))
    # The tiles of an unpermuted mesh, each moved to the device that stands in its place.
    unpermuted = tiles_of_placements(sizes, placements)
    by_device = dict(zip(devices, tiles_of(unpermuted), strict=True))
    tiles = [by_device[device] for device in range(len(devices))]
    return TileAssignment.of_tiles(tiles, unpermuted.rows, unpermuted.columns)


def product_from_sbp(phase: Phase, text: str) -> dict[Tensor, Placements]:
    """The placements of a phase's tensors in the text of `product_to_sbp`."""
    placements = {}
    for tensor in PRODUCTS[phase]:
        match = re.search(rf"(?:^|[ ]){tensor} \(((?:split\([01]\)|broadcast|partial_sum|, ?)*)\)", text)
        assert match is not None, text
        placements[tensor] = tuple(SBP_WORDS[word] for word in words_in(match[1]))
    return placements


def from_dtensor(mesh: str, placements: list[str], tensor: Tensor) -> TileAssignment:
    match = matched(r'DeviceMesh\("cuda", shape=\(([0-9]+(?:, [0-9]+)*),?\)\)', mesh)
    known = [DTENSOR_WORDS[word] for word in placements]
    if tensor in (Tensor.WEIGHT, Tensor.WEIGHT_GRAD):
        known = [TRANSPOSED.get(placement, placement) for placement in known]
    return tiles_of_placements([int(word) for word in match[1].split(", ")], known)


def from_colossal(text: str) -> tuple[str, int, int]:
    """Form, devices and stages of the text of `to_colossal`."""
    if text.startswith("parallel"):
        legacy = r"parallel = dict\(pipeline=([0-9]+), tensor=dict\(size=([0-9]+), mode='(2d|3d)'\)\)"
        match = matched(legacy, text)
        return match[3], int(match[2]), int(match[1])
    sequence = re.escape(', enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather"')
    match = matched(rf"HybridParallelPlugin\(tp_size=([0-9]+), pp_size=([0-9]+)({sequence})?\)", text)
    return ("stock" if match[3] else "stock-replicated"), int(match[1]), int(match[2])


def words_in(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def sizes_of(ranks: Any) -> tuple[int, ...]:
    """The sizes of nested lists of equal length."""
    if isinstance(ranks[0], int):
        return (len(ranks),)
    (inner,) = {sizes_of(rank) for rank in ranks}
    return (len(ranks), *inner)


def flat(ranks: Any) -> list[int]:
    return [ranks] if isinstance(ranks, int) else [device for rank in ranks for device in flat(rank)]


def is_legal_product(left: str, right: str, result: str) -> bool:
    """Whether the placements of C = A B along one axis are a signature of the matrix product."""
    return (left, right, result) in {
        (SPLIT_ROWS, COPY, SPLIT_ROWS),
        (COPY, SPLIT_COLUMNS, SPLIT_COLUMNS),
        (SPLIT_COLUMNS, SPLIT_ROWS, PARTIAL),
        (COPY, COPY, COPY),
    }


def as_plain_product(phase: Phase, placements: Mapping[Tensor, Placements]) -> list[tuple[str, str, str]]:
    """The placements of a phase's product along each axis, transposed factors as they enter the product."""
    left, right, result = PRODUCTS[phase]
    firsts = [TRANSPOSED.get(word, word) if phase is Phase.G else word for word in placements[left]]
    seconds = [TRANSPOSED.get(word, word) if phase is Phase.B else word for word in placements[right]]
    return list(zip(firsts, seconds, placements[result], strict=True))
