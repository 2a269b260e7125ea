"""A partition as a table of steps and devices, whole for reading, cut to one cell's window for refusals."""

import re
from collections.abc import Collection

from quartet_plugin.errors import PlanError
from quartet_plugin.partition.table import (
    PRODUCTS,
    BlockIndex,
    Partition,
    Phase,
    Triple,
    block_of,
    coordinates,
)

# A phase, its step and a device.
PhaseCell = tuple[Phase, int, int]

MAX_WIDTH = 110
MAX_ROWS = 17
MAX_INDEX_DIGITS = 4
_BLOCK = re.compile(
    rf"([0-9])([0-9])|([0-9]{{1,{MAX_INDEX_DIGITS}}})\.([0-9]{{1,{MAX_INDEX_DIGITS}}})", re.ASCII
)


def block_text(block: BlockIndex) -> str:
    """`01`, or `3.12` where a number has two digits."""
    return f"{block[0]}{block[1]}" if max(block) < 10 else f"{block[0]}.{block[1]}"


def parse_block(text: str) -> BlockIndex | None:
    """The inverse of `block_text`; None for other text."""
    match = _BLOCK.fullmatch(text)
    if match is None:
        return None
    first, second, longer, last = match.groups()
    return (int(first), int(second)) if first is not None else (int(longer), int(last))


def product_text(phase: Phase, triple: Triple) -> str:
    """The product of a cell: `O00+=I01 W10`, with a quote behind what is transposed."""
    left, right, result = PRODUCTS[phase]
    texts = [f"{tensor}{block_text(block_of(tensor, triple))}" for tensor in (left, right, result)]
    quotes = ("'", "") if phase is Phase.G else ("", "'") if phase is Phase.B else ("", "")
    return f"{texts[2]}+={texts[0]}{quotes[0]} {texts[1]}{quotes[1]}"


def device_text(mesh: tuple[int, ...], device: int) -> str:
    """A device by its place in the mesh: `(0,1)`."""
    return f"({','.join(map(str, coordinates(mesh)[device]))})"


def place(partition: Partition, cell: PhaseCell) -> str:
    """Words for a cell."""
    phase, step, device = cell
    return f"{phase}{step}, device {device_text(partition.mesh, device)}"


def render(
    partition: Partition,
    *,
    mark: PhaseCell | None = None,
    related: Collection[PhaseCell] = (),
    is_whole: bool = False,
) -> str:
    """Steps down, devices across; the marked cell in square brackets, related ones in round ones.

    Unless `is_whole` at most 17 steps and 110 characters a line are shown, those nearest to the mark.
    """
    rows = [(phase, step) for phase in Phase for step in range(len(partition.steps[phase]))]
    devices = range(partition.num_devices)
    left_out = ""
    if not is_whole:
        centre = 0 if mark is None else rows.index(mark[:2])
        rows = _window(rows, centre, MAX_ROWS)
        widest = 2 + max(
            len(product_text(phase, triple))
            for phase in Phase
            for triples in partition.steps[phase]
            for triple in triples
        )
        shown = _window(
            list(devices), 0 if mark is None else mark[2], max(1, (MAX_WIDTH - 4) // (widest + 2))
        )
        if len(shown) < len(devices):
            left_out = f"\n({len(devices) - len(shown)} more devices)"
        devices = range(shown[0], shown[-1] + 1)
    table = [["step", *(device_text(partition.mesh, device) for device in devices)]]
    for phase, step in rows:
        cells = ((phase, step, device) for device in devices)
        table.append([f"{phase}{step}", *(_cell(partition, cell, mark, related) for cell in cells)])
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return "\n".join(lines) + left_out


def refusal(
    partition: Partition, reason: str, *, mark: PhaseCell, related: Collection[PhaseCell] = ()
) -> PlanError:
    """The error for a table that breaks a rule: a line of reason, then the table with the cell marked."""
    error = PlanError(f"{partition.name}: {reason}")
    error.table = render(partition, mark=mark, related=related)
    return error


def _cell(
    partition: Partition, cell: PhaseCell, mark: PhaseCell | None, related: Collection[PhaseCell]
) -> str:
    phase, step, device = cell
    text = product_text(phase, partition.steps[phase][step][device])
    if cell == mark:
        return f"[{text}]"
    return f"({text})" if cell in related else text


def _window[T](rows: list[T], centre: int, at_most: int) -> list[T]:
    start = max(0, min(centre - at_most // 2, len(rows) - at_most))
    return rows[start : start + at_most]
