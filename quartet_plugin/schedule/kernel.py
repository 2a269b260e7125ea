"""Compiled kernels that run fixed orders: as-soon-as-possible times, memory, and the repeated period.

A *lane* is a stage of one copy of the model. A *unit* is `stage * num_microbatches + microbatch`; an action's
code is `unit * 4 + kind`. The kernels release the GIL, so threads run them side by side.

The parts of overlapped pairs are marked in `parts`, which is as long as the orders, or empty where there is
no pair: 1 for the forward, 2 for the backward behind it, 0 for every other action. Both parts of a pair start
when the inputs of both are there, and both end, with their results, when the pair does.
"""

from typing import NamedTuple

import numpy as np

from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.compilation import compiled, inner
from quartet_plugin.schedule.schedule import PartArray

F, I, W, B = 0, 1, 2, 3  # noqa: E741 - the field's letter for the input gradient
NO_PARTS: PartArray = np.empty(0, dtype=np.uint8)
MEMORY_TOLERANCE = 1e-9


class Lanes(NamedTuple):
    """A pipeline as the kernels take it, lane by lane: flat [num_routes * num_stages].

    One route is the rule; schedules with two copies of the model have two. `cost_s` [4, lanes] are seconds by
    kind, `send_s` [2, lanes] those of a transfer out of a lane, forward-going and backward-going. `route`
    says which route each microbatch takes [num_microbatches]. `exchange_s` [2, lanes] are the seconds of F
    and of the backward that a pair can hide.
    """

    num_stages: int
    num_microbatches: int
    device: IntArray
    cost_s: FloatArray
    send_s: FloatArray
    num_bytes: FloatArray
    held_fraction: float
    route: IntArray
    exchange_s: FloatArray


def hidden_s(
    forward_s: float, forward_exchange_s: float, backward_s: float, backward_exchange_s: float
) -> float:
    """Seconds that a pair is shorter than its parts: each one's exchange behind the other's compute.

    `forward_s` and `backward_s` are the parts alone, with their exchanges. This is the one rule for the time
    of a pair; without exchanges it takes the sum of its parts.
    """
    behind_backward_s = min(forward_exchange_s, backward_s - backward_exchange_s)
    behind_forward_s = min(backward_exchange_s, forward_s - forward_exchange_s)
    return behind_backward_s + behind_forward_s


_hidden_s = inner(hidden_s)


@inner
def _pair_s(lanes: Lanes, forward_lane: int, kind: int, backward_lane: int) -> float:
    """Seconds of a pair of a forward and a backward of a kind."""
    forward_s, backward_s = float(lanes.cost_s[F, forward_lane]), float(lanes.cost_s[kind, backward_lane])
    exchange_s = lanes.exchange_s
    hidden = _hidden_s(forward_s, exchange_s[0, forward_lane], backward_s, exchange_s[1, backward_lane])
    return forward_s + backward_s - hidden


@compiled
def are_complete(orders: IntArray, offsets: IntArray, lanes: Lanes) -> bool:
    """Whether every action is known, on its device, there once, and none is missing."""
    num_stages, num_microbatches, route = lanes.num_stages, lanes.num_microbatches, lanes.route
    num_units = num_stages * num_microbatches
    seen = np.zeros(num_units, dtype=np.uint8)
    for device in range(len(offsets) - 1):
        for position in range(offsets[device], offsets[device + 1]):
            code = orders[position]
            if code < 0 or code >= num_units * 4:
                return False
            unit = code >> 2
            lane = route[unit % num_microbatches] * num_stages + unit // num_microbatches
            bit = 1 << (code & 3)
            if lanes.device[lane] != device or seen[unit] & bit:
                return False
            seen[unit] |= bit
    # F with B, or F with I and W.
    num_whole = 0
    for unit in range(num_units):
        num_whole += seen[unit] in (9, 7)
    return num_whole == num_units


@compiled
def check_memory(
    orders: IntArray, offsets: IntArray, lanes: Lanes, limit: FloatArray, peak: FloatArray
) -> tuple[int, int]:
    """Fill `peak` [num_devices]; return (device, index) of the first action over `limit`, -1 for none.

    Memory depends on each device's order alone. `limit` [num_devices] may hold inf.
    """
    num_stages, num_microbatches, route = lanes.num_stages, lanes.num_microbatches, lanes.route
    held = lanes.held_fraction
    for device in range(len(offsets) - 1):
        used = 0.0
        top = 0.0
        bound = limit[device] * (1.0 + MEMORY_TOLERANCE)
        for position in range(offsets[device], offsets[device + 1]):
            code = orders[position]
            unit = code >> 2
            kind = code & 3
            size = lanes.num_bytes[route[unit % num_microbatches] * num_stages + unit // num_microbatches]
            if kind == F:
                used += size
                if used > top:
                    top = used
                    if top > bound:
                        return device, position - offsets[device]
            elif kind == I:
                used -= size * (1.0 - held)
            elif kind == W:
                used -= size * held
            else:
                used -= size
        peak[device] = top
    return -1, -1


@compiled
def run_orders(
    orders: IntArray, offsets: IntArray, parts: PartArray, lanes: Lanes
) -> tuple[int, FloatArray, FloatArray, IntArray]:
    """Run checked orders as soon as possible: the number that ran (all, unless deadlocked), starts and ends.

    Forwards alone are allowed too. The last array holds the indices of the actions in an order that respects
    all dependencies. A device that cannot go on waits for one unit, and is resumed when that unit is done.
    """
    num_stages, num_microbatches, route = lanes.num_stages, lanes.num_microbatches, lanes.route
    lane_device, lane_cost, lane_send = lanes.device, lanes.cost_s, lanes.send_s
    start = np.empty(len(orders))
    end = np.empty(len(orders))
    sequence = np.empty(len(orders), dtype=np.int64)
    num_devices = len(offsets) - 1
    num_units = num_stages * num_microbatches
    forward_end = np.full(num_units, -1.0)
    gradient_end = np.full(num_units, -1.0)
    free = np.zeros(num_devices)
    following = np.empty(num_devices, dtype=np.int64)
    waits_for = np.full(num_devices, -1)
    stack = np.empty(num_devices, dtype=np.int64)
    height = num_devices
    has_pairs = len(parts) > 0
    for device in range(num_devices):
        following[device] = offsets[device]
        stack[device] = num_devices - 1 - device
    ran = 0
    while height > 0:
        height -= 1
        device = stack[height]
        now = free[device]
        position = following[device]
        stop = offsets[device + 1]
        while position < stop:
            code = orders[position]
            unit = code >> 2
            kind = code & 3
            stage = unit // num_microbatches
            lane = route[unit - stage * num_microbatches] * num_stages + stage
            ready = now
            part = parts[position] if has_pairs else 0
            if part == 2:
                # Its inputs were waited for with the forward's, and it ends with it.
                pass
            elif kind == F:
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
            if part == 1:
                beside = orders[position + 1] >> 2
                beside_kind = orders[position + 1] & 3
                beside_stage = beside // num_microbatches
                beside_lane = route[beside - beside_stage * num_microbatches] * num_stages + beside_stage
                if forward_end[beside] < 0.0:
                    waits_for[device] = beside * 2
                    break
                if beside_stage < num_stages - 1:
                    before = gradient_end[beside + num_microbatches]
                    if before < 0.0:
                        waits_for[device] = (beside + num_microbatches) * 2 + 1
                        break
                    ready = max(ready, before + lane_send[1, beside_lane + 1])
                start[position] = ready
                now = ready + _pair_s(lanes, lane, beside_kind, beside_lane)
            elif part == 2:
                start[position] = start[position - 1]
            else:
                start[position] = ready
                now = ready + lane_cost[kind, lane]
            end[position] = now
            sequence[ran] = position
            ran += 1
            position += 1
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
        following[device] = position
    return ran, start, end, sequence


@inner
def _repeat(
    orders: IntArray,
    parts: PartArray,
    sequence: IntArray,
    device_of: IntArray,
    lanes: Lanes,
    free: FloatArray,
    ends: FloatArray,
) -> None:
    """One more run of the lists, each device starting when `free` says; updates `free` in place."""
    num_stages, num_microbatches, route = lanes.num_stages, lanes.num_microbatches, lanes.route
    lane_cost, lane_send = lanes.cost_s, lanes.send_s
    has_pairs = len(parts) > 0
    for step in range(len(sequence)):
        position = sequence[step]
        code = orders[position]
        unit = code >> 2
        kind = code & 3
        stage = unit // num_microbatches
        lane = route[unit - stage * num_microbatches] * num_stages + stage
        device = device_of[position]
        ready = free[device]
        part = parts[position] if has_pairs else 0
        if part == 2:
            pass
        elif kind == F:
            if stage > 0:
                ready = max(ready, ends[0, unit - num_microbatches] + lane_send[0, lane - 1])
        elif kind != W and stage < num_stages - 1:
            ready = max(ready, ends[1, unit + num_microbatches] + lane_send[1, lane + 1])
        if part == 1:
            beside = orders[position + 1] >> 2
            beside_stage = beside // num_microbatches
            beside_lane = route[beside - beside_stage * num_microbatches] * num_stages + beside_stage
            if beside_stage < num_stages - 1:
                ready = max(ready, ends[1, beside + num_microbatches] + lane_send[1, beside_lane + 1])
            done = ready + _pair_s(lanes, lane, orders[position + 1] & 3, beside_lane)
        elif part == 2:
            done = ready
        else:
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
    parts: PartArray,
    sequence: IntArray,
    lanes: Lanes,
    tries: int | np.int64,
) -> float:
    """The interval at which the lists repeat without a barrier: a max-plus eigenvalue.

    Power iteration until two states differ by a constant; after `tries` rounds the exact cycle mean of
    the device-to-device longest paths (Karp).
    """
    num_devices = len(offsets) - 1
    device_of = np.empty(len(orders), dtype=np.int64)
    for device in range(num_devices):
        for position in range(offsets[device], offsets[device + 1]):
            device_of[position] = device
    ends = np.zeros((2, lanes.num_stages * lanes.num_microbatches))
    free = np.zeros(num_devices)
    history = np.zeros((tries + 1, num_devices))
    for k in range(1, tries + 1):
        _repeat(orders, parts, sequence, device_of, lanes, free, ends)
        for device in range(num_devices):
            history[k, device] = free[device]
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
        for device in range(num_devices):
            free[device] = never
        free[source] = 0.0
        for unit in range(ends.shape[1]):
            ends[0, unit] = never
            ends[1, unit] = never
        _repeat(orders, parts, sequence, device_of, lanes, free, ends)
        for device in range(num_devices):
            weights[source, device] = free[device]
    return _largest_cycle_mean(weights)
