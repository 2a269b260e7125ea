"""The compiled local search on fixed orders: move actions out of the blocks of a critical path.

A pipeline with a fixed split is a job shop: devices are machines. As there, only an action that moves past
an end of its block (a run of one device's actions on a critical path) can shorten the path (Balas and
Vazacopoulos 1998). Moves are ranked by the longest path through what they touch, with heads and tails of
the current order, taken if not tabu, and never exceed the memory cap. An action's id is `unit * 3 + slot`
with slots F, backward (I or B), W.
"""

from typing import NamedTuple

import numpy as np

from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.kernel import compiled

_REACH = 16
_BLOCKS = 8
_TOLERANCE = 1e-9


@compiled
def _run(
    seq: IntArray,
    offsets: IntArray,
    num_stages: int,
    m: int,
    placement: IntArray,
    send: FloatArray,
    duration: FloatArray,
    head: FloatArray,
    topo: IntArray,
) -> int:
    """Earliest starts `head` [id], and an order `topo` of positions; the number that ran."""
    num_devices = len(offsets) - 1
    row = 3 * m
    for k in range(len(seq)):
        head[seq[k]] = -1.0
    free = np.zeros(num_devices)
    at = offsets[:-1].copy()
    waits = np.full(num_devices, -1)
    stack = np.empty(num_devices, dtype=np.int64)
    for d in range(num_devices):
        stack[d] = num_devices - 1 - d
    height = num_devices
    ran = 0
    while height > 0:
        height -= 1
        d = stack[height]
        now = free[d]
        pos = at[d]
        stop = offsets[d + 1]
        while pos < stop:
            x = seq[pos]
            slot = x % 3
            stage = x // row
            ready = now
            if slot == 0:
                if stage > 0:
                    y = x - row
                    if head[y] < 0.0:
                        waits[d] = y
                        break
                    ready = max(ready, head[y] + duration[y] + send[0, stage - 1])
            else:
                if head[x - 1] < 0.0:
                    waits[d] = x - 1
                    break
                if slot == 1 and stage < num_stages - 1:
                    y = x + row
                    if head[y] < 0.0:
                        waits[d] = y
                        break
                    ready = max(ready, head[y] + duration[y] + send[1, stage + 1])
            head[x] = ready
            now = ready + duration[x]
            topo[ran] = pos
            ran += 1
            pos += 1
            other = -1
            if slot == 0 and stage < num_stages - 1:
                other = placement[stage + 1]
            elif slot == 1 and stage > 0:
                other = placement[stage - 1]
            if other >= 0 and other != d and waits[other] == x:
                waits[other] = -1
                stack[height] = other
                height += 1
        free[d] = now
        at[d] = pos
    return ran


@compiled
def _successor_tail(
    x: int, num_stages: int, m: int, send: FloatArray, has_w: IntArray, duration: FloatArray, tail: FloatArray
) -> float:
    """The longest way from the end of x through those that need its result."""
    row = 3 * m
    slot = x % 3
    stage = x // row
    longest = 0.0
    if slot == 0:
        longest = duration[x + 1] + tail[x + 1]
        if stage < num_stages - 1:
            longest = max(longest, send[0, stage] + duration[x + row] + tail[x + row])
    elif slot == 1:
        if has_w[stage]:
            longest = duration[x + 1] + tail[x + 1]
        if stage > 0:
            longest = max(longest, send[1, stage] + duration[x - row] + tail[x - row])
    return longest


@compiled
def _arrival(
    x: int, num_stages: int, m: int, send: FloatArray, duration: FloatArray, head: FloatArray
) -> float:
    """When all that x needs from other actions of its microbatch is there."""
    row = 3 * m
    slot = x % 3
    stage = x // row
    if slot == 0:
        if stage == 0:
            return 0.0
        return float(head[x - row] + duration[x - row] + send[0, stage - 1])
    when = float(head[x - 1] + duration[x - 1])
    if slot == 1 and stage < num_stages - 1:
        when = max(when, float(head[x + row] + duration[x + row] + send[1, stage + 1]))
    return when


@compiled
def _fill_tails(
    seq: IntArray,
    device_end: IntArray,
    topo: IntArray,
    num_stages: int,
    m: int,
    send: FloatArray,
    has_w: IntArray,
    duration: FloatArray,
    tail: FloatArray,
) -> None:
    for k in range(len(topo) - 1, -1, -1):
        pos = topo[k]
        x = seq[pos]
        longest = _successor_tail(x, num_stages, m, send, has_w, duration, tail)
        if pos + 1 < device_end[pos]:
            y = seq[pos + 1]
            longest = max(longest, duration[y] + tail[y])
        tail[x] = longest


@compiled
def _latest_left(
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
def _latest_right(
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
def _shift(seq: IntArray, i: int, j: int) -> None:
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
def _path_through(
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
    _shift(moved[:size], i - low, j - low)
    for k in range(size):
        old_head[k] = head[moved[k]]
        old_tail[k] = tail[moved[k]]
    now = 0.0
    if low > begin:
        y = seq[low - 1]
        now = head[y] + duration[y]
    for k in range(size):
        x = moved[k]
        head[x] = max(now, _arrival(x, num_stages, m, send, duration, head))
        now = head[x] + duration[x]
    after = 0.0
    if high + 1 < end:
        y = seq[high + 1]
        after = duration[y] + tail[y]
    longest = 0.0
    for k in range(size - 1, -1, -1):
        x = moved[k]
        tail[x] = max(after, _successor_tail(x, num_stages, m, send, has_w, duration, tail))
        after = duration[x] + tail[x]
        longest = max(longest, head[x] + after)
    for k in range(size):
        head[moved[k]] = old_head[k]
        tail[moved[k]] = old_tail[k]
    return longest


@compiled
def _fits(i: int, j: int, seq: IntArray, delta: FloatArray, level: FloatArray, cap: float) -> bool:
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


class Shop(NamedTuple):
    """What does not change while orders do; by id but for `placement`, `send` and `has_w` by stage."""

    offsets: IntArray
    num_stages: int
    m: int
    placement: IntArray
    send: FloatArray
    has_w: IntArray
    whole: IntArray
    duration: FloatArray
    delta: FloatArray
    cap: FloatArray
    device_at: IntArray
    device_end: IntArray


class Orders(NamedTuple):
    """An order and its times: `seq` and `level` by position, the others by id, `topo` of positions."""

    seq: IntArray
    level: FloatArray
    position: IntArray
    head: FloatArray
    tail: FloatArray
    topo: IntArray


@compiled
def _shop(
    codes: IntArray,
    offsets: IntArray,
    num_stages: int,
    m: int,
    placement: IntArray,
    cost: FloatArray,
    send: FloatArray,
    sizes: FloatArray,
    held: float,
    cap: FloatArray,
) -> Shop:
    ids = num_stages * m * 3
    duration = np.zeros(ids)
    delta = np.zeros(ids)
    has_w = np.zeros(num_stages, dtype=np.int64)
    whole = np.zeros(ids, dtype=np.int64)
    device_at = np.empty(len(codes), dtype=np.int64)
    device_end = np.empty(len(codes), dtype=np.int64)
    for d in range(len(offsets) - 1):
        device_at[offsets[d] : offsets[d + 1]] = d
        device_end[offsets[d] : offsets[d + 1]] = offsets[d + 1]
    for code in codes:
        kind = code & 3
        stage = (code >> 2) // m
        x = (code >> 2) * 3 + (1 if kind == 3 else kind)
        duration[x] = cost[kind, stage]
        if kind == 0:
            delta[x] = sizes[stage]
        elif kind == 1:
            delta[x] = -sizes[stage] * (1.0 - held)
        elif kind == 2:
            delta[x] = -sizes[stage] * held
            has_w[stage] = 1
        else:
            delta[x] = -sizes[stage]
            whole[x] = 1
    return Shop(
        offsets, num_stages, m, placement, send, has_w, whole, duration, delta, cap, device_at, device_end
    )


@compiled
def _empty_orders(codes: IntArray, num_ids: int) -> Orders:
    seq = np.empty(len(codes), dtype=np.int64)
    for k in range(len(codes)):
        kind = codes[k] & 3
        seq[k] = (codes[k] >> 2) * 3 + (1 if kind == 3 else kind)
    return Orders(
        seq,
        np.zeros(len(codes)),
        np.zeros(num_ids, dtype=np.int64),
        np.full(num_ids, -1.0),
        np.zeros(num_ids),
        np.zeros(len(codes), dtype=np.int64),
    )


@compiled
def _write(seq: IntArray, whole: IntArray, codes: IntArray) -> None:
    """Ids back to action codes."""
    for k in range(len(seq)):
        x = seq[k]
        codes[k] = x // 3 * 4 + (3 if whole[x] else x % 3)


@compiled
def _timed(shop: Shop, now: Orders) -> bool:
    """Heads of the order; False when it deadlocks."""
    ran = _run(
        now.seq,
        shop.offsets,
        shop.num_stages,
        shop.m,
        shop.placement,
        shop.send,
        shop.duration,
        now.head,
        now.topo,
    )
    return ran == len(now.seq)


@compiled
def _finish(shop: Shop, now: Orders) -> float:
    """Tails of a timed order; its makespan."""
    _fill_tails(
        now.seq,
        shop.device_end,
        now.topo,
        shop.num_stages,
        shop.m,
        shop.send,
        shop.has_w,
        shop.duration,
        now.tail,
    )
    makespan = 0.0
    for d in range(len(shop.offsets) - 1):
        if shop.offsets[d + 1] > shop.offsets[d]:
            y = now.seq[shop.offsets[d + 1] - 1]
            makespan = max(makespan, now.head[y] + shop.duration[y])
    return makespan


@compiled
def _settle(shop: Shop, now: Orders, low: int, high: int) -> None:
    """Positions and memory levels of low..high, all on one device, after a change."""
    memory = now.level[low - 1] if low > shop.offsets[shop.device_at[low]] else 0.0
    for k in range(low, high + 1):
        now.position[now.seq[k]] = k
        memory += shop.delta[now.seq[k]]
        now.level[k] = memory


@compiled
def _settle_all(shop: Shop, now: Orders) -> None:
    for d in range(len(shop.offsets) - 1):
        if shop.offsets[d + 1] > shop.offsets[d]:
            _settle(shop, now, shop.offsets[d], shop.offsets[d + 1] - 1)


@compiled
def _try_shift(shop: Shop, now: Orders, i: int, j: int) -> bool:
    """Move i to j and time the order anew; undone, and False, if that deadlocks."""
    _shift(now.seq, i, j)
    if _timed(shop, now):
        _settle(shop, now, min(i, j), max(i, j))
        return True
    _shift(now.seq, j, i)
    _timed(shop, now)
    return False


@compiled
def _last_critical(shop: Shop, now: Orders, makespan: float, eps: float) -> int:
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
def _critical_before(shop: Shop, now: Orders, x: int, eps: float) -> int:
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
def _critical_blocks(shop: Shop, now: Orders, makespan: float, eps: float, blocks: IntArray) -> int:
    """Fill `blocks` [n, 2] with first and last positions of one critical path's blocks; their number."""
    x = _last_critical(shop, now, makespan, eps)
    count = 0
    last = now.position[x]
    first = last
    while now.head[x] > eps:
        x = _critical_before(shop, now, x, eps)
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


@compiled
def _target(shop: Shop, now: Orders, i: int, first: int, last: int, left: bool) -> int:
    """Where the action at i may go within its block towards one end; i itself if nowhere."""
    if left:
        j = _latest_left(i, first, now.seq, shop.num_stages, shop.m, shop.duration, now.head)
    else:
        j = _latest_right(i, last, now.seq, shop.num_stages, shop.m, shop.has_w, shop.duration, now.head)
    limit = shop.cap[shop.device_at[i]]
    while j != i and not _fits(i, j, now.seq, shop.delta, now.level, limit):
        j += 1 if left else -1
    return j


@compiled
def _best_move(
    shop: Shop, now: Orders, blocks: IntArray, count: int, tabu: IntArray, step: int, best: float, eps: float
) -> tuple[int, int]:
    """The move of lowest estimate out of some blocks, picked at random among equals; (-1, -1) if none."""
    moved = np.empty(2 * _REACH + 2, dtype=np.int64)
    scratch = np.empty((2, 2 * _REACH + 2))
    chosen = (-1, -1)
    lowest = np.inf
    ties = 0
    for b in range(count):
        if np.random.random() * count > _BLOCKS:
            continue
        first = blocks[b, 0]
        last = blocks[b, 1]
        d = shop.device_at[first]
        for turn in range(2 * min(_REACH, last - first)):
            left = turn % 2 == 0
            i = first + 1 + turn // 2 if left else last - 1 - turn // 2
            j = _target(shop, now, i, first, last, left)
            if j == i:
                continue
            estimate = _path_through(
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


@compiled
def _kick(shop: Shop, now: Orders, moves: int) -> None:
    """A few random legal shifts."""
    for _ in range(moves):
        i = np.random.randint(0, len(now.seq))
        d = shop.device_at[i]
        first = max(shop.offsets[d], i - _REACH)
        last = min(shop.offsets[d + 1] - 1, i + _REACH)
        j = _target(shop, now, i, first, last, np.random.random() < 0.5)
        if j != i:
            _try_shift(shop, now, i, j)


@compiled
def improve_orders(
    orders: IntArray,
    offsets: IntArray,
    num_stages: int,
    m: int,
    placement: IntArray,
    cost: FloatArray,
    send: FloatArray,
    sizes: FloatArray,
    held: float,
    cap: FloatArray,
    iterations: int,
    target: float,
    seed: int,
    best_orders: IntArray,
) -> float:
    """Tabu search from `orders`; fill `best_orders` and return its makespan.

    `orders` is overwritten with the order the search ended at. Deterministic in `seed`. Stops at `target`.
    When nothing better turns up for long it goes back to the best order, kicked by a few random shifts.
    """
    np.random.seed(seed)
    total = len(orders)
    shop = _shop(orders, offsets, num_stages, m, placement, cost, send, sizes, held, cap)
    now = _empty_orders(orders, num_stages * m * 3)
    _settle_all(shop, now)
    _timed(shop, now)
    makespan = _finish(shop, now)
    best = makespan
    best_seq = now.seq.copy()
    blocks = np.empty((total, 2), dtype=np.int64)
    tabu = np.zeros(num_stages * m * 3, dtype=np.int64)
    stall = 0
    kicks = 0
    patience = 300 + total // 4
    for step in range(1, iterations + 1):
        if best <= target:
            break
        eps = _TOLERANCE * makespan
        count = _critical_blocks(shop, now, makespan, eps, blocks)
        i, j = _best_move(shop, now, blocks, count, tabu, step, best, eps)
        if i < 0:
            stall = patience
        else:
            x = now.seq[i]
            if not _try_shift(shop, now, i, j):
                tabu[x] = step + 50
                continue
            tabu[x] = step + 6 + np.random.randint(0, 10)
            makespan = _finish(shop, now)
            stall += 1
            if makespan < best * (1.0 - 1e-12):
                best = makespan
                best_seq[:] = now.seq
                stall = 0
                kicks = 0
        if stall >= patience:
            stall = 0
            kicks += 1
            tabu[:] = 0
            now.seq[:] = best_seq
            _settle_all(shop, now)
            _timed(shop, now)
            _kick(shop, now, min(2 + kicks, 12))
            makespan = _finish(shop, now)
    _write(best_seq, shop.whole, best_orders)
    _write(now.seq, shop.whole, orders)
    return best
