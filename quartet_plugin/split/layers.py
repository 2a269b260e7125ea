"""Axis 2: how many entries of the cost table each stage holds.

A split counts entries of `Costs.layers`, embedding and head included, one number a stage in model order.
Stage 0 holds the embedding and the last stage the head; a stage is empty when it holds no entry at all.
"""

from collections.abc import Sequence

import numpy as np

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.costs import Costs, FloatArray

Split = tuple[int, ...]


def even_split(costs: Costs, num_stages: int, *, allow_empty: bool = False) -> Split:
    """Stage s gets floor((s+1) L / S) - floor(s L / S) transformer layers, the ends their extra entries.

    Raises ConfigError for an empty stage unless `allow_empty`.
    """
    layers = costs.num_transformer_layers
    counts = [(s + 1) * layers // num_stages - s * layers // num_stages for s in range(num_stages)]
    counts[0] += costs.has_embedding
    counts[-1] += costs.has_head
    return check_split(costs, counts, num_stages=num_stages, allow_empty=allow_empty)


def check_split(costs: Costs, counts: Sequence[int], *, num_stages: int, allow_empty: bool = False) -> Split:
    """Return `counts` as a tuple; raises ConfigError unless it is a legal split of the table's entries."""
    split = tuple(counts)
    if len(split) != num_stages:
        raise ConfigError(f"split: {len(split)} counts for {num_stages} stages; give one a stage")
    if min(split) < 0 or sum(split) != len(costs.layers):
        raise ConfigError(
            f"split: {','.join(map(str, split[:16]))} sums to {sum(split)}; the counts must be >= 0 and sum "
            f"to the {len(costs.layers)} layers, embedding and head included"
        )
    least = minimum_counts(costs, num_stages, allow_empty=allow_empty)
    for stage, (count, needed) in enumerate(zip(split, least, strict=True)):
        if count < needed:
            special = {0: costs.has_embedding and "embedding", num_stages - 1: costs.has_head and "head"}
            name = special.get(stage)
            rule = (
                f"it must hold the {name}" if name else "use fewer chunks, or --allow-empty (simulate-only)"
            )
            raise ConfigError(f"split: stage {stage} is empty; {rule}")
    return split


def minimum_counts(costs: Costs, num_stages: int, *, allow_empty: bool) -> Split:
    """The fewest entries each stage may hold."""
    least = [0 if allow_empty else 1] * num_stages
    least[0] = max(least[0], int(costs.has_embedding))
    least[-1] = max(least[-1], int(costs.has_head))
    if num_stages == 1:
        least[0] = len(costs.layers)
    return tuple(least)


def work_of_layers(costs: Costs) -> FloatArray:
    """Seconds of all compute of one microbatch, an entry at slowdown 1 [len(layers)]."""
    split = np.array([x.forward_s + x.input_grad_s + x.weight_grad_s for x in costs.layers])
    if costs.backward_fused_s is None:
        return split
    whole = np.array([x.forward_s for x in costs.layers]) + np.array(costs.backward_fused_s)
    best: FloatArray = np.minimum(split, whole)
    return best


def device_loads(costs: Costs, placement: Sequence[int], split: Sequence[int]) -> FloatArray:
    """Seconds of compute a microbatch on each device [num_devices]."""
    edges = np.concatenate(([0], np.cumsum(split)))
    total = np.concatenate(([0.0], np.cumsum(work_of_layers(costs))))
    stages = (total[edges[1:]] - total[edges[:-1]]) * costs.device_slowdown[list(placement)]
    loads: FloatArray = np.bincount(list(placement), weights=stages, minlength=costs.num_devices)
    return loads


def balanced_split(costs: Costs, placement: Sequence[int], *, allow_empty: bool = False) -> Split:
    """A split whose busiest device is as little busy as can be found; exact with one stage a device.

    Several stages a device: a device's amount of layers comes from the exact split of its merged stages,
    is shared evenly among its chunks, and then improved by single moves. Raises ConfigError when there
    are more stages than entries.
    """
    num_stages = len(placement)
    least = minimum_counts(costs, num_stages, allow_empty=allow_empty)
    if sum(least) > len(costs.layers):
        raise ConfigError(
            f"{num_stages} stages for {len(costs.layers)} layers; use fewer chunks, or --allow-empty"
        )
    if num_stages == costs.num_devices:
        return _exact(costs, placement, least)
    return _improve(costs, placement, _shared(costs, placement, least), least)


def _exact(costs: Costs, placement: Sequence[int], least: Sequence[int]) -> Split:
    """Min-max over contiguous runs by dynamic programming, O(stages * layers^2)."""
    work = np.concatenate(([0.0], np.cumsum(work_of_layers(costs))))
    num_layers, num_stages = len(work) - 1, len(placement)
    best = np.full((num_stages + 1, num_layers + 1), np.inf)
    best[0, 0] = 0.0
    choice = np.zeros((num_stages + 1, num_layers + 1), dtype=np.int64)
    for stage in range(num_stages):
        slow = float(costs.device_slowdown[placement[stage]])
        for end in range(least[stage], num_layers + 1):
            starts = np.arange(0, end - least[stage] + 1)
            top = np.maximum(best[stage, starts], (work[end] - work[starts]) * slow)
            pick = int(np.argmin(top))
            best[stage + 1, end], choice[stage + 1, end] = top[pick], pick
    counts, end = [], num_layers
    for stage in range(num_stages, 0, -1):
        start = int(choice[stage, end])
        counts.append(end - start)
        end = start
    return tuple(reversed(counts))


def _shared(costs: Costs, placement: Sequence[int], least: Sequence[int]) -> Split:
    """Give layers one by one to the device that would be least busy, to its smallest stage."""
    num_stages = len(placement)
    counts = list(least)
    mean = float(work_of_layers(costs)[1:-1].mean()) if len(costs.layers) > 2 else 1.0
    for _ in range(len(costs.layers) - sum(counts)):
        loads = _loads_by_count(costs, placement, counts, mean)
        after = [
            loads[placement[s]] + mean * float(costs.device_slowdown[placement[s]]) for s in range(num_stages)
        ]
        counts[min(range(num_stages), key=lambda s: (round(after[s], 9), counts[s], s))] += 1
    return tuple(counts)


def _loads_by_count(
    costs: Costs, placement: Sequence[int], counts: Sequence[int], mean: float
) -> list[float]:
    """Loads while only counts are known: every entry costs `mean`, the ends their own special entries."""
    work = work_of_layers(costs)
    loads = [0.0] * costs.num_devices
    for stage, device in enumerate(placement):
        extra = 0.0
        if stage == 0 and costs.has_embedding:
            extra += float(work[0]) - mean
        if stage == len(placement) - 1 and costs.has_head:
            extra += float(work[-1]) - mean
        loads[device] += (counts[stage] * mean + extra) * float(costs.device_slowdown[device])
    return loads


def _improve(costs: Costs, placement: Sequence[int], split: Split, least: Sequence[int]) -> Split:
    """Move single layers from the busiest device while that lowers the sorted loads."""
    current = split
    score = _score(costs, placement, current)
    for _ in range(4 * len(costs.layers)):
        busiest = int(np.argmax(device_loads(costs, placement, current)))
        options = [
            moved
            for source in range(len(placement))
            if placement[source] == busiest and current[source] > least[source]
            for target in range(len(placement))
            if placement[target] != busiest
            for moved in (move(current, source, target),)
        ]
        if not options:
            break
        scores = [_score(costs, placement, option) for option in options]
        pick = min(range(len(options)), key=lambda k: scores[k])
        if scores[pick] >= score:
            break
        current, score = options[pick], scores[pick]
    return current


def _score(costs: Costs, placement: Sequence[int], split: Split) -> tuple[float, float]:
    loads = device_loads(costs, placement, split)
    return round(float(loads.max()), 12), float((loads**2).sum())


def move(split: Split, source: int, target: int) -> Split:
    """One entry fewer on stage `source`, one more on `target`; the runs between shift by one."""
    counts = list(split)
    counts[source] -= 1
    counts[target] += 1
    return tuple(counts)
