"""The splits that a cheap bound does not rule out, listed one by one."""

from collections.abc import Sequence

import numpy as np

from quartet_plugin.model.costs import Costs, FloatArray, IntArray
from quartet_plugin.schedule.bound_program import Entries, entries
from quartet_plugin.schedule.compilation import compiled

MAX_NODES = 2_000_000


def promising_splits(
    costs: Costs, *, placement: Sequence[int], below_s: float, allow_empty: bool, max_splits: int
) -> list[tuple[int, ...]] | None:
    """All splits in which no device's first arrival plus load reaches `below_s` seconds, or None if too many.

    Stage 0 holds an embedding entry and the last stage a head entry; no stage is empty unless `allow_empty`.
    """
    device = np.asarray(placement, dtype=np.int64)
    listed: Entries = entries(costs)
    forward = np.concatenate(([0.0], np.cumsum(listed.f_s)))
    load = np.concatenate(([0.0], np.cumsum(listed.load_s)))
    least = np.full(len(device), 0 if allow_empty else 1, dtype=np.int64)
    if costs.has_embedding:
        least[0] = 1
    if costs.has_head:
        least[-1] = max(least[-1], 1)
    send = np.append(costs.transfer_s[device[:-1], device[1:]], 0.0)
    found = np.zeros((max_splits + 1, len(device)), dtype=np.int64)
    num, finished = _list_splits(
        device, costs.device_slowdown, send, forward, load, least, costs.num_microbatches, below_s, found
    )
    if not finished or num > max_splits:
        return None
    return [tuple(row) for row in found[:num].tolist()]


@compiled
def _list_splits(
    device: IntArray,
    slowdown: FloatArray,
    send: FloatArray,
    forward: FloatArray,
    load: FloatArray,
    least: IntArray,
    m: int,
    below_s: float,
    found: IntArray,
) -> tuple[int, bool]:
    """Depth first over the stages' ends; fills `found`, returns how many and whether that is all of them."""
    stages, total = len(device), len(forward) - 1
    after = np.zeros(stages + 1, dtype=np.int64)  # entries that later stages need at least
    for s in range(stages - 1, -1, -1):
        after[s] = after[s + 1] + least[s]
    begin = np.zeros(stages + 1, dtype=np.int64)
    end = np.zeros(stages, dtype=np.int64)
    arrival = np.zeros(stages + 1)
    busy = np.zeros(stages)
    num, nodes, s = 0, 0, 0
    end[0] = (total if stages == 1 else least[0]) - 1
    while s >= 0:
        end[s] += 1
        nodes += 1
        if nodes > MAX_NODES:
            return num, False
        if end[s] + after[s + 1] > total:
            s -= 1
            continue
        d = device[s]
        work, first = (load[end[s]] - load[begin[s]]) * slowdown[d], arrival[s]
        for u in range(s - 1, -1, -1):
            if device[u] == d:
                work += busy[u]
                first = arrival[u]
        if first + m * work >= below_s:
            s -= 1
            continue
        busy[s] = (load[end[s]] - load[begin[s]]) * slowdown[d]
        if s == stages - 1:
            if end[s] == total:
                if num == len(found):
                    return num, False
                for u in range(stages):
                    found[num, u] = end[u] - begin[u]
                num += 1
            continue
        arrival[s + 1] = arrival[s] + (forward[end[s]] - forward[begin[s]]) * slowdown[d] + send[s]
        s += 1
        begin[s] = end[s - 1]
        end[s] = (total if s == stages - 1 else begin[s] + least[s]) - 1
    return num, True
