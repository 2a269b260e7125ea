"""Moves of one action within its device's list: where it may go, what that would cost, and doing it.

Only an action that moves past an end of its block (a run of one device's actions on a critical path) can
shorten the path (Balas and Vazacopoulos 1998). Moves are ranked by the longest path through what they
touch, with heads and tails of the current order, and never exceed the memory cap.
"""

import numpy as np

from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.kernel import compiled
from quartet_plugin.schedule.search.shop import (
    ActionTable,
    JobShop,
    arrival,
    settle,
    successor_tail,
    time_orders,
)

REACH = 16
_BLOCKS = 8


@compiled
def latest_left(
    i: int, low: int, seq: IntArray, num_stages: int, m: int, duration: FloatArray, head: FloatArray
) -> int:
    """The leftmost position >= low before which the action at i may go without a cycle."""
    x = seq[i]
    row = 3 * m
    slot = x % 3
    stage = x // row
    first = -1.0
    if slot == 0:
        if stage > 0:
            first = head[x - row]
    else:
        first = head[x - 1]
        if slot == 1 and stage < num_stages - 1:
            first = max(first, head[x + row])
    j = i
    while j > low and head[seq[j - 1]] + duration[seq[j - 1]] > first:
        # A needed action that is itself on this device is not passed.
        y = seq[j - 1]
        if y == x - 1 and slot > 0:
            break
        if slot == 0 and stage > 0 and y == x - row:
            break
        if slot == 1 and stage < num_stages - 1 and y == x + row:
            break
        j -= 1
    return j


@compiled
def latest_right(
    i: int,
    high: int,
    seq: IntArray,
    num_stages: int,
    m: int,
    has_w: IntArray,
    duration: FloatArray,
    head: FloatArray,
) -> int:
    """The rightmost position <= high after which the action at i may go without a cycle."""
    x = seq[i]
    row = 3 * m
    slot = x % 3
    stage = x // row
    last = np.inf
    if slot == 0:
        last = head[x + 1] + duration[x + 1]
        if stage < num_stages - 1:
            last = min(last, head[x + row] + duration[x + row])
    elif slot == 1:
        if has_w[stage]:
            last = head[x + 1] + duration[x + 1]
        if stage > 0:
            last = min(last, head[x - row] + duration[x - row])
    j = i
    while j < high and head[seq[j + 1]] < last:
        y = seq[j + 1]
        if slot < 2 and y == x + 1:
            break
        if slot == 0 and stage < num_stages - 1 and y == x + row:
            break
        if slot == 1 and stage > 0 and y == x - row:
            break
        j += 1
    return j


@compiled
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


@compiled
def path_through(
    i: int,
    j: int,
    seq: IntArray,
    begin: int,
    end: int,
    num_stages: int,
    m: int,
    send: FloatArray,
    has_w: IntArray,
    duration: FloatArray,
    head: FloatArray,
    tail: FloatArray,
    moved: IntArray,
    old_head: FloatArray,
    old_tail: FloatArray,
) -> float:
    """Estimate the makespan after moving i to j: the longest path through the actions that shift.

    Heads and tails of the segment are overwritten while it is walked, and restored.
    """
    low, high = min(i, j), max(i, j)
    size = high - low + 1
    for k in range(size):
        moved[k] = seq[low + k]
    shift_action(moved[:size], i - low, j - low)
    for k in range(size):
        old_head[k] = head[moved[k]]
        old_tail[k] = tail[moved[k]]
    now = 0.0
    if low > begin:
        y = seq[low - 1]
        now = head[y] + duration[y]
    for k in range(size):
        x = moved[k]
        head[x] = max(now, arrival(x, num_stages, m, send, duration, head))
        now = head[x] + duration[x]
    after = 0.0
    if high + 1 < end:
        y = seq[high + 1]
        after = duration[y] + tail[y]
    longest = 0.0
    for k in range(size - 1, -1, -1):
        x = moved[k]
        tail[x] = max(after, successor_tail(x, num_stages, m, send, has_w, duration, tail))
        after = duration[x] + tail[x]
        longest = max(longest, head[x] + after)
    for k in range(size):
        head[moved[k]] = old_head[k]
        tail[moved[k]] = old_tail[k]
    return longest


@compiled
def fits_memory(i: int, j: int, seq: IntArray, delta: FloatArray, level: FloatArray, cap: float) -> bool:
    """Whether memory stays below `cap` when i moves to j; `level` [position] is memory after each action."""
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


@compiled
def try_shift(shop: JobShop, now: ActionTable, i: int, j: int) -> bool:
    """Move i to j and time the order anew; undone, and False, if that deadlocks."""
    shift_action(now.seq, i, j)
    if time_orders(shop, now):
        settle(shop, now, min(i, j), max(i, j))
        return True
    shift_action(now.seq, j, i)
    time_orders(shop, now)
    return False


@compiled
def farthest(shop: JobShop, now: ActionTable, i: int, first: int, last: int, left: bool) -> int:
    """Where the action at i may go within its block towards one end; i itself if nowhere."""
    if left:
        j = latest_left(i, first, now.seq, shop.num_stages, shop.m, shop.duration, now.head)
    else:
        j = latest_right(i, last, now.seq, shop.num_stages, shop.m, shop.has_w, shop.duration, now.head)
    limit = shop.cap[shop.device_at[i]]
    while j != i and not fits_memory(i, j, now.seq, shop.delta, now.level, limit):
        j += 1 if left else -1
    return j


@compiled
def best_move(
    shop: JobShop,
    now: ActionTable,
    blocks: IntArray,
    count: int,
    tabu: IntArray,
    step: int,
    best: float,
    eps: float,
) -> tuple[int, int]:
    """The move of lowest estimate out of some blocks, picked at random among equals; (-1, -1) if none."""
    moved = np.empty(2 * REACH + 2, dtype=np.int64)
    scratch = np.empty((2, 2 * REACH + 2))
    chosen = (-1, -1)
    lowest = np.inf
    ties = 0
    for b in range(count):
        if np.random.random() * count > _BLOCKS:
            continue
        first = blocks[b, 0]
        last = blocks[b, 1]
        d = shop.device_at[first]
        for turn in range(2 * min(REACH, last - first)):
            left = turn % 2 == 0
            i = first + 1 + turn // 2 if left else last - 1 - turn // 2
            j = farthest(shop, now, i, first, last, left)
            if j == i:
                continue
            estimate = path_through(
                i,
                j,
                now.seq,
                shop.offsets[d],
                shop.offsets[d + 1],
                shop.num_stages,
                shop.m,
                shop.send,
                shop.has_w,
                shop.duration,
                now.head,
                now.tail,
                moved,
                scratch[0],
                scratch[1],
            )
            if (tabu[now.seq[i]] > step and estimate >= best - eps) or estimate > lowest + eps:
                continue
            ties = ties + 1 if estimate >= lowest - eps else 1
            lowest = min(lowest, estimate)
            if np.random.randint(0, ties) == 0:
                chosen = (i, j)
    return chosen
