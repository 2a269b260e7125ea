"""The compiled part of the iteration model: seconds and their slopes by the coefficients' logarithms."""

import numpy as np

from quartet_plugin.cost.coefficients import INDEX, Coefficient
from quartet_plugin.cost.critical_path import SAME, critical_path
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.compilation import compiled

SPEED, RUNTIME = INDEX[Coefficient.SPEED], INDEX[Coefficient.RUNTIME]
INPUT_GRAD, WEIGHT_GRAD = INDEX[Coefficient.INPUT_GRAD], INDEX[Coefficient.WEIGHT_GRAD]
TENSOR, CONTEXT, ACTION = INDEX[Coefficient.TENSOR], INDEX[Coefficient.CONTEXT], INDEX[Coefficient.ACTION]
TRANSFER, NETWORK, LATENCY = (
    INDEX[Coefficient.TRANSFER],
    INDEX[Coefficient.NETWORK],
    INDEX[Coefficient.LATENCY],
)


@compiled
def pipeline_time(
    scale: FloatArray,
    compute: FloatArray,
    unslowed: FloatArray,
    slot_indices: IntArray,
    core_slowdown: FloatArray,
    placement: IntArray,
    sends: FloatArray,
    is_blocking: bool,
    is_custom: bool,
    counts_without_orders: FloatArray,
    orders: IntArray,
    offsets: IntArray,
    num_microbatches: int,
    slopes: FloatArray,
) -> float:
    """Seconds, -1 where the orders do not run; adds to `slopes` [num_coefficients].

    `scale` [num_coefficients] are the coefficients; `compute` [num_causes, 3, S] is the stages' compute by
    direction, `unslowed` [3, 3, S] the work that no slowdown touches (tensor parallel, context parallel,
    action starts), `sends` [3, S] the transfer from each stage to the next (intra-node, inter-node, latency).
    `slot_indices` [pp, slots a rank] are the coefficients' indices of the slots' slowdowns, empty where slots
    are not told apart; `core_slowdown` [pp] is the slowdown by core sharing, held constant. Without orders
    every action counts as often as `counts_without_orders` [3, S] says.
    """
    num_causes, num_stages = compute.shape[0], compute.shape[2]
    speed = scale[SPEED] * (scale[RUNTIME] if is_custom else 1.0)
    direction = np.array([1.0, scale[INPUT_GRAD], scale[WEIGHT_GRAD]])
    slowdown_index = np.full(num_stages, -1)
    slowdown = np.ones(num_stages)
    if slot_indices.shape[0] > 0:
        for stage in range(num_stages):
            row = placement[stage]
            slowest = slot_indices[row, 0]
            for other in slot_indices[row]:
                if scale[other] > scale[slowest]:
                    slowest = other
            slowdown_index[stage] = slowest
            slowdown[stage] = scale[slowest]
    for stage in range(num_stages):
        slowdown[stage] *= core_slowdown[placement[stage]]
    work = np.zeros((4, num_stages))
    for way in range(3):
        for stage in range(num_stages):
            total = 0.0
            for cause in range(num_causes):
                total += scale[cause] * compute[cause, way, stage]
            work[way, stage] = (
                total * speed * direction[way] * slowdown[stage]
                + scale[TENSOR] * unslowed[0, way, stage]
                + scale[CONTEXT] * unslowed[1, way, stage]
                + scale[ACTION] * unslowed[2, way, stage]
            )
    counts = counts_without_orders.copy()
    sent = np.zeros(num_stages)
    seconds = 0.0
    if len(orders) == 0:
        for way in range(3):
            for stage in range(num_stages):
                seconds += counts[way, stage] * work[way, stage]
    else:
        times = work.copy()
        sends_s = np.zeros((2, num_stages))
        for stage in range(num_stages - 1):
            send = (
                scale[TRANSFER] * sends[0, stage]
                + scale[NETWORK] * sends[1, stage]
                + scale[LATENCY] * sends[2, stage]
            )
            if is_blocking:
                times[0, stage] += send
                times[1, stage + 1] += send
            else:
                sends_s[0, stage] = send
                sends_s[1, stage + 1] = send
        times[3] = times[1] + times[2]
        actions = np.zeros((4, num_stages))
        passed = np.zeros((2, num_stages))
        route = np.zeros(num_microbatches, dtype=np.int64)
        seconds = critical_path(orders, offsets, placement, route, times, sends_s, SAME, actions, passed)
        if seconds < 0.0:
            return -1.0
        for stage in range(num_stages):
            counts[0, stage] = actions[0, stage]
            counts[1, stage] = actions[1, stage] + actions[3, stage]
            counts[2, stage] = actions[2, stage] + actions[3, stage]
        for stage in range(num_stages - 1):
            if is_blocking:
                sent[stage] = counts[0, stage] + counts[1, stage + 1]
            else:
                sent[stage] = passed[0, stage] + passed[1, stage + 1]
    for stage in range(num_stages):
        slopes[TRANSFER] += scale[TRANSFER] * sent[stage] * sends[0, stage]
        slopes[NETWORK] += scale[NETWORK] * sent[stage] * sends[1, stage]
        slopes[LATENCY] += scale[LATENCY] * sent[stage] * sends[2, stage]
        for way in range(3):
            count = counts[way, stage]
            if count == 0.0:
                continue
            multiplier = speed * direction[way] * slowdown[stage] * count
            total = 0.0
            for cause in range(num_causes):
                spent = scale[cause] * compute[cause, way, stage] * multiplier
                slopes[cause] += spent
                total += spent
            slopes[SPEED] += total
            if is_custom:
                slopes[RUNTIME] += total
            if way == 1:
                slopes[INPUT_GRAD] += total
            elif way == 2:
                slopes[WEIGHT_GRAD] += total
            if slowdown_index[stage] >= 0:
                slopes[slowdown_index[stage]] += total
            slopes[TENSOR] += scale[TENSOR] * unslowed[0, way, stage] * count
            slopes[CONTEXT] += scale[CONTEXT] * unslowed[1, way, stage] * count
            slopes[ACTION] += scale[ACTION] * unslowed[2, way, stage] * count
    return float(seconds)
