"""The compiled local search on fixed orders: move actions out of the blocks of a critical path.

A pipeline with a fixed split is a job shop: devices are machines. As there, only an action that moves past
an end of its block (a run of one device's actions on a critical path) can shorten the path (Balas and
Vazacopoulos 1998). Moves are ranked by the longest path through what they touch, with heads and tails of
the current order, taken if not tabu, and never exceed the memory cap. An action's id is `unit * 3 + slot`
with slots F, backward (I or B), W.
"""

import numpy as np

from quartet_plugin.schedule.costs import FloatArray, IntArray
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
    """
    np.random.seed(seed)
    total = len(orders)
    num_devices = len(offsets) - 1
    ids = num_stages * m * 3
    seq = np.empty(total, dtype=np.int64)
    duration = np.zeros(ids)
    delta = np.zeros(ids)
    has_w = np.zeros(num_stages, dtype=np.int64)
    is_whole = np.zeros(ids, dtype=np.uint8)
    for k in range(total):
        code = orders[k]
        unit = code >> 2
        kind = code & 3
        stage = unit // m
        x = unit * 3 + (1 if kind == 3 else kind)
        seq[k] = x
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
            is_whole[x] = 1
    device_end = np.empty(total, dtype=np.int64)
    device_at = np.empty(total, dtype=np.int64)
    level = np.empty(total)
    for d in range(num_devices):
        memory = 0.0
        for k in range(offsets[d], offsets[d + 1]):
            device_end[k] = offsets[d + 1]
            device_at[k] = d
            memory += delta[seq[k]]
            level[k] = memory
    head = np.full(ids, -1.0)
    tail = np.zeros(ids)
    topo = np.empty(total, dtype=np.int64)
    position = np.empty(ids, dtype=np.int64)
    for k in range(total):
        position[seq[k]] = k
    path = np.empty(total, dtype=np.int64)
    moved = np.empty(2 * _REACH + 2, dtype=np.int64)
    scratch = np.empty((2, 2 * _REACH + 2))
    tabu = np.zeros(ids, dtype=np.int64)
    _run(seq, offsets, num_stages, m, placement, send, duration, head, topo)
    _fill_tails(seq, device_end, topo, num_stages, m, send, has_w, duration, tail)
    makespan = 0.0
    for k in range(total):
        makespan = max(makespan, head[seq[k]] + duration[seq[k]])
    best = makespan
    best_seq = seq.copy()
    stall = 0
    patience = 300 + total // 4
    kicks = 0
    for step in range(1, iterations + 1):
        if best <= target:
            break
        eps = _TOLERANCE * makespan
        # One critical path, backwards, ties broken at random.
        count = 0
        ends = 0
        x = -1
        for d in range(num_devices):
            if offsets[d + 1] > offsets[d]:
                y = seq[offsets[d + 1] - 1]
                if head[y] + duration[y] >= makespan - eps:
                    ends += 1
                    if np.random.randint(0, ends) == 0:
                        x = y
        row = 3 * m
        while x >= 0:
            path[count] = x
            count += 1
            begin = head[x]
            if begin <= eps:
                break
            k = position[x]
            slot = x % 3
            stage = x // row
            found = 0
            chosen = -1
            if k > offsets[device_at[k]]:
                y = seq[k - 1]
                if head[y] + duration[y] >= begin - eps:
                    found += 1
                    chosen = y
            if slot == 0:
                if stage > 0:
                    y = x - row
                    if y != chosen and head[y] + duration[y] + send[0, stage - 1] >= begin - eps:
                        found += 1
                        if np.random.randint(0, found) == 0:
                            chosen = y
            else:
                y = x - 1
                if y != chosen and head[y] + duration[y] >= begin - eps:
                    found += 1
                    if np.random.randint(0, found) == 0:
                        chosen = y
                if slot == 1 and stage < num_stages - 1:
                    y = x + row
                    if y != chosen and head[y] + duration[y] + send[1, stage + 1] >= begin - eps:
                        found += 1
                        if np.random.randint(0, found) == 0:
                            chosen = y
            x = chosen
        # Its blocks; examine a few, picked at random.
        best_estimate = np.inf
        move_from = -1
        move_to = -1
        ties = 0
        blocks = 0
        k = count - 1
        while k >= 0:
            first = position[path[k]]
            last = first
            while k > 0 and position[path[k - 1]] == last + 1 and last + 1 < device_end[first]:
                last += 1
                k -= 1
            k -= 1
            if last > first:
                blocks += 1
        skip = 0.0 if blocks <= _BLOCKS else 1.0 - _BLOCKS / blocks
        k = count - 1
        while k >= 0:
            first = position[path[k]]
            last = first
            while k > 0 and position[path[k - 1]] == last + 1 and last + 1 < device_end[first]:
                last += 1
                k -= 1
            k -= 1
            if last == first or np.random.random() < skip:
                continue
            d = device_at[first]
            start_of = offsets[d]
            end_of = offsets[d + 1]
            limit = cap[d]
            for side in range(2):
                near = first if side == 0 else last
                for away in range(1, min(_REACH, last - first) + 1):
                    i = near + away if side == 0 else near - away
                    if side == 0:
                        j = _latest_left(i, first, seq, num_stages, m, duration, head)
                    else:
                        j = _latest_right(i, last, seq, num_stages, m, has_w, duration, head)
                    while j != i and not _fits(i, j, seq, delta, level, limit):
                        j += 1 if side == 0 else -1
                    if j == i:
                        continue
                    estimate = _path_through(
                        i,
                        j,
                        seq,
                        start_of,
                        end_of,
                        num_stages,
                        m,
                        send,
                        has_w,
                        duration,
                        head,
                        tail,
                        moved,
                        scratch[0],
                        scratch[1],
                    )
                    if tabu[seq[i]] > step and estimate >= best - eps:
                        continue
                    if estimate < best_estimate - eps:
                        best_estimate = estimate
                        move_from = i
                        move_to = j
                        ties = 1
                    elif estimate <= best_estimate + eps:
                        ties += 1
                        if np.random.randint(0, ties) == 0:
                            move_from = i
                            move_to = j
        if move_from < 0:
            stall = patience
        else:
            x = seq[move_from]
            tabu[x] = step + 6 + np.random.randint(0, 10)
            _shift(seq, move_from, move_to)
            if _run(seq, offsets, num_stages, m, placement, send, duration, head, topo) < total:
                _shift(seq, move_to, move_from)
                _run(seq, offsets, num_stages, m, placement, send, duration, head, topo)
                tabu[x] = step + 50
                continue
            low = min(move_from, move_to)
            high = max(move_from, move_to)
            memory = level[low - 1] if low > offsets[device_at[low]] else 0.0
            for k in range(low, high + 1):
                position[seq[k]] = k
                memory += delta[seq[k]]
                level[k] = memory
            _fill_tails(seq, device_end, topo, num_stages, m, send, has_w, duration, tail)
            makespan = 0.0
            for d in range(num_devices):
                if offsets[d + 1] > offsets[d]:
                    y = seq[offsets[d + 1] - 1]
                    makespan = max(makespan, head[y] + duration[y])
            if makespan < best * (1.0 - 1e-12):
                best = makespan
                best_seq[:] = seq
                stall = 0
                kicks = 0
            else:
                stall += 1
        if stall >= patience:
            # Back to the best order, kicked by random legal shifts.
            stall = 0
            kicks += 1
            seq[:] = best_seq
            tabu[:] = 0
            for d in range(num_devices):
                memory = 0.0
                for k in range(offsets[d], offsets[d + 1]):
                    position[seq[k]] = k
                    memory += delta[seq[k]]
                    level[k] = memory
            _run(seq, offsets, num_stages, m, placement, send, duration, head, topo)
            for _ in range(min(2 + kicks, 12)):
                i = np.random.randint(0, total)
                d = device_at[i]
                if np.random.random() < 0.5:
                    j = _latest_left(i, max(offsets[d], i - _REACH), seq, num_stages, m, duration, head)
                else:
                    high = min(offsets[d + 1] - 1, i + _REACH)
                    j = _latest_right(i, high, seq, num_stages, m, has_w, duration, head)
                if j == i or not _fits(i, j, seq, delta, level, cap[d]):
                    continue
                _shift(seq, i, j)
                if _run(seq, offsets, num_stages, m, placement, send, duration, head, topo) < total:
                    _shift(seq, j, i)
                    _run(seq, offsets, num_stages, m, placement, send, duration, head, topo)
                low = min(i, j)
                memory = level[low - 1] if low > offsets[d] else 0.0
                for k in range(low, max(i, j) + 1):
                    position[seq[k]] = k
                    memory += delta[seq[k]]
                    level[k] = memory
            _fill_tails(seq, device_end, topo, num_stages, m, send, has_w, duration, tail)
            makespan = 0.0
            for k in range(total):
                makespan = max(makespan, head[seq[k]] + duration[seq[k]])
    for k in range(total):
        x = best_seq[k]
        slot = x % 3
        best_orders[k] = x // 3 * 4 + (3 if is_whole[x] else slot)
        x = seq[k]
        slot = x % 3
        orders[k] = x // 3 * 4 + (3 if is_whole[x] else slot)
    return best
