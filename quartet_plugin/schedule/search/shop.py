"""A fixed order as a job shop: what does not change, an order with its times, and how it is timed.

Devices are machines. An action's id is `unit * 3 + slot` with slots F, backward (I or B), W.
"""

from typing import NamedTuple

import numpy as np

from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.kernel import compiled


class JobShop(NamedTuple):
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


class ActionTable(NamedTuple):
    """An order and its times: `seq` and `level` by position, the others by id, `topo` of positions."""

    seq: IntArray
    level: FloatArray
    position: IntArray
    head: FloatArray
    tail: FloatArray
    topo: IntArray


@compiled
def job_shop_of(
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
) -> JobShop:
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
    return JobShop(
        offsets, num_stages, m, placement, send, has_w, whole, duration, delta, cap, device_at, device_end
    )


@compiled
def empty_table(codes: IntArray, num_ids: int) -> ActionTable:
    seq = np.empty(len(codes), dtype=np.int64)
    for k in range(len(codes)):
        kind = codes[k] & 3
        seq[k] = (codes[k] >> 2) * 3 + (1 if kind == 3 else kind)
    return ActionTable(
        seq,
        np.zeros(len(codes)),
        np.zeros(num_ids, dtype=np.int64),
        np.full(num_ids, -1.0),
        np.zeros(num_ids),
        np.zeros(len(codes), dtype=np.int64),
    )


@compiled
def write_codes(seq: IntArray, whole: IntArray, codes: IntArray) -> None:
    """Ids back to action codes."""
    for k in range(len(seq)):
        x = seq[k]
        codes[k] = x // 3 * 4 + (3 if whole[x] else x % 3)


@compiled
def earliest_starts(
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
def successor_tail(
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
def arrival(
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
def fill_tails(
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
        longest = successor_tail(x, num_stages, m, send, has_w, duration, tail)
        if pos + 1 < device_end[pos]:
            y = seq[pos + 1]
            longest = max(longest, duration[y] + tail[y])
        tail[x] = longest


@compiled
def time_orders(shop: JobShop, now: ActionTable) -> bool:
    """Heads of the order; False when it deadlocks."""
    ran = earliest_starts(
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
def finish_times(shop: JobShop, now: ActionTable) -> float:
    """Tails of a timed order; its makespan."""
    fill_tails(
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
def settle(shop: JobShop, now: ActionTable, low: int, high: int) -> None:
    """Positions and memory levels of low..high, all on one device, after a change."""
    memory = now.level[low - 1] if low > shop.offsets[shop.device_at[low]] else 0.0
    for k in range(low, high + 1):
        now.position[now.seq[k]] = k
        memory += shop.delta[now.seq[k]]
        now.level[k] = memory


@compiled
def settle_all(shop: JobShop, now: ActionTable) -> None:
    for d in range(len(shop.offsets) - 1):
        if shop.offsets[d + 1] > shop.offsets[d]:
            settle(shop, now, shop.offsets[d], shop.offsets[d + 1] - 1)
