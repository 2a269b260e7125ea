"""Compiled kernels that run fixed orders: as-soon-as-possible times, memory, and the repeated period.

Arrays of a *lane* are flat [num_routes * num_stages]; one route is the rule, two-copy schedules have two.
A *unit* is `stage * num_microbatches + microbatch`; an action's code is `unit * 4 + kind`.
The kernels release the GIL, so threads run them side by side.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, cast

import numpy as np
from numba import njit

from quartet_plugin.model.costs import FloatArray, IntArray

F, I, W, B = 0, 1, 2, 3  # noqa: E741 - the field's letter for the input gradient
MEMORY_TOLERANCE = 1e-9


class Fault(IntEnum):
    """Why orders cannot run; OK is 0."""

    OK = 0
    UNKNOWN = 1
    WRONG_DEVICE = 2
    DOUBLE = 3
    MISSING = 4
    DEADLOCK = 5
    OVER_MEMORY = 6


def compiled[Function: Callable[..., Any]](function: Function) -> Function:
    """Compile with numba, keep the machine code beside the file, release the GIL."""
    return cast(Function, njit(cache=True, nogil=True)(function))


@compiled
def check_orders(
    orders: IntArray,
    offsets: IntArray,
    num_stages: int,
    num_microbatches: int,
    lane_device: IntArray,
    route: IntArray,
) -> tuple[int, int, int]:
    """Return (fault, device, index): every action known, on its device, once, and none missing.

    For a missing action `index` is its code and `device` the one that lacks it.
    """
    num_units = num_stages * num_microbatches
    seen = np.zeros(num_units, dtype=np.uint8)
    num_devices = len(offsets) - 1
    for device in range(num_devices):
        for at in range(offsets[device], offsets[device + 1]):
            code = orders[at]
            if code < 0 or code >= num_units * 4:
                return Fault.UNKNOWN.value, device, at - offsets[device]
            unit = code >> 2
            kind = code & 3
            lane = route[unit % num_microbatches] * num_stages + unit // num_microbatches
            if lane_device[lane] != device:
                return Fault.WRONG_DEVICE.value, device, at - offsets[device]
            clash = 1 << kind
            if kind == B:
                clash = 14
            elif kind != F:
                clash |= 8
            if seen[unit] & clash:
                return Fault.DOUBLE.value, device, at - offsets[device]
            seen[unit] |= 1 << kind
    for unit in range(num_units):
        state = seen[unit]
        if state == 9 or state == 7:
            continue
        lane = route[unit % num_microbatches] * num_stages + unit // num_microbatches
        kind = F
        if state & 1:
            kind = W if state & 2 else (I if state & 4 else B)
        return Fault.MISSING.value, lane_device[lane], unit * 4 + kind
    return Fault.OK.value, -1, -1


@compiled
def check_memory(
    orders: IntArray,
    offsets: IntArray,
    num_stages: int,
    num_microbatches: int,
    lane_bytes: FloatArray,
    held: float,
    route: IntArray,
    limit: FloatArray,
    peak: FloatArray,
) -> tuple[int, int, int]:
    """Fill `peak` [num_devices]; return (fault, device, index) of the first action over `limit`.

    Memory depends on each device's order alone. `limit` [num_devices] may hold inf.
    """
    for device in range(len(offsets) - 1):
        used = 0.0
        top = 0.0
        bound = limit[device] * (1.0 + MEMORY_TOLERANCE)
        for at in range(offsets[device], offsets[device + 1]):
            code = orders[at]
            unit = code >> 2
            kind = code & 3
            size = lane_bytes[route[unit % num_microbatches] * num_stages + unit // num_microbatches]
            if kind == F:
                used += size
                if used > top:
                    top = used
                    if top > bound:
                        return Fault.OVER_MEMORY.value, device, at - offsets[device]
            elif kind == I:
                used -= size * (1.0 - held)
            elif kind == W:
                used -= size * held
            else:
                used -= size
        peak[device] = top
    return Fault.OK.value, -1, -1


@compiled
def run_orders(
    orders: IntArray,
    offsets: IntArray,
    num_stages: int,
    num_microbatches: int,
    lane_device: IntArray,
    lane_cost: FloatArray,
    lane_send: FloatArray,
    route: IntArray,
    start: FloatArray,
    end: FloatArray,
    sequence: IntArray,
) -> int:
    """Run checked orders as soon as possible; return how many actions ran (all, unless deadlocked).

    `lane_cost` [4, lanes] by kind, `lane_send` [2, lanes] forward and backward transfer out of a lane.
    `start`, `end` [num_actions] are filled, and `sequence` with the indices in an order that respects all
    dependencies. A device that cannot go on waits for one unit, and is resumed when that unit is done.
    """
    num_devices = len(offsets) - 1
    num_units = num_stages * num_microbatches
    forward_end = np.full(num_units, -1.0)
    gradient_end = np.full(num_units, -1.0)
    free = np.zeros(num_devices)
    at = offsets[:-1].copy()
    waits_for = np.full(num_devices, -1)
    stack = np.empty(num_devices, dtype=np.int64)
    height = num_devices
    for device in range(num_devices):
        stack[device] = num_devices - 1 - device
    ran = 0
    while height > 0:
        height -= 1
        device = stack[height]
        now = free[device]
        pos = at[device]
        stop = offsets[device + 1]
        while pos < stop:
            code = orders[pos]
            unit = code >> 2
            kind = code & 3
            stage = unit // num_microbatches
            lane = route[unit - stage * num_microbatches] * num_stages + stage
            ready = now
            if kind == F:
                if stage > 0:
                    before = forward_end[unit - num_microbatches]
                    if before < 0.0:
                        waits_for[device] = (unit - num_microbatches) * 2
                        break
                    ready = max(ready, before + lane_send[0, lane - 1])
            elif kind == W:
                if gradient_end[unit] < 0.0:
                    waits_for[device] = unit * 2 + 1
                    break
            else:
                if forward_end[unit] < 0.0:
                    waits_for[device] = unit * 2
                    break
                if stage < num_stages - 1:
                    before = gradient_end[unit + num_microbatches]
                    if before < 0.0:
                        waits_for[device] = (unit + num_microbatches) * 2 + 1
                        break
                    ready = max(ready, before + lane_send[1, lane + 1])
            start[pos] = ready
            now = ready + lane_cost[kind, lane]
            end[pos] = now
            sequence[ran] = pos
            ran += 1
            pos += 1
            if kind == F:
                forward_end[unit] = now
                if stage < num_stages - 1:
                    other = lane_device[lane + 1]
                    if other != device and waits_for[other] == unit * 2:
                        waits_for[other] = -1
                        stack[height] = other
                        height += 1
            elif kind != W:
                gradient_end[unit] = now
                if stage > 0:
                    other = lane_device[lane - 1]
                    if other != device and waits_for[other] == unit * 2 + 1:
                        waits_for[other] = -1
                        stack[height] = other
                        height += 1
        free[device] = now
        at[device] = pos
    return ran


@compiled
def _repeat(
    orders: IntArray,
    sequence: IntArray,
    device_at: IntArray,
    num_stages: int,
    num_microbatches: int,
    lane_cost: FloatArray,
    lane_send: FloatArray,
    route: IntArray,
    free: FloatArray,
    ends: FloatArray,
) -> None:
    """One more run of the lists, each device starting when `free` says; updates `free` in place."""
    for step in range(len(sequence)):
        at = sequence[step]
        code = orders[at]
        unit = code >> 2
        kind = code & 3
        stage = unit // num_microbatches
        lane = route[unit - stage * num_microbatches] * num_stages + stage
        device = device_at[at]
        ready = free[device]
        if kind == F:
            if stage > 0:
                ready = max(ready, ends[0, unit - num_microbatches] + lane_send[0, lane - 1])
        elif kind != W and stage < num_stages - 1:
            ready = max(ready, ends[1, unit + num_microbatches] + lane_send[1, lane + 1])
        done = ready + lane_cost[kind, lane]
        free[device] = done
        if kind == F:
            ends[0, unit] = done
        elif kind != W:
            ends[1, unit] = done


@compiled
def _largest_cycle_mean(weights: FloatArray) -> float:
    """Karp's largest mean weight of a cycle in a complete graph [n, n]."""
    n = len(weights)
    best = np.full((n + 1, n), -np.inf)
    best[0, 0] = 0.0
    for k in range(1, n + 1):
        for j in range(n):
            top = -np.inf
            for i in range(n):
                top = max(top, best[k - 1, i] + weights[i, j])
            best[k, j] = top
    result = -np.inf
    for j in range(n):
        low = np.inf
        for k in range(n):
            if best[k, j] > -np.inf:
                low = min(low, (best[n, j] - best[k, j]) / (n - k))
        result = max(result, low)
    return result


@compiled
def steady_period(
    orders: IntArray,
    offsets: IntArray,
    sequence: IntArray,
    num_stages: int,
    num_microbatches: int,
    lane_cost: FloatArray,
    lane_send: FloatArray,
    route: IntArray,
    tries: int,
) -> float:
    """The interval at which the lists repeat without a barrier: a max-plus eigenvalue.

    Power iteration until two states differ by a constant; after `tries` rounds the exact cycle mean of
    the device-to-device longest paths (Karp).
    """
    num_devices = len(offsets) - 1
    device_at = np.empty(len(orders), dtype=np.int64)
    for device in range(num_devices):
        device_at[offsets[device] : offsets[device + 1]] = device
    ends = np.zeros((2, num_stages * num_microbatches))
    free = np.zeros(num_devices)
    history = np.zeros((tries + 1, num_devices))
    for k in range(1, tries + 1):
        _repeat(
            orders, sequence, device_at, num_stages, num_microbatches, lane_cost, lane_send, route, free, ends
        )
        history[k] = free
        for back in range(1, k + 1):
            low, high = np.inf, -np.inf
            for device in range(num_devices):
                gain = history[k, device] - history[k - back, device]
                low = min(low, gain)
                high = max(high, gain)
            if high - low <= 1e-12 * high:
                return high / back
    weights = np.empty((num_devices, num_devices))
    never = -1e300
    for source in range(num_devices):
        free[:] = never
        free[source] = 0.0
        ends[:] = never
        _repeat(
            orders, sequence, device_at, num_stages, num_microbatches, lane_cost, lane_send, route, free, ends
        )
        weights[source] = free
    return _largest_cycle_mean(weights)
