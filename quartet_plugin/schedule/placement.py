"""Where each stage lives: the legal placements of a pipeline's stages on its devices.

A placement is the device of each stage, in model order. `placement[0]` is 0 and every device holds the
same number of stages (its chunks, numbered by stage).
"""

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.costs import IntArray
from quartet_plugin.model.schema import nearest_word
from quartet_plugin.schedule.action import MAX_STAGES

Placement = tuple[int, ...]


class PlacementKind(StrEnum):
    """The shapes that have a name; `list` is any other legal one."""

    LINEAR = "linear"
    LOOP = "loop"
    V = "v"
    SNAKE = "snake"
    LIST = "list"


def linear(num_devices: int) -> Placement:
    """Stage s on device s."""
    return tuple(range(num_devices))


def loop(num_devices: int, num_chunks: int) -> Placement:
    """Stage s on device s mod num_devices: the virtual stages of interleaved 1F1B."""
    return tuple(range(num_devices)) * num_chunks


def snake(num_devices: int, num_chunks: int) -> Placement:
    """Stages go to and fro, so that neighbouring stages at a turn share a device (Hanayo's waves)."""
    forth = tuple(range(num_devices))
    return tuple(d for chunk in range(num_chunks) for d in (forth if chunk % 2 == 0 else forth[::-1]))


def v_shape(num_devices: int) -> Placement:
    """Two chunks a device, the second in reverse order (ZB-V, V-Half, V-Min, DualPipeV)."""
    return snake(num_devices, 2)


def build(kind: str | Sequence[int], *, num_devices: int, num_chunks: int | None = None) -> Placement:
    """The placement of a named shape, or a list after checking it.

    Raises ConfigError for an unknown shape, and for a chunk count the shape does not allow: linear has
    1, v has 2, loop and snake at least 2 (2 when None).
    """
    if not isinstance(kind, str):
        placement = check(kind, num_devices=num_devices)
        chunks = len(placement) // num_devices
        if num_chunks is not None and num_chunks != chunks:
            raise ConfigError(f"chunks: {num_chunks} does not match the placement's {chunks} stages a device")
        return placement
    if num_devices < 1:
        raise ConfigError(f"num_devices: {num_devices}; a placement needs at least 1")
    fixed = {PlacementKind.LINEAR: 1, PlacementKind.V: 2}.get(_kind(kind))
    if fixed is not None and num_chunks not in (None, fixed):
        raise ConfigError(f"chunks: {num_chunks} with placement {kind}; it has exactly {fixed} a device")
    chunks = fixed or (2 if num_chunks is None else num_chunks)
    if fixed is None and chunks < 2:
        raise ConfigError(f"chunks: {chunks} with placement {kind}; it needs at least 2, or use linear")
    if num_devices * chunks > MAX_STAGES:
        raise ConfigError(f"chunks: {chunks} on {num_devices} devices; at most {MAX_STAGES} stages in all")
    return loop(num_devices, chunks) if kind in ("linear", "loop") else snake(num_devices, chunks)


def _kind(kind: str) -> PlacementKind:
    names = [k.value for k in PlacementKind if k is not PlacementKind.LIST]
    if kind not in names:
        raise ConfigError(
            f"placement: {kind[:40]!r}; expected one of {', '.join(names)}, or a list like 0,1,1,0"
            f"{nearest_word(kind, known=names)}"
        )
    return PlacementKind(kind)


def check(placement: Sequence[int], *, num_devices: int) -> Placement:
    """Return `placement` as a tuple; raises ConfigError unless it is legal."""
    stages = tuple(placement)
    if not stages or stages[0] != 0:
        raise ConfigError(f"placement: {_short(stages)} must start with device 0")
    fault = fault_of(stages, num_devices=num_devices)
    if fault is not None:
        raise ConfigError(f"placement{fault}")
    return stages


def fault_of(placement: Sequence[int], *, num_devices: int) -> str | None:
    """The rule that a placement breaks, as it follows the placement's name; None where it breaks none.

    Every device must appear, all equally often.
    """
    stages = np.asarray(placement, dtype=np.int64)
    if len(stages) == 0 or len(stages) > MAX_STAGES:
        return f": {len(stages)} stages; must be 1 to {MAX_STAGES}"
    if stages.min() < 0 or stages.max() >= num_devices:
        stage = int(np.flatnonzero((stages < 0) | (stages >= num_devices))[0])
        name = f"device {stages[stage]}"
        return f"[{stage}]: {name}: devices are numbered 0 to {num_devices - 1}, {name} does not exist"
    counts = np.bincount(stages, minlength=num_devices)
    if counts.min() == counts.max():
        return None
    return (
        f": device {counts.argmin()} holds {counts.min()} stages and device {counts.argmax()} "
        f"{counts.max()}; every device must appear equally often"
    )


def kind_of(placement: Sequence[int], *, num_devices: int) -> PlacementKind:
    """The name of a legal placement's shape; a snake of two chunks is a `v`."""
    stages = tuple(placement)
    chunks = len(stages) // num_devices
    if stages == linear(num_devices):
        return PlacementKind.LINEAR
    if stages == loop(num_devices, chunks):
        return PlacementKind.LOOP
    if stages == snake(num_devices, chunks):
        return PlacementKind.V if chunks == 2 else PlacementKind.SNAKE
    return PlacementKind.LIST


def chunk_of_stage(placement: Sequence[int]) -> IntArray:
    """Each stage's index on its device, counted in model order."""
    seen: dict[int, int] = {}
    chunks = np.empty(len(placement), dtype=np.int64)
    for stage, device in enumerate(placement):
        chunks[stage] = seen.get(device, 0)
        seen[device] = seen.get(device, 0) + 1
    return chunks


def stages_of_device(placement: Sequence[int], num_devices: int) -> list[list[int]]:
    """The stages of every device, in model order."""
    stages: list[list[int]] = [[] for _ in range(num_devices)]
    for stage, device in enumerate(placement):
        stages[device].append(stage)
    return stages


def _short(stages: tuple[int, ...]) -> str:
    text = ",".join(map(str, stages[:12]))
    return text + (",..." if len(stages) > 12 else "")
