"""Structured parameters of the family to start from: they surround the named schedules."""

import math
from itertools import product

from quartet_plugin.schedule.family import Family

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


def starts(num_chunks: int, num_devices: int, num_microbatches: int) -> list[Family]:
    """Parameter sets for `num_chunks` stages a device, the most promising first.

    Stretch 1 keeps the fewest microbatches in flight, stretch 2 as many as 1F1B; shifts of I let more F
    through before it; groups make the interleaved orders.
    """
    v = num_chunks
    grid = product((1.0, 2.0), (1.0, 1.5, 2.0, 3.0), (-0.5, 0.0, 0.5, 1.0), (0.34, 1.0, 2.0, math.inf))
    families = [_plain(v, *values) for values in dict.fromkeys((*_LEADERS, *grid))]
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
