"""The split that balances devices where layers are of several kinds, in a given order.

A stage holds a run of consecutive layers, so what it takes depends on which layers these are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quartet_plugin.model.costs import FloatArray, IntArray

# Numbers that one step of the dynamic program has in memory.
_BLOCK = 2**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KindLoads:
    """What stages take: `fixed` [S] beside their layers, `layer` [num_kinds, S] for a layer of each kind.

    `before` [num_kinds, num_layers + 1] are the layers of each kind before each layer, and in all.
    `placement` is the device of each stage.
    """

    fixed: FloatArray
    layer: FloatArray
    before: IntArray
    placement: Sequence[int]

    @property
    def summed(self) -> FloatArray:
        """What the first layers of the model take on each stage [S, num_layers + 1]."""
        summed: FloatArray = self.layer.T @ self.before
        return summed

    def of_devices(self, splits: IntArray) -> FloatArray:
        """The loads of all devices under each of `splits` [num_splits, S]: [num_splits, num_devices]."""
        ends = np.cumsum(splits, axis=1)
        stages, summed = np.arange(splits.shape[1]), self.summed
        work = self.fixed + summed[stages, ends] - summed[stages, ends - splits]
        loads = np.zeros((len(splits), max(self.placement) + 1))
        for stage, device in enumerate(self.placement):
            loads[:, device] += work[:, stage]
        return loads


def balanced_by_kinds(loads: KindLoads, least: Sequence[int]) -> tuple[int, ...]:
    """The split whose busiest device has the least load; each stage holds its `least` layers or more.

    It is exact with one stage a device. With several the busiest stage is made least, and single layers are
    moved while that relieves the busiest device.
    """
    split = _of_least_stage(loads, least)
    return split if len(set(loads.placement)) == len(split) else _improved(loads, split, least)


def least_by_stage(num_stages: int, num_layers: int) -> tuple[int, ...]:
    """The fewest layers of each stage: one, but for the end stages where there are too few layers."""
    least = [1] * num_stages
    for end in (0, -1)[: max(0, num_stages - num_layers)]:
        least[end] = 0
    return tuple(least)


def _of_least_stage(loads: KindLoads, least: Sequence[int]) -> tuple[int, ...]:
    """The split with the least busiest stage, by dynamic programming in O(stages * layers^2)."""
    num_layers = loads.before.shape[1] - 1
    best = np.full(num_layers + 1, np.inf)
    best[0] = 0.0
    chosen = []
    for stage, work in enumerate(loads.summed):
        best, begin = _with_stage(best, work, loads.fixed[stage], fewest=least[stage])
        chosen.append(begin)
    counts, end = [], num_layers
    for begin in reversed(chosen):
        counts.append(end - int(begin[end]))
        end = int(begin[end])
    return tuple(reversed(counts))


def _with_stage(
    best: FloatArray, work: FloatArray, fixed: float, *, fewest: int
) -> tuple[FloatArray, IntArray]:
    """The least busiest stage of the layers before each layer with one stage more, and where this begins.

    `best` [num_layers + 1] are those without it, `work` what the layers before each layer take on it.
    """
    size = len(best)
    then, begin = np.empty(size), np.empty(size, dtype=np.int64)
    places = np.arange(size)
    rows = max(1, _BLOCK // size)
    for first in range(0, size, rows):
        ends = places[first : first + rows]
        top = np.maximum(best, fixed + work[ends, None] - work)
        top[places > ends[:, None] - fewest] = np.inf
        begin[ends] = top.argmin(axis=1)
        then[ends] = top.min(axis=1)
    return then, begin


def _improved(loads: KindLoads, split: tuple[int, ...], least: Sequence[int]) -> tuple[int, ...]:
    """The split after moves of single layers from stages of the busiest device, while these relieve it."""
    current, placement = np.array(split, dtype=np.int64), np.array(loads.placement)
    score = _score(loads, current[None])[0]
    for _ in range(4 * int(current.sum())):
        busiest = int(loads.of_devices(current[None])[0].argmax())
        moves = [
            (giver, taker)
            for giver in np.flatnonzero((placement == busiest) & (current > least)).tolist()
            for taker in np.flatnonzero(placement != busiest).tolist()
        ]
        if not moves:
            break
        options = np.repeat(current[None], len(moves), axis=0)
        for option, (giver, taker) in zip(options, moves, strict=True):
            option[giver] -= 1
            option[taker] += 1
        scores = _score(loads, options)
        pick = min(range(len(moves)), key=scores.__getitem__)
        if scores[pick] >= score:
            break
        current, score = options[pick], scores[pick]
    return tuple(current.tolist())


def _score(loads: KindLoads, splits: IntArray) -> list[tuple[float, float]]:
    """The busiest device of each split, then how unequal the devices are."""
    devices = loads.of_devices(splits)
    busiest = [float(f"{most:.12g}") for most in devices.max(axis=1).tolist()]
    return list(zip(busiest, (devices**2).sum(axis=1).tolist(), strict=True))
