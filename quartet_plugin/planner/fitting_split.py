"""A split near another one whose pipeline ranks fit in memory, for `quartet plan` and `quartet layout`.

Layers go one by one from the rank that is most over its memory to the rank with the least to do of those that
have room for one more.
"""

from collections.abc import Callable, Sequence

import numpy as np

from quartet_plugin.cost.iteration.orders import stages_of_devices
from quartet_plugin.cost.memory import memory_by_device
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.split.layers import EndLoads

# Rounds of moving layers and computing the memory of the result: of equal layers with a stage a rank one
# round moves all of them, because a rank's bytes grow by the same for each.
MAX_ROUNDS = 8


def fitting_split(
    start: tuple[int, ...], *, run_of: Callable[[tuple[int, ...]], TrainingRun], end_loads: EndLoads
) -> tuple[int, ...] | None:
    """`start` with the layers moved that do not fit; None where no split near it fits.

    `run_of` makes the run of a split of any number of layers. `end_loads` count the work of the ranks with
    embedding and head. Only the first and the last stage may end up empty, and of a hybrid model none. A last
    stage that has the head alone stays empty, and the one before it may end up empty.
    """
    split, layer_bytes = start, None
    for _ in range(MAX_ROUNDS):
        run = run_of(split)
        total_bytes, available_bytes = _rank_bytes(run)
        if (total_bytes <= available_bytes).all():
            return split
        stages = stages_of_devices(run)
        if layer_bytes is None:
            layer_bytes = _layer_bytes(split, run, total_bytes, run_of) / [len(held) for held in stages]
        excess_bytes, fewest = total_bytes - available_bytes, int(bool(run.kinds))
        # The last stage may have the head alone.
        num_stages = len(split) - run.is_mtp_before_last
        able = [[stage for stage in held if stage < num_stages] for held in stages]
        moved = _moved(split, able, excess_bytes, layer_bytes, end_loads, fewest_of_ends=fewest)
        if moved is None:
            return None
        split = moved
    return None


def _layer_bytes(
    split: tuple[int, ...],
    run: TrainingRun,
    total_bytes: FloatArray,
    run_of: Callable[[tuple[int, ...]], TrainingRun],
) -> FloatArray:
    """Bytes that one layer more in each of its stages adds to each pipeline rank [pp].

    `total_bytes` [pp] are those of `run`, which has `split`. Of a hybrid model the layer is the mean one.
    """
    num_added = 1
    if run.kinds:
        # A run with more layers than the pattern has mean layers: only two of these can be compared.
        num_added = 2
        total_bytes, _ = _rank_bytes(run_of(tuple(count + 1 for count in split)))
    more_bytes, _ = _rank_bytes(run_of(tuple(count + num_added for count in split)))
    more: FloatArray = more_bytes - total_bytes
    return more


def _rank_bytes(run: TrainingRun) -> tuple[FloatArray, FloatArray]:
    """The bytes of each pipeline rank at its peak, and those that it has."""
    ranks = memory_by_device(run)
    return np.array([rank.total_bytes for rank in ranks]), np.array([rank.available_bytes for rank in ranks])


def _moved(
    split: tuple[int, ...],
    stages: Sequence[Sequence[int]],
    excess_bytes: FloatArray,
    layer_bytes: FloatArray,
    end_loads: EndLoads,
    *,
    fewest_of_ends: int,
) -> tuple[int, ...] | None:
    """The split after moves by which no rank is over its memory; None where there are no such moves.

    `stages` are those of each rank that may have layers, `excess_bytes` a rank's bytes over its memory,
    `layer_bytes` those of one of its layers.
    """
    counts, excess, last = list(split), excess_bytes.copy(), max(stage for held in stages for stage in held)
    loads = np.array([float(sum(counts[stage] for stage in held)) for held in stages])
    last_load = end_loads.head if end_loads.mtp is None else end_loads.mtp
    for stage, load in ((0, end_loads.embedding), (last, last_load)):
        loads[next(rank for rank, held in enumerate(stages) if stage in held)] += load
    while excess.max() > 0.0:
        giver = int(excess.argmax())
        able = [s for s in stages[giver] if counts[s] > (fewest_of_ends if s in (0, last) else 1)]
        has_room = np.flatnonzero(excess + layer_bytes <= 0.0).tolist()
        takers = [rank for rank in has_room if rank != giver and stages[rank]]
        if not able or not takers:
            return None
        taker = min(takers, key=lambda rank: (loads[rank], excess[rank]))
        counts[max(able, key=lambda stage: counts[stage])] -= 1
        counts[min(stages[taker], key=lambda stage: counts[stage])] += 1
        for rank, change in ((giver, -1.0), (taker, 1.0)):
            loads[rank] += change
            excess[rank] += change * layer_bytes[rank]
    return tuple(counts)
