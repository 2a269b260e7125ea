"""Schedules that are written down as phases: short patterns of letters, and how often each repeats.

A letter is an action on a chunk: `f i w b` on chunk 0, `F I W B` on chunk 1 (the other copy in two-copy
schedules); `x` is the weight gradient that has waited longest on the device. The n-th `f` is microbatch n of
chunk 0, the n-th `i` or `b` likewise. Letters beyond the last microbatch are dropped; actions that a pattern
does not reach are added at the end. `f+B` is an overlapped pair where the schedule is asked for with pairs,
and two actions where it is not. Each rule gives the phases, or the slots, of device d of p.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

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
    parts = []
    for pattern, times in phases:
        slots = _slots_of_pattern(pattern)
        part = np.empty((max(0, times), len(slots)), dtype=np.int64)
        part[:] = slots
        parts.append(part.ravel())
    return np.concatenate(parts)


@lru_cache(maxsize=256)
def _slots_of_pattern(pattern: str) -> IntArray:
    return np.array([_LETTERS[letter] for letter in pattern if letter != "+"], dtype=np.int64)


def pairs_of(phases: Sequence[Phase]) -> IntArray:
    """The indices of the slots that run beside the next one, in phases of which no letter is dropped."""
    marks = [
        [following == "+" for letter, following in pairwise(f"{pattern} ") if letter != "+"] * max(0, times)
        for pattern, times in phases
    ]
    return np.flatnonzero(np.concatenate(marks))


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
    # Compiled: who needs the names of schedules alone does not wait for numba.
    from quartet_plugin.schedule.named.slot_kernel import numbered_slots

    base = np.array(stages, dtype=np.int64) * (4 * num_microbatches)
    count = np.full(len(stages), num_microbatches, dtype=np.int64)
    if ranges is not None:
        first, count = (np.array(column, dtype=np.int64) for column in zip(*ranges, strict=True))
        base = base + 4 * first
    order: IntArray = numbered_slots(slots, base, count)
    return order


def gpipe(p: int, m: int, d: int) -> list[Phase]:  # noqa: ARG001 - all rules take the same arguments
    """All forwards, then all backwards (Huang et al. 2019). Bubble (p-1)(F+I+W), memory m."""
    return [("f", m), ("b", m)]


def one_f_one_b(p: int, m: int, d: int) -> list[Phase]:
    """1F1B (PipeDream-Flush, Narayanan et al. 2021). Bubble (p-1)(F+I+W), memory p."""
    return [("f", min(m, p - d - 1)), ("fb", m), ("b", m)]


def zb_h1(p: int, m: int, d: int) -> list[Phase]:
    """ZB-H1 (Qi et al. 2024): device d defers d weight gradients. Bubble (p-1)(F+I-W), memory p."""
    return [("f", min(m, p - d)), ("if", min(d, max(0, m - (p - d)))), ("iwf", max(0, m - p)), ("iw", m)]


def zb_h2(p: int, m: int, d: int) -> list[Phase]:
    """ZB-H2 (Qi et al. 2024): fills the warm-up too. Bubble (p-1)(F+I-2W) without barrier, memory 2p-1."""
    warm = min(m, 2 * (p - d) - 1)
    return [("f", warm), ("if", min(2 * d, m - warm)), ("iwf", max(0, m - (2 * p - 1))), ("iw", m)]


def zb_v(p: int, m: int, d: int) -> list[Phase]:
    """ZB-V (Qi et al. 2024), V placement. Bubble (p-1)F/2 with a barrier, 0 without, memory p."""
    return [
        ("f", 2 * (p - d) - 1),
        ("Ff", d),
        ("FIW", p - d),
        ("fiwFIW", max(0, m - (2 * p - d - 1))),
        ("iwFIW", max(0, m - p) if m < 2 * p - d - 1 else p - d - 1),
        ("iI", d),
        ("iw", p - d),
    ]


def dual_phases(p: int, m: int, d: int) -> list[Phase]:
    """DualPipeV (DeepSeek and Sea AI Lab 2025), its eight phases; m >= 2p. Memory p + 1/2.

    DualPipe has the same phases on 2p devices: 2p stages, m microbatches a direction. The last device begins
    its main phase without a pair, which would only add to the bubble.
    """
    half = (d + 1) // 2
    alone = int(d == p - 1)
    return [
        ("f", 2 * (p - d - 1)),
        ("fF", d + 1),
        ("IxF", p - d - 1),
        ("fBF+b", alone),
        ("f+BF+b", m - 2 * p + d + 1 - alone),
        ("BF+b", p - d - 1),
        ("Bb", half),
        ("Bi", 1 - d % 2),
        ("Ii", d + 1 - half - (1 - d % 2)),
        ("xi", p - d - 1),
        ("x", d + 1),
    ]


@lru_cache(maxsize=64)
def _interleaved_slots(m: int, v: int, group: int) -> tuple[IntArray, IntArray]:
    """The forwards and the full backwards of Megatron's interleaved order, alike on all devices."""
    chunks = interleaved_chunks(m, v, group)
    return chunks * 4 + ActionKind.F, (v - 1 - chunks) * 4 + ActionKind.B


def interleaved_chunks(m: int, v: int, group: int) -> IntArray:
    """The chunk of every forward in Megatron's interleaved order: `group` microbatches a chunk in turn."""
    parts = [np.repeat(np.arange(v), min(group, m - first)) for first in range(0, m, group)]
    return np.concatenate(parts)


def interleaved(p: int, m: int, d: int, v: int, group: int) -> IntArray:
    """Interleaved 1F1B (Narayanan et al. 2021), Megatron's warm-up: 2(p-d-1) + (v-1) group forwards.

    With group p: bubble (p-1)(F+I+W)/v, memory p + (p-1)/v.
    """
    forward, backward = _interleaved_slots(m, v, group)
    return _alternate(forward, backward, 2 * (p - d - 1) + (v - 1) * group)


def interleaved_pairs(p: int, m: int, d: int, v: int, group: int) -> tuple[IntArray, IntArray]:
    """Megatron's combined 1F1B: one more forward of warm-up, then pairs; the indices of the pairs' forwards.

    The forward more makes both parts of every pair independent. Memory p + p/v.
    """
    forward, backward = _interleaved_slots(m, v, group)
    warm = min(2 * (p - d - 1) + (v - 1) * group + 1, len(forward))
    return _alternate(forward, backward, warm), warm + 2 * np.arange(len(forward) - warm)


def _alternate(forward: IntArray, backward: IntArray, warm: int) -> IntArray:
    """`warm` forwards, then one forward and one backward in turn, then the rest."""
    total = len(forward)
    warm = min(warm, total)
    body = np.empty(2 * (total - warm), dtype=np.int64)
    body[0::2] = forward[warm:]
    body[1::2] = backward[: total - warm]
    return np.concatenate((forward[:warm], body, backward[total - warm :]))


def breadth_first(p: int, m: int, d: int, v: int, group: int) -> IntArray:  # noqa: ARG001
    """Breadth-first (Lamy-Poirier 2023): all microbatches of a chunk before the next. Memory m."""
    chunks = interleaved_chunks(m, v, m)
    return np.concatenate((chunks * 4 + ActionKind.F, (v - 1 - chunks) * 4 + ActionKind.B))


def zb_interleaved(p: int, m: int, d: int, v: int, group: int) -> IntArray:
    """Interleaved 1F1B with split backward: device d defers d weight gradients. Bubble (p-1)(F+I-W)/v."""
    chunks = interleaved_chunks(m, v, group)
    forward, backward = chunks * 4 + ActionKind.F, (v - 1 - chunks) * 4 + ActionKind.I
    total = len(forward)
    warm = min(2 * (p - d - 1) + (v - 1) * group, total)
    late = min(d, total)
    base = _alternate(forward, backward, warm)
    # A weight gradient after every input gradient but the first `late`; those that are left come last.
    is_backward = np.flatnonzero(base % 4 == ActionKind.I)
    weight = (v - 1 - chunks) * 4 + ActionKind.W
    body = np.insert(base, is_backward[late:] + 1, weight[: total - late])
    return np.concatenate((body, weight[total - late :]))
