"""One critical path of a timed order, as blocks: runs of one device's actions on it."""

import numpy as np

from quartet_plugin.model.costs import IntArray
from quartet_plugin.schedule.kernel import compiled
from quartet_plugin.schedule.search.shop import ActionTable, JobShop


@compiled
def last_critical(shop: JobShop, now: ActionTable, makespan: float, eps: float) -> int:
    """One of the actions that end last, picked at random."""
    chosen = -1
    ends = 0
    for d in range(len(shop.offsets) - 1):
        if shop.offsets[d + 1] > shop.offsets[d]:
            y = now.seq[shop.offsets[d + 1] - 1]
            if now.head[y] + shop.duration[y] >= makespan - eps:
                ends += 1
                if np.random.randint(0, ends) == 0:
                    chosen = y
    return chosen


@compiled
def critical_before(shop: JobShop, now: ActionTable, x: int, eps: float) -> int:
    """One of the actions that x had to wait for, picked at random; -1 if none."""
    row = 3 * shop.m
    slot = x % 3
    stage = x // row
    begin = now.head[x] - eps
    k = now.position[x]
    options = (
        now.seq[k - 1] if k > shop.offsets[shop.device_at[k]] else -1,
        x - 1 if slot > 0 else (x - row if stage > 0 else -1),
        x + row if slot == 1 and stage < shop.num_stages - 1 else -1,
    )
    chosen = -1
    found = 0
    for which in range(3):
        y = options[which]
        if y < 0:
            continue
        lag = 0.0
        if which == 1 and slot == 0:
            lag = shop.send[0, stage - 1]
        elif which == 2:
            lag = shop.send[1, stage + 1]
        if now.head[y] + shop.duration[y] + lag >= begin:
            found += 1
            if np.random.randint(0, found) == 0:
                chosen = y
    return chosen


@compiled
def critical_blocks(shop: JobShop, now: ActionTable, makespan: float, eps: float, blocks: IntArray) -> int:
    """Fill `blocks` [n, 2] with first and last positions of one critical path's blocks; their number."""
    x = last_critical(shop, now, makespan, eps)
    count = 0
    last = now.position[x]
    first = last
    while now.head[x] > eps:
        x = critical_before(shop, now, x, eps)
        if x < 0:
            break
        k = now.position[x]
        if k == first - 1 and shop.device_at[k] == shop.device_at[first]:
            first = k
            continue
        if last > first:
            blocks[count, 0] = first
            blocks[count, 1] = last
            count += 1
        first = k
        last = k
    if last > first:
        blocks[count, 0] = first
        blocks[count, 1] = last
        count += 1
    return count
