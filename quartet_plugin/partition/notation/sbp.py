"""OneFlow's placements and SBP signatures: split, broadcast and partial sum along each axis of the ranks."""

from typing import Any

from quartet_plugin.partition.table import PRODUCTS, Phase
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


def product_to_sbp(phase: Phase, signature: PhaseSignature) -> str:
    """A phase as OneFlow's signature of its product: `I (..), W (..) -> O (..)` on the ranks."""
    texts = [f"{tensor} {_words(signature.placements[tensor])}" for tensor in PRODUCTS[phase]]
    ranks = _nested(signature.devices, signature.sizes)
    return f"{texts[0]}, {texts[1]} -> {texts[2]} on ranks={ranks}"


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
