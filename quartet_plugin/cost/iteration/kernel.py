"""The compiled part of the iteration model: seconds and their slopes by the coefficients' logarithms."""

import numpy as np

from quartet_plugin.cost.coefficients import INDEX, Coefficient
from quartet_plugin.cost.iteration.replay import SAME, critical_path, with_sends
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.compilation import compiled

SPEED, RUNTIME = INDEX[Coefficient.SPEED], INDEX[Coefficient.RUNTIME]
INPUT_GRAD, WEIGHT_GRAD = INDEX[Coefficient.INPUT_GRAD], INDEX[Coefficient.WEIGHT_GRAD]
# The coefficients of the rows of `unslowed`.
UNSLOWED = np.array(
    [
        INDEX[Coefficient.TENSOR],
        INDEX[Coefficient.CONTEXT],
        INDEX[Coefficient.EXPERTS],
        INDEX[Coefficient.ACTION],
    ]
)
TRANSFER, NETWORK, LATENCY = (
    INDEX[Coefficient.TRANSFER],
    INDEX[Coefficient.NETWORK],
    INDEX[Coefficient.LATENCY],
)


@compiled
def stage_work(
    scale: FloatArray,
    compute: FloatArray,
    unslowed: FloatArray,
    slot_indices: IntArray,
    core_slowdown: FloatArray,
    placement: IntArray,
    is_custom: bool,
) -> tuple[FloatArray, FloatArray, IntArray]:
    """The stages' seconds of a microbatch by direction [3, S], their slowdowns and the coefficients' indices.

    The arguments are those of `pipeline_time`.
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
    work = np.zeros((3, num_stages))
    for way in range(3):
        for stage in range(num_stages):
            total = 0.0
            for cause in range(num_causes):
                total += scale[cause] * compute[cause, way, stage]
            work[way, stage] = total * speed * direction[way] * slowdown[stage]
            for row in range(len(UNSLOWED)):
                work[way, stage] += scale[UNSLOWED[row]] * unslowed[row, way, stage]
    return work, slowdown, slowdown_index


@compiled
def scaled_sends(scale: FloatArray, sends: FloatArray) -> FloatArray:
    """Seconds of each stage's transfers to the next and to the one before [2, S]; see `pipeline_time`."""
    num_stages = sends.shape[1]
    scaled = np.zeros((2, num_stages))
    for stage in range(num_stages - 1):
        scaled[0, stage] = (
            scale[TRANSFER] * sends[0, stage]
            + scale[NETWORK] * sends[1, stage]
            + scale[LATENCY] * sends[2, stage]
        )
        scaled[1, stage + 1] = scaled[0, stage]
    return scaled


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
    direction, `unslowed` [4, 3, S] the work that no slowdown touches (by `UNSLOWED`: collectives of tensor,
    context and expert parallelism, action starts), `sends` [3, S] the transfer from each stage to the next
    (intra-node, inter-node, latency). `slot_indices` [pp, slots a rank] are the coefficients' indices of the
    slots' slowdowns, empty where no slot has one; `core_slowdown` [pp] is the slowdown by core
    sharing, held constant. Without orders every action counts as often as `counts_without_orders` [3, S]
    says.
    """
    num_causes, num_stages = compute.shape[0], compute.shape[2]
    speed = scale[SPEED] * (scale[RUNTIME] if is_custom else 1.0)
    direction = np.array([1.0, scale[INPUT_GRAD], scale[WEIGHT_GRAD]])
    work, slowdown, slowdown_index = stage_work(
        scale, compute, unslowed, slot_indices, core_slowdown, placement, is_custom
    )
    times, delays = with_sends(work, scaled_sends(scale, sends), is_blocking)
    counts = counts_without_orders.copy()
    # Where ranks wait for their sends, each goes with an action; elsewhere those count that delay the path.
    passed = np.zeros((2, num_stages))
    seconds = 0.0
    if len(orders) == 0:
        for way in range(3):
            for stage in range(num_stages):
                seconds += counts[way, stage] * times[way, stage]
    else:
        actions = np.zeros((4, num_stages))
        route = np.zeros(num_microbatches, dtype=np.int64)
        seconds = critical_path(orders, offsets, placement, route, times, delays, SAME, actions, passed)
        if seconds < 0.0:
            return -1.0
        counts[0] = actions[0]
        counts[1] = actions[1] + actions[3]
        counts[2] = actions[2] + actions[3]
    if is_blocking:
        passed[0], passed[1] = counts[0], counts[1]
    sent = np.zeros(num_stages)
    for stage in range(num_stages - 1):
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
            for row in range(len(UNSLOWED)):
                slopes[UNSLOWED[row]] += scale[UNSLOWED[row]] * unslowed[row, way, stage] * count
    return float(seconds)


@compiled
def stage_times(
    scales: FloatArray,
    compute: FloatArray,
    unslowed: FloatArray,
    slot_indices: IntArray,
    core_slowdown: FloatArray,
    placement: IntArray,
    sends: FloatArray,
    is_blocking: bool,
    is_custom: bool,
) -> tuple[FloatArray, FloatArray]:
    """The times of actions [4, S, num] by kind, and the sends that delay their receiver alone [2, S, num].

    They are those under each row of `scales` [num, num_coefficients]; the other arguments are those of
    `pipeline_time`.
    """
    num, num_stages = len(scales), compute.shape[2]
    times, delays = np.zeros((4, num_stages, num)), np.zeros((2, num_stages, num))
    for row in range(num):
        work, _, _ = stage_work(
            scales[row], compute, unslowed, slot_indices, core_slowdown, placement, is_custom
        )
        timed, left = with_sends(work, scaled_sends(scales[row], sends), is_blocking)
        for stage in range(num_stages):
            for kind in range(4):
                times[kind, stage, row] = timed[kind, stage]
            for way in range(2):
                delays[way, stage, row] = left[way, stage]
    return times, delays
