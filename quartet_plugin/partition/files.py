"""Partitions as JSON, which is read back to the same partition, and as text that says the same."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import read_json, shown, write_json_atomic
from quartet_plugin.model.schema import Bounds, Length, Matches, parse, record
from quartet_plugin.partition.render import block_text, parse_block, product_text, render
from quartet_plugin.partition.table import PRODUCTS, Home, Partition, Phase, Steps, Tensor, Triple
from quartet_plugin.partition.validate import MAX_DEVICES, check_sizes

MAX_PARTITION_BYTES = 64 * 2**20
_NONE = "-"

_PartitionName = Annotated[str, Matches(pattern=r"[A-Za-z0-9.-]{1,80}")]
_Count = Annotated[int, Bounds(ge=1, le=MAX_DEVICES)]
_Factor = Literal["I", "W", "dO"]


@record
class _Pieces:
    M: _Count
    N: _Count
    K: _Count


@record
class _HomeRow:
    parts: _Count
    blocks: tuple[str, ...]


@record
class _Homes:
    I: _HomeRow  # noqa: E741
    W: _HomeRow
    O: _HomeRow  # noqa: E741
    dO: _HomeRow  # noqa: N815
    dI: _HomeRow  # noqa: N815
    dW: _HomeRow  # noqa: N815


@record
class _PhaseRows:
    F: tuple[tuple[str, ...], ...]
    B: tuple[tuple[str, ...], ...]
    G: tuple[tuple[str, ...], ...]


@record
class _PartitionFile:
    schema_version: Literal[1]
    name: _PartitionName
    mesh: Annotated[tuple[_Count, ...], Length(least=1, most=8)]
    pieces: _Pieces
    carried: Annotated[tuple[_Factor, ...], Length(most=3)]
    kept: Annotated[tuple[_Factor, ...], Length(most=3)]
    homes: _Homes
    steps: _PhaseRows


def partition_to_json(partition: Partition) -> dict[str, Any]:
    """The exact inverse of `partition_from_json`."""
    return {
        "schema_version": 1,
        "name": partition.name,
        "mesh": list(partition.mesh),
        "pieces": dict(zip("MNK", partition.pieces, strict=True)),
        "carried": _names(partition.carried),
        "kept": _names(partition.kept),
        "homes": {
            str(tensor): {"parts": home.parts, "blocks": home_texts(home)}
            for tensor, home in partition.homes.items()
        },
        "steps": {
            str(phase): [[product_text(phase, triple) for triple in triples] for triples in steps]
            for phase, steps in partition.steps.items()
        },
    }


def partition_from_json(data: Any, *, where: str = "partition") -> Partition:
    """The partition of a parsed PARTITION.json.

    Raises ConfigError for what breaks the format and PlanError for sizes; `validate` checks the rest.
    """
    file = parse(_PartitionFile, data, where=where)
    partition = Partition(
        name=file.name,
        mesh=file.mesh,
        pieces=(file.pieces.M, file.pieces.N, file.pieces.K),
        steps={phase: _steps(phase, getattr(file.steps, phase), where) for phase in Phase},
        homes={tensor: _home(getattr(file.homes, tensor), f"{where}: homes.{tensor}") for tensor in Tensor},
        carried=frozenset(map(Tensor, file.carried)),
        kept=frozenset(map(Tensor, file.kept)),
    )
    check_sizes(partition)
    return partition


def read_partition(path: str | os.PathLike[str]) -> Partition:
    """The partition in PARTITION.json; raises as `partition_from_json`."""
    return partition_from_json(read_json(path, max_bytes=MAX_PARTITION_BYTES), where=os.fspath(path))


def write_partition(path: str | os.PathLike[str], partition: Partition) -> None:
    """Write PARTITION.json. Raises ConfigError or StorageError where it cannot be written."""
    write_json_atomic(path, partition_to_json(partition))


def partition_to_text(partition: Partition) -> str:
    """All that PARTITION.json says: sizes, homes, and the table of products."""
    homes = [
        f"home {tensor} {home.parts} {' '.join(home_texts(home))}" for tensor, home in partition.homes.items()
    ]
    return "\n".join(
        [
            f"partition {partition.name}",
            f"mesh {' '.join(map(str, partition.mesh))}",
            f"pieces {' '.join(map(str, partition.pieces))}",
            f"carried {' '.join(_names(partition.carried)) or _NONE}",
            f"kept {' '.join(_names(partition.kept)) or _NONE}",
            *homes,
            render(partition, is_whole=True),
        ]
    )


def home_texts(home: Home) -> list[str]:
    """The blocks of each device as one word, joined by `+`."""
    return ["+".join(map(block_text, blocks)) or _NONE for blocks in home.blocks]


def _names(tensors: frozenset[Tensor]) -> list[str]:
    return [str(tensor) for tensor in Tensor if tensor in tensors]


def _steps(phase: Phase, rows: Sequence[Sequence[str]], where: str) -> Steps:
    return tuple(
        tuple(
            _triple(phase, cell, f"{where}: steps.{phase}[{step}][{device}]")
            for device, cell in enumerate(cells)
        )
        for step, cells in enumerate(rows)
    )


def _triple(phase: Phase, cell: str, where: str) -> Triple:
    """The product that a cell's text names; its three blocks must agree."""
    left, right, result = PRODUCTS[phase]
    match = re.fullmatch(rf"{result}([0-9.]+)\+={left}([0-9.]+)'? {right}([0-9.]+)'?", cell, re.ASCII)
    blocks = [parse_block(text) for text in match.groups()] if match else []
    for triple in _candidates(phase, blocks):
        if product_text(phase, triple) == cell:
            return triple
    example = product_text(phase, (0, 1, 0))
    raise ConfigError(f"{where}: {shown(cell)}: must be a product such as {example!r} with blocks that agree")


def _candidates(phase: Phase, blocks: Sequence[tuple[int, int] | None]) -> list[Triple]:
    if len(blocks) != 3 or None in blocks:
        return []
    _, left, right = (block or (0, 0) for block in blocks)
    of_phase: Mapping[Phase, Triple] = {
        Phase.F: (left[0], left[1], right[1]),
        Phase.B: (left[0], right[0], left[1]),
        Phase.G: (left[0], left[1], right[1]),
    }
    return [of_phase[phase]]


def _home(row: _HomeRow, where: str) -> Home:
    devices = []
    for device, text in enumerate(row.blocks):
        blocks = [] if text == _NONE else [parse_block(word) for word in text.split("+")]
        if None in blocks:
            raise ConfigError(f"{where}.blocks[{device}]: {shown(text)}: must be blocks such as 00+01, or -")
        devices.append(tuple(block for block in blocks if block is not None))
    return Home(tuple(devices), parts=row.parts)
