"""OneFlow's placements and SBP signatures: split, broadcast and partial sum along each axis of the ranks."""

import ast
import re
from itertools import product
from typing import Any

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import shown
from quartet_plugin.partition.table import PRODUCTS, Phase, Tensor
from quartet_plugin.partition.tiles import (
    COPY,
    PARTIAL,
    SPLIT_COLUMNS,
    SPLIT_ROWS,
    PhaseSignature,
    Placements,
    TileAssignment,
)

_WORDS = {
    SPLIT_ROWS: "split(0)",
    SPLIT_COLUMNS: "split(1)",
    COPY: "broadcast",
    PARTIAL: "partial_sum",
}
_TEXT = re.compile(r'placement\("cuda", ranks=(\[[0-9,\[\] ]+\])\), sbp=\(([a-z0-9_(), ]+)\)', re.ASCII)


def to_sbp(tiles: TileAssignment) -> str:
    """Placement and SBP of a matrix: `placement("cuda", ranks=[[0,1],[3,2]]), sbp=(split(0), split(1))`."""
    axes = [
        (size, word)
        for size, word in (
            (tiles.rows, SPLIT_ROWS),
            (tiles.columns, SPLIT_COLUMNS),
            (tiles.copies, COPY),
        )
        if size > 1
    ] or [(1, COPY)]
    ranks = _nested(tiles.devices, [size for size, _ in axes])
    return f'placement("cuda", ranks={ranks}), sbp={_words(tuple(word for _, word in axes))}'


def from_sbp(text: str) -> TileAssignment:
    """The tiles that a placement and its SBP say. Raises ConfigError for another text."""
    match = _TEXT.fullmatch(text)
    names = {word: placement for placement, word in _WORDS.items()}
    if match is not None:
        try:
            ranks = ast.literal_eval(match[1])
        except (SyntaxError, ValueError, RecursionError):
            ranks = None
        words = [word.strip() for word in match[2].split(",") if word.strip()]
        sizes = _sizes(ranks)
        if len(sizes) == len(words) and set(words) <= names.keys() - {_WORDS[PARTIAL]}:
            return _tiles(_flat(ranks), sizes, tuple(names[word] for word in words))
    raise ConfigError(f"SBP {shown(text)}: must be a placement with ranks and one word an axis")


def product_to_sbp(phase: Phase, signature: PhaseSignature) -> str:
    """A phase as OneFlow's signature of its product: `I (..), W (..) -> O (..)` on the ranks."""
    texts = [f"{tensor} {_words(signature.placements[tensor])}" for tensor in PRODUCTS[phase]]
    ranks = _nested(signature.devices, signature.sizes)
    return f"{texts[0]}, {texts[1]} -> {texts[2]} on ranks={ranks}"


def product_from_sbp(phase: Phase, text: str) -> dict[Tensor, Placements]:
    """The placements of a phase's tensors in the text of `product_to_sbp`. Raises ConfigError."""
    names = {word: placement for placement, word in _WORDS.items()}
    placements = {}
    for tensor in PRODUCTS[phase]:
        match = re.search(rf"(?:^|[ ]){tensor} \(((?:split\([01]\)|broadcast|partial_sum|, ?)*)\)", text)
        if match is None:
            raise ConfigError(f"signature {shown(text)}: says nothing of {tensor}")
        placements[tensor] = tuple(names[word.strip()] for word in match[1].split(",") if word.strip())
    return placements


def _words(placements: Placements) -> str:
    words = [_WORDS[placement] for placement in placements]
    return f"({', '.join(words)}{',' if len(words) == 1 else ''})"


def _nested(devices: tuple[int, ...], sizes: Any) -> str:
    """Device numbers as nested lists of these sizes."""
    if len(sizes) <= 1:
        return f"[{','.join(map(str, devices))}]"
    step = len(devices) // sizes[0]
    rows = (devices[index * step : (index + 1) * step] for index in range(sizes[0]))
    return f"[{','.join(_nested(row, sizes[1:]) for row in rows)}]"


def _sizes(ranks: Any) -> tuple[int, ...]:
    """The sizes of nested lists of equal length; empty where they are not."""
    if not isinstance(ranks, list) or not ranks:
        return ()
    if all(isinstance(rank, int) for rank in ranks):
        return (len(ranks),)
    inner = {_sizes(rank) for rank in ranks}
    return (len(ranks), *inner.pop()) if len(inner) == 1 and () not in inner else ()


def _flat(ranks: Any) -> list[int]:
    return [ranks] if isinstance(ranks, int) else [device for rank in ranks for device in _flat(rank)]


def _tiles(devices: list[int], sizes: tuple[int, ...], placements: Placements) -> TileAssignment:
    if sorted(devices) != list(range(len(devices))):
        raise ConfigError("ranks of a placement: each device once, from 0")
    counts, tiles = [1, 1], [(0, 0)] * len(devices)
    for size, placement in zip(sizes, placements, strict=True):
        counts[0] *= size if placement == SPLIT_ROWS else 1
        counts[1] *= size if placement == SPLIT_COLUMNS else 1
    for device, place in zip(devices, product(*map(range, sizes)), strict=True):
        row = column = 0
        for index, size, placement in zip(place, sizes, placements, strict=True):
            row = row * size + index if placement == SPLIT_ROWS else row
            column = column * size + index if placement == SPLIT_COLUMNS else column
        tiles[device] = (row, column)
    return TileAssignment.of_tiles(tiles, counts[0], counts[1])
