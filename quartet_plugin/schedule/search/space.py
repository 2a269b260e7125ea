"""The region of a search: placements, chunk counts, splits, and parameters of the family to start from."""

import math
from collections.abc import Sequence
from itertools import product

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.costs import Costs
from quartet_plugin.schedule import placement as places
from quartet_plugin.schedule.family import Family
from quartet_plugin.schedule.placement import Placement, PlacementKind
from quartet_plugin.split.entries import (
    Entries,
    balanced_entries,
    check_entries,
    even_entries,
    minimum_entries,
)

AUTO = "auto"
EVEN = "even"
_AUTO_SHAPES = (
    (PlacementKind.LINEAR, 1),
    (PlacementKind.V, 2),
    (PlacementKind.LOOP, 2),
    (PlacementKind.LOOP, 3),
    (PlacementKind.LOOP, 4),
    (PlacementKind.SNAKE, 4),
)
# (stretch of F, stretch of I, shift of I, slack): few of these are near the best of all on every kind of
# pipeline, so they come first.
_LEADERS = (
    (1.0, 1.0, 1.0, 2.0),
    (2.0, 3.0, 0.5, math.inf),
    (1.0, 1.5, 0.0, 2.0),
    (2.0, 2.0, 0.0, 2.0),
    (1.0, 1.5, 0.5, 2.0),
    (1.0, 3.0, 0.5, math.inf),
    (1.0, 1.0, 0.0, 1.0),
    (2.0, 3.0, 0.0, 2.0),
    (1.0, 2.0, 0.5, 1.0),
    (1.0, 1.0, -0.5, 2.0),
    (2.0, 1.5, 0.0, 2.0),
    (1.0, 1.5, 0.0, 1.0),
    (2.0, 2.0, 0.5, 2.0),
    (1.0, 2.0, -0.5, 1.0),
)
# Building blocks of a V under a tight memory cap: (slots a device of F0 and I1, of F1 and I0; shifts of I1
# and I0; slack). Each is the best of a grid at some cap between a third of 1F1B's memory and all of it.
_BLOCKS = (
    (2.0, 1.0, 0.0, -0.34, 0.7),
    (1.0, 1.0, 0.0, 0.17, 0.34),
    (1.0, 1.5, -0.34, -0.34, 0.7),
    (1.0, 1.0, -0.34, 0.17, 1.0),
    (1.5, 1.5, -0.34, -0.34, 1.0),
    (1.0, 2.0, -0.34, 0.17, 0.17),
    (1.5, 1.0, -0.34, 0.0, 0.7),
    (1.0, 1.0, 0.17, -0.34, 0.34),
    (1.0, 1.5, 0.5, 0.0, 1.0),
    (2.0, 2.0, 0.0, 0.0, 0.7),
    (2.5, 1.0, 0.17, -0.34, 2.0),
    (1.5, 1.0, 0.5, 0.0, 0.7),
)
_FIRST_BLOCK = 4


def placements_for(
    costs: Costs,
    *,
    placement: str | Sequence[int],
    chunks: str | int | None,
    split: str | Sequence[int],
    allow_empty: bool,
) -> tuple[Placement, ...]:
    """The placements to search, those with too few layers or another number of stages left out.

    Raises ConfigError for an illegal placement or chunk count, and when nothing is left.
    """
    count = None if chunks in (AUTO, None) else int(chunks)
    devices = costs.num_devices
    if placement != AUTO:
        shapes = [places.build(placement, num_devices=devices, num_chunks=count)]
        if count is None and placement in (PlacementKind.LOOP, PlacementKind.SNAKE):
            more = (3, 4) if placement == PlacementKind.LOOP else (4,)
            shapes += [places.build(placement, num_devices=devices, num_chunks=n) for n in more]
    else:
        shapes = [
            places.build(kind, num_devices=devices, num_chunks=n)
            for kind, n in _AUTO_SHAPES
            if count in (None, n)
        ]
        if count is not None and not shapes:
            shapes = [places.build(PlacementKind.LOOP, num_devices=devices, num_chunks=count)]
    if not isinstance(split, str):
        shapes = [shape for shape in shapes if len(shape) == len(split)]
        if not shapes:
            raise ConfigError(f"split: {len(split)} counts match no allowed placement; give one a stage")
    fitting = tuple(
        dict.fromkeys(
            shape
            for shape in shapes
            if sum(minimum_entries(costs, len(shape), allow_empty=allow_empty)) <= len(costs.layers)
            and splits_for(costs, shape, split, allow_empty=allow_empty, strict=len(shapes) == 1)
        )
    )
    if not fitting:
        raise ConfigError(
            f"{len(costs.layers)} layers for {len(shapes[0])} stages; use fewer chunks, or --allow-empty"
        )
    return fitting


def splits_for(
    costs: Costs, placement: Placement, split: str | Sequence[int], *, allow_empty: bool, strict: bool = True
) -> list[Entries]:
    """The splits to start from: the balanced and the even one when free, else the given one.

    Raises ConfigError for a split that is not legal; an even one is left out instead unless `strict`.
    """
    stages = len(placement)
    if not isinstance(split, str):
        return [check_entries(costs, split, num_stages=stages, allow_empty=allow_empty)]
    if split not in (AUTO, EVEN):
        raise ConfigError(f"split: {split[:40]!r}; expected auto, even, or one count a stage")
    splits = [balanced_entries(costs, placement, allow_empty=allow_empty)] if split == AUTO else []
    try:
        splits.append(even_entries(costs, stages, allow_empty=allow_empty))
    except ConfigError:
        if strict and not splits:
            raise
    return list(dict.fromkeys(splits))


def family_starts(num_chunks: int, num_devices: int, num_microbatches: int) -> list[Family]:
    """Parameter sets for `num_chunks` stages a device, the most promising first.

    Stretch 1 keeps the fewest microbatches in flight, stretch 2 as many as 1F1B; shifts of I let more F
    through before it; groups make the interleaved orders.
    """
    v = num_chunks
    grid = product((1.0, 2.0), (1.0, 1.5, 2.0, 3.0), (-0.5, 0.0, 0.5, 1.0), (0.34, 1.0, 2.0, math.inf))
    families = [_plain(v, *values) for values in dict.fromkeys((*_LEADERS, *grid))]
    if v == 2:
        families[_FIRST_BLOCK:_FIRST_BLOCK] = [_block(*values) for values in _BLOCKS]
    if v > 1:
        groups = sorted({min(num_microbatches, g) for g in (num_devices, 2 * num_devices, num_microbatches)})
        families += [
            _grouped(v, g, backward, slack, w_gap)
            for g, backward, slack, w_gap in product(groups, (1.0, 2.0, 3.0), (0.5, 2.0), (0.0, math.inf))
        ]
    return families


def _plain(v: int, forward: float, backward: float, shift: float, slack: float) -> Family:
    return Family(
        stretch_forward=(forward,) * v,
        stretch_backward=(backward,) * v,
        shift_forward=(0.0,) * v,
        shift_backward=(shift,) * v,
        slack=slack,
    )


def _block(down: float, up: float, shift_last: float, shift_first: float, slack: float) -> Family:
    """F of the first and I of the second chunk move `down` slots a device, the other two `up`."""
    return Family(
        stretch_forward=(down, up),
        stretch_backward=(up, down),
        shift_forward=(0.0, 0.0),
        shift_backward=(shift_first, shift_last),
        slack=slack,
    )


def _grouped(v: int, group: int, backward: float, slack: float, w_gap: float) -> Family:
    """Chunk c of a group follows chunk c - 1 by group / v microbatches, and so do the gradients."""
    step = group / v
    return Family(
        stretch_forward=(1.0,) * v,
        stretch_backward=(backward,) * v,
        shift_forward=tuple(max(0.0, step - 1.0 / v) * c for c in range(v)),
        shift_backward=tuple(max(0.0, step - 1.0 / v) * (2 * v - 2 - c) for c in range(v)),
        group=group,
        slack=slack,
        w_gap=w_gap,
    )
