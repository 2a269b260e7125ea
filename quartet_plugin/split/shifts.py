"""Shifts of a split's stage boundaries: every split is reached from any other one.

Boundary k of S stages, k from 1 to S - 1, is the number of layers before stage k. A shift moves one boundary
by whole layers. Boundaries are placed in ascending order, each as near to its shifted place as the ones
before it and the inner stages after it allow, so that every tuple of shifts gives a legal split.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def shifted_split(origin: Sequence[int], shifts: Sequence[int]) -> tuple[int, ...]:
    """The legal split nearest to `origin` with its boundaries moved by `shifts`, one a boundary."""
    num_layers, num_stages = sum(origin), len(origin)
    edges = [0]
    for k, (boundary, shift) in enumerate(zip(_boundaries(origin), shifts, strict=True), start=1):
        least = edges[-1] + (k > 1)
        most = num_layers - (num_stages - 1 - k)
        edges.append(min(max(boundary + shift, least), most))
    return tuple(end - start for start, end in pairwise([*edges, num_layers]))


def shifts_between(origin: Sequence[int], split: Sequence[int]) -> tuple[int, ...]:
    """The shifts that make `split` of `origin`; both are legal splits of as many layers and stages."""
    pairs = zip(_boundaries(origin), _boundaries(split), strict=True)
    return tuple(wanted - boundary for boundary, wanted in pairs)


def scaled_split(split: Sequence[int], *, num_layers: int, origin: Sequence[int]) -> tuple[int, ...]:
    """The legal split of `num_layers` whose boundaries lie nearest to those of `split` at its own depth.

    `origin` is any legal split of `num_layers` into as many stages.
    """
    depth = sum(split)
    pairs = zip(_boundaries(split), _boundaries(origin), strict=True)
    return shifted_split(
        origin, [round(wanted * num_layers / depth) - boundary for wanted, boundary in pairs]
    )


def greatest_shift(num_layers: int, *, num_stages: int) -> int:
    """The greatest shift between any two legal splits, in layers."""
    return num_layers - max(0, num_stages - 2)


def _boundaries(split: Sequence[int]) -> list[int]:
    return list(accumulate(split))[:-1]
