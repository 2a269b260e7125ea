"""Moves of an action within its device's list: legal positions, the estimated makespan, and the move itself.

Only an action that moves past an end of its block (a run of one device's actions on a critical path) can
shorten the path (Balas and Vazacopoulos 1998). Moves are ranked by the longest path through the actions
they shift, with heads and tails of the current order, and never exceed the memory cap.
"""

import numpy as np

from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.compilation import inlined, inner
from quartet_plugin.schedule.search.job_shop import (
    ActionTable,
    JobShop,
    arrival,
    successor_tail,
    update_heads,
    update_positions,
)

REACH = 16
_BLOCKS = 8


@inlined
def latest_left(shop: JobShop, table: ActionTable, i: int, low: int) -> int:
    """The leftmost position >= low before which the action at i may go without a cycle."""
    seq, head, duration = table.seq, table.head, shop.duration
    x = seq[i]
    row = 3 * shop.num_microbatches
    slot = x % 3
    stage = x // row
    # What it needs: of its own stage and microbatch, and of a neighbouring stage.
    before = x - 1 if slot > 0 else -1
    neighbour = -1
    if slot == 0 and stage > 0:
        neighbour = x - row
    elif slot == 1 and stage < shop.num_stages - 1:
        neighbour = x + row
    first = -1.0
    if before >= 0:
        first = head[before]
    if neighbour >= 0:
        first = max(first, head[neighbour])
    j = i
    while j > low and head[seq[j - 1]] + duration[seq[j - 1]] > first:
        # A needed action that is itself on this device is not passed.
        y = seq[j - 1]
        if y in (before, neighbour):
            break
        j -= 1
    return j


@inlined
def latest_right(shop: JobShop, table: ActionTable, i: int, high: int) -> int:
    """The rightmost position <= high after which the action at i may go without a cycle."""
    seq, head, duration = table.seq, table.head, shop.duration
    x = seq[i]
    row = 3 * shop.num_microbatches
    slot = x % 3
    stage = x // row
    # What needs it: of its own stage and microbatch, and of a neighbouring stage.
    behind = x + 1 if slot == 0 or (slot == 1 and shop.has_w[stage]) else -1
    neighbour = -1
    if slot == 0 and stage < shop.num_stages - 1:
        neighbour = x + row
    elif slot == 1 and stage > 0:
        neighbour = x - row
    last = np.inf
    if behind >= 0:
        last = head[behind] + duration[behind]
    if neighbour >= 0:
        last = min(last, head[neighbour] + duration[neighbour])
    j = i
    while j < high and head[seq[j + 1]] < last:
        y = seq[j + 1]
        if y in (behind, neighbour):
            break
        j += 1
    return j


@inner
def shift_action(seq: IntArray, i: int, j: int) -> None:
    """Move the action at position i to position j."""
    x = seq[i]
    if i < j:
        for k in range(i, j):
            seq[k] = seq[k + 1]
    else:
        for k in range(i, j, -1):
            seq[k] = seq[k - 1]
    seq[j] = x


@inlined
def path_through(
    shop: JobShop, table: ActionTable, i: int, j: int, moved: IntArray, old_times: FloatArray
) -> float:
    """Estimate the makespan after moving i to j: the longest path through the actions that shift.

    Heads and tails of the segment are overwritten while it is walked, and restored. `moved` [n] and
    `old_times` [2, n] are room for its actions.
    """
    seq, head, tail = table.seq, table.head, table.tail
    num_stages, row = shop.num_stages, 3 * shop.num_microbatches
    send, has_w, duration = shop.send, shop.has_w, shop.duration
    d = shop.device_of[i]
    low, high = min(i, j), max(i, j)
    size = high - low + 1
    for k in range(size):
        moved[k] = seq[low + k]
    shift_action(moved[:size], i - low, j - low)
    for k in range(size):
        old_times[0, k] = head[moved[k]]
        old_times[1, k] = tail[moved[k]]
    now = 0.0
    if low > shop.offsets[d]:
        y = seq[low - 1]
        now = head[y] + duration[y]
    for k in range(size):
        x = moved[k]
        head[x] = max(now, arrival(x, num_stages, row, send, duration, head))
        now = head[x] + duration[x]
    after = 0.0
    if high + 1 < shop.offsets[d + 1]:
        y = seq[high + 1]
        after = duration[y] + tail[y]
    longest = 0.0
    for k in range(size - 1, -1, -1):
        x = moved[k]
        tail[x] = max(after, successor_tail(x, num_stages, row, send, has_w, duration, tail))
        after = duration[x] + tail[x]
        longest = max(longest, head[x] + after)
    for k in range(size):
        head[moved[k]] = old_times[0, k]
        tail[moved[k]] = old_times[1, k]
    return longest


@inlined
def fits_memory(shop: JobShop, table: ActionTable, i: int, j: int) -> bool:
    """Whether memory stays below the device's cap when i moves to j."""
    seq, level, delta, cap = table.seq, table.level, shop.delta, shop.cap[shop.device_of[i]]
    change = delta[seq[i]]
    if j < i and change > 0.0:
        for k in range(j, i):
            if level[k] + change > cap:
                return False
        before = level[j] - delta[seq[j]]
        return bool(before + change <= cap)
    if j > i and change < 0.0:
        for k in range(i + 1, j + 1):
            if level[k] - change > cap:
                return False
    return True


@inner
def try_shift(shop: JobShop, table: ActionTable, i: int, j: int) -> bool:
    """Move i to j and time the order anew; undone, and False, if that deadlocks."""
    shift_action(table.seq, i, j)
    if update_heads(shop, table):
        update_positions(shop, table, min(i, j), max(i, j))
        return True
    shift_action(table.seq, j, i)
    update_heads(shop, table)
    return False


@inner
def farthest(shop: JobShop, table: ActionTable, i: int, first: int, last: int, left: bool) -> int:
    """Where the action at i may go within its block towards one end; i itself if nowhere."""
    j = latest_left(shop, table, i, first) if left else latest_right(shop, table, i, last)
    while j != i and not fits_memory(shop, table, i, j):
        j += 1 if left else -1
    return j


@inner
def best_move(
    shop: JobShop,
    table: ActionTable,
    blocks: IntArray,
    num_blocks: int,
    tabu: IntArray,
    step: int,
    best: float,
    eps: float,
) -> tuple[int, int]:
    """The move of lowest estimate out of some blocks, picked at random among equals; (-1, -1) if none."""
    moved = np.empty(2 * REACH + 2, dtype=np.int64)
    old_times = np.empty((2, 2 * REACH + 2))
    chosen = (-1, -1)
    lowest = np.inf
    ties = 0
    for b in range(num_blocks):
        if np.random.random() * num_blocks > _BLOCKS:
            continue
        first = blocks[b, 0]
        last = blocks[b, 1]
        for candidate in range(2 * min(REACH, last - first)):
            left = candidate % 2 == 0
            i = first + 1 + candidate // 2 if left else last - 1 - candidate // 2
            j = farthest(shop, table, i, first, last, left)
            if j == i:
                continue
            estimate = path_through(shop, table, i, j, moved, old_times)
            if (tabu[table.seq[i]] > step and estimate >= best - eps) or estimate > lowest + eps:
                continue
            ties = ties + 1 if estimate >= lowest - eps else 1
            lowest = min(lowest, estimate)
            if np.random.randint(0, ties) == 0:
                chosen = (i, j)
    return chosen
