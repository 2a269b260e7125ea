"""Orders written as phases: a short pattern of letters, and how often it repeats.

A letter is an action on a chunk: `f i w b` on chunk 0, `F I W B` on chunk 1 (the other copy in two-copy
schedules); `x` is the weight gradient that has waited longest on the device. The n-th `f` is microbatch n
of chunk 0, the n-th `i` or `b` likewise. Letters beyond the last microbatch are dropped, what a pattern
leaves undone is added at the end.
"""

from collections.abc import Sequence

import numpy as np

from quartet_plugin.model.costs import IntArray
from quartet_plugin.schedule.action import ActionKind

Phase = tuple[str, int]
OLDEST_W = -1

_LETTERS = {
    letter: chunk * 4 + ActionKind[letter.upper()]
    for chunk, letters in enumerate(("fiwb", "FIWB"))
    for letter in letters
}
_LETTERS["x"] = OLDEST_W


def slots_of(phases: Sequence[Phase]) -> IntArray:
    """`chunk * 4 + kind` of every letter, or OLDEST_W."""
    parts = [
        np.tile(np.array([_LETTERS[letter] for letter in pattern], dtype=np.int64), max(0, times))
        for pattern, times in phases
    ]
    return np.concatenate(parts)


def order_of_slots(
    slots: IntArray,
    *,
    stages: Sequence[int],
    num_microbatches: int,
    ranges: Sequence[tuple[int, int]] | None = None,
) -> IntArray:
    """Number the microbatches of one device's slots and return action codes.

    `stages[chunk]` is the stage of a chunk; `ranges[chunk]` its (first, number of) microbatches where the
    chunks are of different copies of the model.
    """
    given = [(0, num_microbatches)] * len(stages) if ranges is None else ranges
    codes = np.full(len(slots), -1, dtype=np.int64)
    kinds = np.where(slots == OLDEST_W, ActionKind.W, slots % 4)
    split = bool(np.any(kinds == ActionKind.I))
    tails: list[IntArray] = []
    for chunk, stage in enumerate(stages):
        own = (slots != OLDEST_W) & (slots // 4 == chunk)
        first, count = given[chunk]
        units = (stage * num_microbatches + first + np.arange(count)) * 4
        forward = np.flatnonzero(own & (kinds == ActionKind.F))[:count]
        backward = np.flatnonzero(own & ((kinds == ActionKind.I) | (kinds == ActionKind.B)))[:count]
        codes[forward] = units[: len(forward)] + ActionKind.F
        codes[backward] = units[: len(backward)] + kinds[backward]
        tails += [
            units[len(forward) :] + ActionKind.F,
            units[len(backward) :] + (ActionKind.I if split else ActionKind.B),
        ]
        weights = np.flatnonzero(own & (kinds == ActionKind.W))[:count]
        codes[weights] = units[: len(weights)] + ActionKind.W
    body = np.concatenate([codes, *tails])
    oldest = np.flatnonzero(slots == OLDEST_W)
    inputs = body[(body >= 0) & (body & 3 == ActionKind.I)] + (ActionKind.W - ActionKind.I)
    if len(oldest):
        oldest = oldest[: len(inputs)]
        body[oldest] = inputs[: len(oldest)]
        left = inputs[len(oldest) :]
    else:
        left = np.setdiff1d(inputs, body[body & 3 == ActionKind.W], assume_unique=True)
    return np.concatenate((body[body >= 0], left))
