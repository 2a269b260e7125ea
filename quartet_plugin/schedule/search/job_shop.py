"""A fixed order as a job shop: the constant part, an order with its times, and the kernels that time it.

Devices are machines. An action's id is `unit * 3 + slot` with slots F, backward (I or B), W.
"""

from typing import NamedTuple

import numpy as np

from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.compilation import inner
from quartet_plugin.schedule.kernel import Lanes


class JobShop(NamedTuple):
    """The constant part of a job shop: its machines, actions and costs.

    By stage: `placement`, `send` and `has_w`; by id: `is_full_backward`, `duration` and `delta`, the bytes
    that an action takes; by position: `device_of` and `device_end`; `cap` by device.
    """

    offsets: IntArray
    num_stages: int
    num_microbatches: int
    placement: IntArray
    send: FloatArray
    has_w: IntArray
    is_full_backward: IntArray
    duration: FloatArray
    delta: FloatArray
    cap: FloatArray
    device_of: IntArray
    device_end: IntArray


class ActionTable(NamedTuple):
    """An order and its times: `seq` and `level` by position, the others by id, `topo` of positions.

    `seq` holds ids, `level` the bytes held after each action, `head` earliest starts, `tail` the seconds that
    must follow each end, `topo` positions in an order that respects all dependencies.
    """

    seq: IntArray
    level: FloatArray
    position: IntArray
    head: FloatArray
    tail: FloatArray
    topo: IntArray


@inner
def job_shop_of(codes: IntArray, offsets: IntArray, lanes: Lanes, cap: FloatArray) -> JobShop:
    """The job shop of an order of one copy of the model; `cap` [num_devices] in bytes."""
    num_stages, m = lanes.num_stages, lanes.num_microbatches
    sizes, held = lanes.num_bytes, lanes.held_fraction
    ids = num_stages * m * 3
    duration = np.zeros(ids)
    delta = np.zeros(ids)
    has_w = np.zeros(num_stages, dtype=np.int64)
    is_full_backward = np.zeros(ids, dtype=np.int64)
    device_of = np.empty(len(codes), dtype=np.int64)
    device_end = np.empty(len(codes), dtype=np.int64)
    for d in range(len(offsets) - 1):
        for k in range(offsets[d], offsets[d + 1]):
            device_of[k] = d
            device_end[k] = offsets[d + 1]
    for code in codes:
        kind = code & 3
        stage = (code >> 2) // m
        x = (code >> 2) * 3 + (1 if kind == 3 else kind)
        duration[x] = lanes.cost_s[kind, stage]
        if kind == 0:
            delta[x] = sizes[stage]
        elif kind == 1:
            delta[x] = -sizes[stage] * (1.0 - held)
        elif kind == 2:
            delta[x] = -sizes[stage] * held
            has_w[stage] = 1
        else:
            delta[x] = -sizes[stage]
            is_full_backward[x] = 1
    return JobShop(
        offsets,
        num_stages,
        m,
        lanes.device,
        lanes.send_s,
        has_w,
        is_full_backward,
        duration,
        delta,
        cap,
        device_of,
        device_end,
    )


@inner
def table_of(codes: IntArray, shop: JobShop) -> ActionTable:
    """The table of an order, timed."""
    num_ids = len(shop.duration)
    seq = np.empty(len(codes), dtype=np.int64)
    for k in range(len(codes)):
        kind = codes[k] & 3
        seq[k] = (codes[k] >> 2) * 3 + (1 if kind == 3 else kind)
    table = ActionTable(
        seq,
        np.zeros(len(codes)),
        np.zeros(num_ids, dtype=np.int64),
        np.full(num_ids, -1.0),
        np.zeros(num_ids),
        np.zeros(len(codes), dtype=np.int64),
    )
    reset_order(shop, table, seq)
    return table


@inner
def write_codes(seq: IntArray, shop: JobShop, codes: IntArray) -> None:
    """Turn the ids in `seq` back into action codes."""
    for k in range(len(seq)):
        x = seq[k]
        codes[k] = x // 3 * 4 + (3 if shop.is_full_backward[x] else x % 3)


@inner
def update_heads(shop: JobShop, table: ActionTable) -> bool:
    """Fill in the earliest starts and `topo`; False when the order deadlocks."""
    seq, head, topo = table.seq, table.head, table.topo
    offsets, duration, send, placement = shop.offsets, shop.duration, shop.send, shop.placement
    num_stages = shop.num_stages
    num_devices = len(offsets) - 1
    row = 3 * shop.num_microbatches
    for k in range(len(seq)):
        head[seq[k]] = -1.0
    free = np.zeros(num_devices)
    following = np.empty(num_devices, dtype=np.int64)
    waits = np.full(num_devices, -1)
    stack = np.empty(num_devices, dtype=np.int64)
    for d in range(num_devices):
        following[d] = offsets[d]
        stack[d] = num_devices - 1 - d
    height = num_devices
    ran = 0
    while height > 0:
        height -= 1
        d = stack[height]
        now = free[d]
        pos = following[d]
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
        following[d] = pos
    return ran == len(seq)


@inner
def successor_tail(
    x: int,
    num_stages: int,
    row: int,
    send: FloatArray,
    has_w: IntArray,
    duration: FloatArray,
    tail: FloatArray,
) -> float:
    """The longest way from the end of x through those that need its result, in seconds.

    `row` are the ids of a stage. Here and in `arrival` a whole `JobShop` would double the time of a search.
    """
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


@inner
def arrival(
    x: int, num_stages: int, row: int, send: FloatArray, duration: FloatArray, head: FloatArray
) -> float:
    """When all that x needs from other actions of its microbatch is there, in seconds."""
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


@inner
def update_tails(shop: JobShop, table: ActionTable) -> float:
    """Fill in the tails of an order with heads; its makespan in seconds."""
    seq, topo, tail = table.seq, table.topo, table.tail
    num_stages, row = shop.num_stages, 3 * shop.num_microbatches
    send, has_w, duration, device_end = shop.send, shop.has_w, shop.duration, shop.device_end
    for k in range(len(topo) - 1, -1, -1):
        pos = topo[k]
        x = seq[pos]
        longest = successor_tail(x, num_stages, row, send, has_w, duration, tail)
        if pos + 1 < device_end[pos]:
            y = seq[pos + 1]
            longest = max(longest, duration[y] + tail[y])
        tail[x] = longest
    makespan = 0.0
    for d in range(len(shop.offsets) - 1):
        if shop.offsets[d + 1] > shop.offsets[d]:
            y = seq[shop.offsets[d + 1] - 1]
            makespan = max(makespan, table.head[y] + duration[y])
    return makespan


@inner
def update_positions(shop: JobShop, table: ActionTable, low: int, high: int) -> None:
    """Compute the positions and memory levels of low..high, all on one device, after a change."""
    memory = table.level[low - 1] if low > shop.offsets[shop.device_of[low]] else 0.0
    for k in range(low, high + 1):
        table.position[table.seq[k]] = k
        memory += shop.delta[table.seq[k]]
        table.level[k] = memory


@inner
def reset_order(shop: JobShop, table: ActionTable, seq: IntArray) -> None:
    """Take another order: its positions, memory levels and heads."""
    for k in range(len(seq)):
        table.seq[k] = seq[k]
    for d in range(len(shop.offsets) - 1):
        if shop.offsets[d + 1] > shop.offsets[d]:
            update_positions(shop, table, shop.offsets[d], shop.offsets[d + 1] - 1)
    update_heads(shop, table)
