"""The compiled kernel that makes an order while it simulates: list scheduling by keys.

A *lane* is one stage of one copy of the model; its microbatches run in order, so a device chooses among at
most one F, one I and one W a lane. Devices decide in the order of time. A device runs the ready action of
smallest key, unless something it still has to do has a key smaller by more than the slack.
"""

from typing import NamedTuple

import numpy as np

from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.compilation import compiled, inner
from quartet_plugin.schedule.kernel import Lanes

# Scalars in a vector of parameters, after the 4 v numbers of the chunks.
W_GAP, GROUP, SLACK, MEMORY_CAP, W_LIMIT, W_FILL, PATIENCE = range(7)
NUM_SCALARS = 7

_READY_TOLERANCE = 1e-12


class Keys(NamedTuple):
    """Priorities in microbatches: key(F) = progress + forward, key(I) = progress + backward.

    `forward` and `backward` are [num_lanes]; `progress` [num_microbatches] counts a lane's microbatches.
    """

    forward: FloatArray
    backward: FloatArray
    progress: FloatArray


@inner
def _keys_of(params: FloatArray, full_backward: IntArray, chunk: IntArray, lanes: Lanes, beat: float) -> Keys:
    """The keys that a vector of parameters makes for one copy of the model.

    A vector of parameters for v chunks: stretch_forward, stretch_backward, shift_forward, shift_backward
    [v each], then w_gap, group, slack, memory_cap, w_limit, w_fill, patience, as `family.Family` explains.
    `beat`: the busiest device's seconds a microbatch. `full_backward[s]`: 1 where the backward is one action.
    """
    num_stages = lanes.num_stages
    cost, send = lanes.cost_s, lanes.send_s
    forward_key, backward_key = np.empty(num_stages), np.empty(num_stages)
    progress = np.empty(lanes.num_microbatches)
    v = (len(params) - NUM_SCALARS) // 4
    reached = 0.0
    for stage in range(num_stages):
        c = chunk[stage]
        forward_key[stage] = reached / beat + params[2 * v + c]
        reached += (cost[0, stage] + send[0, stage]) * params[c]
    returned = 0.0
    for stage in range(num_stages - 1, -1, -1):
        c = chunk[stage]
        backward_key[stage] = (reached + returned) / beat + params[3 * v + c]
        gradient = cost[3, stage] if full_backward[stage] else cost[1, stage]
        returned += (gradient + send[1, stage]) * params[v + c]
    group = max(1, int(params[4 * v + GROUP]))
    for i in range(len(progress)):
        progress[i] = i // group * group + i % group / (v if group > 1 else 1.0)
    return Keys(forward_key, backward_key, progress)


@inner
def _safe(
    lane: int,
    room: float,
    lanes: IntArray,
    next_f: IntArray,
    next_i: IntArray,
    lane_count: IntArray,
    lane_bytes: FloatArray,
) -> bool:
    """The banker's rule: after the next F of `lane` all microbatches can still finish, oldest first.

    Microbatch k needs the bytes of the lanes it has not entered, and finds `room` (what is free, pending W
    counted as done) plus all that older ones hold. It can only fail where a lane's next F stands.
    """
    free = room - lane_bytes[lane]
    if free < 0.0:
        return False
    for waiting in lanes:
        k = next_f[waiting] + (1 if waiting == lane else 0)
        if k >= lane_count[waiting]:
            continue
        need = 0.0
        held = 0.0
        for other in lanes:
            entered = next_f[other] + (1 if other == lane else 0)
            if entered <= k:
                need += lane_bytes[other]
            held += lane_bytes[other] * max(0, min(entered, k) - next_i[other])
        if need > free + held:
            return False
    return True


@inner
def _lanes_by_device(lane_device: IntArray, num_devices: int) -> tuple[IntArray, IntArray]:
    """All lanes grouped by device, and where each device's begin [num_devices + 1]."""
    first_lane = np.zeros(num_devices + 1, dtype=np.int64)
    for device in lane_device:
        first_lane[device + 1] += 1
    for device in range(num_devices):
        first_lane[device + 1] += first_lane[device]
    lanes = np.empty(len(lane_device), dtype=np.int64)
    fill = np.empty(num_devices, dtype=np.int64)
    for device in range(num_devices):
        fill[device] = first_lane[device]
    for lane in range(len(lane_device)):
        device = lane_device[lane]
        lanes[fill[device]] = lane
        fill[device] += 1
    return lanes, first_lane


@compiled
def generate_orders(
    lanes: Lanes,
    keys: Keys,
    full_backward: IntArray,
    rules: FloatArray,
    cap: FloatArray,
    orders: IntArray,
    offsets: IntArray,
) -> float:
    """Fill `orders`, each device's part from `offsets[device]` on; return the makespan in seconds, or inf.

    A lane's microbatches are those of its route, a run of consecutive ones. key(W) = key(I) + rules[W_GAP].
    `rules`: the scalars of a vector of parameters, group and cap unused. `full_backward[lane]` is 1 where the
    backward is one action. `cap` [num_devices] bounds activation bytes with a banker's rule (`_safe`), so
    only a cap below one microbatch's bytes fails, and inf is returned. A W runs when its key is smallest,
    when more than rules[W_LIMIT] are pending, when its memory is needed, or when the device would idle for at
    least rules[W_FILL] of its time. A device waits for an action of smaller key that is known to arrive
    within rules[PATIENCE] of the time the other takes.
    """
    num_stages, num_microbatches = lanes.num_stages, lanes.num_microbatches
    lane_device, lane_cost, lane_send, lane_bytes = lanes.device, lanes.cost_s, lanes.send_s, lanes.num_bytes
    forward_key, backward_key, progress = keys
    num_devices = len(offsets) - 1
    num_lanes = len(lane_device)
    width = num_microbatches
    slack = rules[SLACK]
    w_gap = rules[W_GAP]
    w_limit = rules[W_LIMIT]
    w_fill = rules[W_FILL]
    patience = rules[PATIENCE]

    lane_first = np.zeros(num_lanes, dtype=np.int64)
    lane_count = np.zeros(num_lanes, dtype=np.int64)
    for i in range(num_microbatches - 1, -1, -1):
        begin = lanes.route[i] * num_stages
        lane_first[begin] = i
        lane_count[begin] += 1
    for lane in range(num_lanes):
        lane_first[lane] = lane_first[lane // num_stages * num_stages]
        lane_count[lane] = lane_count[lane // num_stages * num_stages]
    lanes_by_device, first_lane = _lanes_by_device(lane_device, num_devices)
    next_f = np.zeros(num_lanes, dtype=np.int64)
    next_i = np.zeros(num_lanes, dtype=np.int64)
    next_w = np.zeros(num_lanes, dtype=np.int64)
    f_arrival = np.full(num_lanes * width, np.inf)
    i_arrival = np.full(num_lanes * width, np.inf)
    free = np.zeros(num_devices)
    wake = np.zeros(num_devices)
    used = np.zeros(num_devices)
    pending = np.zeros(num_devices, dtype=np.int64)
    pending_bytes = np.zeros(num_devices)
    position = np.empty(num_devices, dtype=np.int64)
    w_release = np.empty(num_lanes)
    tolerance = np.empty(num_devices)
    may_start = np.zeros(num_lanes, dtype=np.bool_)
    share = np.zeros(num_devices)
    total = 0
    for lane in range(num_lanes):
        total += lane_count[lane] * (2 if full_backward[lane] else 3)
        if lane % num_stages == 0:
            for i in range(lane_count[lane]):
                f_arrival[lane * width + i] = 0.0
        share[lane_device[lane]] += lane_bytes[lane]
        w_release[lane] = 0.0 if full_backward[lane] else lane_bytes[lane] * lanes.held_fraction
    for device in range(num_devices):
        position[device] = offsets[device]
        tolerance[device] = cap[device] * (1.0 + 1e-9)

    # The loop stays in one piece: handing its arrays to helpers, even inlined, costs a quarter of the speed.
    makespan = 0.0
    ran = 0
    relaxed = False
    while ran < total:
        device = 0
        now = wake[0]
        for d in range(1, num_devices):
            if wake[d] < now:
                now = wake[d]
                device = d
        if now == np.inf:
            # Everybody waits for a key out of reach: ignore the slack once. The banker's rule keeps one able.
            if relaxed:
                return np.inf
            relaxed = True
            for d in range(num_devices):
                wake[d] = free[d]
            continue
        reach = np.inf if relaxed else slack

        first = first_lane[device]
        last = first_lane[device + 1]
        room = tolerance[device] - used[device] + pending_bytes[device]

        smallest = np.inf
        best_key = np.inf
        best_lane = -1
        best_is_f = False
        soon_key = np.inf
        soon = np.inf
        for k in range(first, last):
            lane = lanes_by_device[k]
            i = next_i[lane]
            if i < lane_count[lane]:
                key = progress[i] + backward_key[lane]
                smallest = min(smallest, key)
                ready = i < next_f[lane] and i_arrival[lane * width + i] <= now + _READY_TOLERANCE
                if ready and key < best_key:
                    best_key = key
                    best_lane = lane
                    best_is_f = False
            i = next_f[lane]
            may = i < lane_count[lane] and (
                room >= share[device] + lane_bytes[lane]
                or _safe(lane, room, lanes_by_device[first:last], next_f, next_i, lane_count, lane_bytes)
            )
            if may:
                key = progress[i] + forward_key[lane]
                smallest = min(smallest, key)
                if key < best_key and f_arrival[lane * width + i] <= now + _READY_TOLERANCE:
                    best_key = key
                    best_lane = lane
                    best_is_f = True
            may_start[lane] = may
        bound = smallest + reach
        if best_key > bound:
            best_lane = -1
            best_key = np.inf
        # What is known to arrive and would be preferred (or, with nothing ready, would be allowed).
        if best_lane < 0 or patience > 0.0:
            for k in range(first, last):
                lane = lanes_by_device[k]
                i = next_i[lane]
                if i < next_f[lane]:
                    when = i_arrival[lane * width + i]
                    key = progress[i] + backward_key[lane]
                    if when < soon and key < best_key and key <= bound:
                        soon = when
                        soon_key = key
                i = next_f[lane]
                if may_start[lane]:
                    when = f_arrival[lane * width + i]
                    key = progress[i] + forward_key[lane]
                    if when < soon and key < best_key and key <= bound:
                        soon = when
                        soon_key = key
            if best_lane >= 0 and soon_key < best_key:
                kind = 0 if best_is_f else (3 if full_backward[best_lane] else 1)
                if soon - now <= patience * lane_cost[kind, best_lane]:
                    best_lane = -1
                    best_key = np.inf

        run_w = False
        w_lane = -1
        if pending[device] > 0:
            w_key = np.inf
            for k in range(first, last):
                lane = lanes_by_device[k]
                i = next_w[lane]
                if full_backward[lane] == 0 and i < next_i[lane]:
                    key = progress[i] + backward_key[lane]
                    if key < w_key:
                        w_key = key
                        w_lane = lane
            if best_lane < 0:
                run_w = relaxed or soon - now >= w_fill * lane_cost[2, w_lane] - _READY_TOLERANCE
            else:
                run_w = pending[device] > w_limit or w_key + w_gap < best_key
                if best_is_f and used[device] + lane_bytes[best_lane] > tolerance[device]:
                    run_w = True

        if run_w:
            lane = w_lane
            stage = lane % num_stages
            i = next_w[lane]
            next_w[lane] = i + 1
            done = now + lane_cost[2, lane]
            used[device] -= w_release[lane]
            pending[device] -= 1
            pending_bytes[device] -= w_release[lane]
            orders[position[device]] = (stage * num_microbatches + lane_first[lane] + i) * 4 + 2
        elif best_lane >= 0:
            lane = best_lane
            stage = lane % num_stages
            if best_is_f:
                i = next_f[lane]
                next_f[lane] = i + 1
                done = now + lane_cost[0, lane]
                used[device] += lane_bytes[lane]
                orders[position[device]] = (stage * num_microbatches + lane_first[lane] + i) * 4
                if stage == num_stages - 1:
                    i_arrival[lane * width + i] = done
                else:
                    to = lane + 1
                    when = done + lane_send[0, lane]
                    f_arrival[to * width + i] = when
                    other = lane_device[to]
                    if next_f[to] == i and other != device:
                        when = max(when, free[other])
                        wake[other] = min(wake[other], when)
            else:
                i = next_i[lane]
                next_i[lane] = i + 1
                if full_backward[lane]:
                    done = now + lane_cost[3, lane]
                    used[device] -= lane_bytes[lane]
                    orders[position[device]] = (stage * num_microbatches + lane_first[lane] + i) * 4 + 3
                else:
                    done = now + lane_cost[1, lane]
                    used[device] -= lane_bytes[lane] - w_release[lane]
                    pending[device] += 1
                    pending_bytes[device] += w_release[lane]
                    orders[position[device]] = (stage * num_microbatches + lane_first[lane] + i) * 4 + 1
                if stage > 0:
                    to = lane - 1
                    when = done + lane_send[1, lane]
                    i_arrival[to * width + i] = when
                    other = lane_device[to]
                    if next_i[to] == i and other != device:
                        when = max(when, free[other])
                        wake[other] = min(wake[other], when)
        else:
            # Sleep until something known arrives; a message not sent yet wakes the device itself.
            wake[device] = soon if soon > now else np.inf
            continue
        position[device] += 1
        ran += 1
        relaxed = False
        free[device] = done
        wake[device] = done
        makespan = max(makespan, done)
    return makespan


@compiled
def orders_of_params(
    params: FloatArray, full_backward: IntArray, chunk: IntArray, lanes: Lanes, limit: FloatArray
) -> tuple[float, IntArray, IntArray]:
    """The orders that a vector of parameters makes for one copy of the model: makespan, orders, offsets.

    The makespan in seconds is inf where `limit` [num_devices], in bytes, does not hold one microbatch.
    """
    num_devices = len(limit)
    v = (len(params) - NUM_SCALARS) // 4
    cost = lanes.cost_s
    load = np.zeros(num_devices)
    share = np.zeros(num_devices)
    offsets = np.zeros(num_devices + 1, dtype=np.int64)
    for stage in range(lanes.num_stages):
        device = lanes.device[stage]
        load[device] += cost[0, stage] + min(cost[1, stage] + cost[2, stage], cost[3, stage])
        share[device] += lanes.num_bytes[stage]
        offsets[device + 1] += lanes.num_microbatches * (2 if full_backward[stage] else 3)
    # The busiest device's seconds a microbatch.
    beat = 0.0
    for device in range(num_devices):
        beat = max(beat, load[device])
    if beat <= 0.0:
        beat = 1.0
    cap = np.empty(num_devices)
    for device in range(num_devices):
        offsets[device + 1] += offsets[device]
        cap[device] = limit[device]
        if params[4 * v + MEMORY_CAP] < np.inf:
            cap[device] = min(limit[device], params[4 * v + MEMORY_CAP] * share[device])
    keys = _keys_of(params, full_backward, chunk, lanes, beat)
    orders = np.empty(offsets[num_devices], dtype=np.int64)
    makespan = generate_orders(lanes, keys, full_backward, params[4 * v :], cap, orders, offsets)
    return makespan, orders, offsets
