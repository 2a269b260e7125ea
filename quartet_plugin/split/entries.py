"""Axis 2: how many entries of the cost table each stage holds.

Entries count `Costs.layers`, embedding and head included, one number a stage in model order. Stage 0 holds
the embedding and the last stage the head; a stage is empty when it holds no entry at all.
"""

from collections.abc import Sequence

import numpy as np

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.costs import Costs, FloatArray, IntArray
from quartet_plugin.split.layers import entries_of, even_split

type Entries = tuple[int, ...]


def even_entries(costs: Costs, num_stages: int, *, allow_empty: bool = False) -> Entries:
    """The entries of the even split. Raises ConfigError for an empty stage unless `allow_empty`."""
    layers = even_split(costs.num_transformer_layers, num_stages=num_stages)
    entries = entries_of(layers, embedding=costs.has_embedding, head=costs.has_head)
    return check_entries(costs, entries, num_stages=num_stages, allow_empty=allow_empty)


def check_entries(
    costs: Costs, counts: Sequence[int], *, num_stages: int, allow_empty: bool = False
) -> Entries:
    """Return `counts` as a tuple; raises ConfigError unless they share out the table's entries legally."""
    entries = tuple(counts)
    if len(entries) != num_stages:
        raise ConfigError(f"split: {len(entries)} counts for {num_stages} stages; give one a stage")
    if min(entries) < 0 or sum(entries) != len(costs.layers):
        raise ConfigError(
            f"split: {','.join(map(str, entries[:16]))} sums to {sum(entries)}; the counts must be >= 0 and "
            f"sum to the {len(costs.layers)} layers, embedding and head included"
        )
    least = minimum_entries(costs, num_stages, allow_empty=allow_empty)
    for stage, (count, needed) in enumerate(zip(entries, least, strict=True)):
        if count < needed:
            special = {0: costs.has_embedding and "embedding", num_stages - 1: costs.has_head and "head"}
            name = special.get(stage)
            rule = (
                f"it must hold the {name}" if name else "use fewer chunks, or --allow-empty (simulate-only)"
            )
            raise ConfigError(f"split: stage {stage} is empty; {rule}")
    return entries


def minimum_entries(costs: Costs, num_stages: int, *, allow_empty: bool) -> Entries:
    """The fewest entries each stage may hold."""
    least = [0 if allow_empty else 1] * num_stages
    least[0] = max(least[0], int(costs.has_embedding))
    least[-1] = max(least[-1], int(costs.has_head))
    if num_stages == 1:
        least[0] = len(costs.layers)
    return tuple(least)


def work_of_entries(costs: Costs) -> FloatArray:
    """Compute of one microbatch in each entry at slowdown 1, in seconds [len(layers)]."""
    split_backward = np.array([x.forward_s + x.input_grad_s + x.weight_grad_s for x in costs.layers])
    if costs.backward_fused_s is None:
        return split_backward
    full_backward = np.array([x.forward_s for x in costs.layers]) + np.array(costs.backward_fused_s)
    best: FloatArray = np.minimum(split_backward, full_backward)
    return best


def device_loads(costs: Costs, placement: Sequence[int], entries: Sequence[int]) -> FloatArray:
    """Compute of one microbatch on each device, in seconds [num_devices]."""
    loads: FloatArray = _loads_of(costs, placement, np.array([entries]))[0]
    return loads


def _loads_of(costs: Costs, placement: Sequence[int], splits: IntArray) -> FloatArray:
    """The device loads of each of `splits` [num_splits, num_stages]: [num_splits, num_devices]."""
    edges = np.zeros((len(splits), len(placement) + 1), dtype=np.int64)
    np.cumsum(splits, axis=1, out=edges[:, 1:])
    total = np.concatenate(([0.0], np.cumsum(work_of_entries(costs))))
    stages = np.diff(total[edges], axis=1) * costs.device_slowdown[list(placement)]
    loads = np.zeros((len(splits), costs.num_devices))
    for stage, device in enumerate(placement):
        loads[:, device] += stages[:, stage]
    return loads


def balanced_entries(costs: Costs, placement: Sequence[int], *, allow_empty: bool = False) -> Entries:
    """The entries that minimise the busiest device's compute under the cost table.

    The result is exact with one stage a device. With several, entries are dealt to the device that would be
    least busy and then improved by single moves. Raises ConfigError for more stages than entries.
    """
    num_stages = len(placement)
    least = minimum_entries(costs, num_stages, allow_empty=allow_empty)
    if sum(least) > len(costs.layers):
        raise ConfigError(
            f"{num_stages} stages for {len(costs.layers)} layers; use fewer chunks, or --allow-empty"
        )
    if num_stages == costs.num_devices:
        return _exact(costs, placement, least)
    return _improve(costs, placement, _shared(costs, placement, least), least)


def _exact(costs: Costs, placement: Sequence[int], least: Sequence[int]) -> Entries:
    """The minimal maximum over contiguous runs, by dynamic programming in O(stages * entries^2)."""
    work = np.concatenate(([0.0], np.cumsum(work_of_entries(costs))))
    num_layers, num_stages = len(work) - 1, len(placement)
    best = np.full((num_stages + 1, num_layers + 1), np.inf)
    best[0, 0] = 0.0
    ends, starts = np.indices((num_layers + 1, num_layers + 1))
    choice = np.zeros((num_stages + 1, num_layers + 1), dtype=np.int64)
    for stage in range(num_stages):
        slow = float(costs.device_slowdown[placement[stage]])
        top = np.maximum(best[stage], (work[:, None] - work) * slow)
        # A stage that ends at an entry starts at least its fewest entries before.
        top[starts > ends - least[stage]] = np.inf
        choice[stage + 1] = top.argmin(axis=1)
        best[stage + 1] = top.min(axis=1)
    counts, end = [], num_layers
    for stage in range(num_stages, 0, -1):
        start = int(choice[stage, end])
        counts.append(end - start)
        end = start
    return tuple(reversed(counts))


def _shared(costs: Costs, placement: Sequence[int], least: Sequence[int]) -> Entries:
    """Entries dealt one by one to the device that would be least busy, to its smallest stage."""
    num_stages, slow = len(placement), costs.device_slowdown.tolist()
    counts = list(least)
    work = work_of_entries(costs)
    mean = float(work[1:-1].mean()) if len(costs.layers) > 2 else 1.0
    # Embedding and head have costs of their own; all other entries count as the mean.
    extra = [0.0] * num_stages
    extra[0] += float(work[0]) - mean if costs.has_embedding else 0.0
    extra[-1] += float(work[-1]) - mean if costs.has_head else 0.0
    stages_of = [[s for s in range(num_stages) if placement[s] == d] for d in range(costs.num_devices)]
    order: list[tuple[float, int, int]] = [(0.0, 0, 0)] * num_stages

    def reorder(device: int) -> None:
        load = sum((counts[s] * mean + extra[s]) * slow[device] for s in stages_of[device])
        after = round(load + mean * slow[device], 9)
        for s in stages_of[device]:
            order[s] = (after, counts[s], s)

    for device in range(costs.num_devices):
        reorder(device)
    for _ in range(len(costs.layers) - sum(counts)):
        stage = min(order)[2]
        counts[stage] += 1
        reorder(placement[stage])
    return tuple(counts)


def _improve(costs: Costs, placement: Sequence[int], entries: Entries, least: Sequence[int]) -> Entries:
    """The entries after moving single ones from the busiest device while that lowers the score."""
    current = entries
    score = _scores(_loads_of(costs, placement, np.array([current])))[0]
    for _ in range(4 * len(costs.layers)):
        busiest = int(np.argmax(device_loads(costs, placement, current)))
        options = [
            move(current, source, target)
            for source in range(len(placement))
            if placement[source] == busiest and current[source] > least[source]
            for target in range(len(placement))
            if placement[target] != busiest
        ]
        if not options:
            break
        scores = _scores(_loads_of(costs, placement, np.array(options)))
        pick = min(range(len(options)), key=lambda k: scores[k])
        if scores[pick] >= score:
            break
        current, score = options[pick], scores[pick]
    return current


def _scores(loads: FloatArray) -> list[tuple[float, float]]:
    """The score of each split by its device loads [num_splits, num_devices]: the busiest, then the spread."""
    busiest = [round(most, 12) for most in loads.max(axis=1).tolist()]
    return list(zip(busiest, (loads**2).sum(axis=1).tolist(), strict=True))


def move(entries: Entries, source: int, target: int) -> Entries:
    """The entries with one fewer on stage `source` and one more on `target`; runs between them shift."""
    counts = list(entries)
    counts[source] -= 1
    counts[target] += 1
    return tuple(counts)
