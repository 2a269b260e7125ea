"""The compiled part of the iteration model: seconds and their slopes by the coefficients' logarithms."""

import numpy as np

from quartet_plugin.cost.coefficients import INDEX, Coefficient
from quartet_plugin.cost.critical_path import SAME, critical_path
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule import kernel

SPEED, RUNTIME = INDEX[Coefficient.SPEED], INDEX[Coefficient.RUNTIME]
INPUT_GRAD, WEIGHT_GRAD = INDEX[Coefficient.INPUT_GRAD], INDEX[Coefficient.WEIGHT_GRAD]
TENSOR, CONTEXT, ACTION = INDEX[Coefficient.TENSOR], INDEX[Coefficient.CONTEXT], INDEX[Coefficient.ACTION]
TRANSFER, NETWORK, LATENCY = (
    INDEX[Coefficient.TRANSFER],
    INDEX[Coefficient.NETWORK],
    INDEX[Coefficient.LATENCY],
)


@kernel.compiled
def pipeline_time(
    scale: FloatArray,
    compute: FloatArray,
    beside: FloatArray,
    members: IntArray,
    stretch: FloatArray,
    placement: IntArray,
    sends: FloatArray,
    is_blocking: bool,
    is_own: bool,
    given: FloatArray,
    orders: IntArray,
    offsets: IntArray,
    num_microbatches: int,
    slopes: FloatArray,
) -> float:
    """Seconds, -1 where the orders do not run; adds to `slopes` [num_coefficients].

    `scale` [num_coefficients] are the factors; `compute` [num_causes, 3, S] and `beside` [3, 3, S] (tensor
    parallel, context parallel, action) the work of the stages by direction, `sends` [3, S] (near, far,
    latency) what each stage's transfer to the next takes; `members` [pp, slots a rank] the pace factors,
    empty where there are none, `stretch` [pp] how many times as long compute takes beside others
    on the same cores, taken as given. Without orders the work counts as often as `given` [3, S] says.
    """
    num_causes, num_stages = compute.shape[0], compute.shape[2]
    whole = scale[SPEED] * (scale[RUNTIME] if is_own else 1.0)
    direction = np.array([1.0, scale[INPUT_GRAD], scale[WEIGHT_GRAD]])
    pace_at = np.full(num_stages, -1)
    pace = np.ones(num_stages)
    if members.shape[0] > 0:
        for stage in range(num_stages):
            row = placement[stage]
            at = members[row, 0]
            for other in members[row]:
                if scale[other] > scale[at]:
                    at = other
            pace_at[stage] = at
            pace[stage] = scale[at]
    for stage in range(num_stages):
        pace[stage] *= stretch[placement[stage]]
    work = np.zeros((4, num_stages))
    for way in range(3):
        for stage in range(num_stages):
            total = 0.0
            for cause in range(num_causes):
                total += scale[cause] * compute[cause, way, stage]
            work[way, stage] = (
                total * whole * direction[way] * pace[stage]
                + scale[TENSOR] * beside[0, way, stage]
                + scale[CONTEXT] * beside[1, way, stage]
                + scale[ACTION] * beside[2, way, stage]
            )
    counts = given.copy()
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
        seconds = critical_path(
            orders,
            offsets,
            num_stages,
            num_microbatches,
            placement,
            times,
            sends_s,
            route,
            SAME,
            actions,
            passed,
        )
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
            often = counts[way, stage]
            if often == 0.0:
                continue
            factor = whole * direction[way] * pace[stage] * often
            total = 0.0
            for cause in range(num_causes):
                spent = scale[cause] * compute[cause, way, stage] * factor
                slopes[cause] += spent
                total += spent
            slopes[SPEED] += total
            if is_own:
                slopes[RUNTIME] += total
            if way == 1:
                slopes[INPUT_GRAD] += total
            elif way == 2:
                slopes[WEIGHT_GRAD] += total
            if pace_at[stage] >= 0:
                slopes[pace_at[stage]] += total
            slopes[TENSOR] += scale[TENSOR] * beside[0, way, stage] * often
            slopes[CONTEXT] += scale[CONTEXT] * beside[1, way, stage] * often
            slopes[ACTION] += scale[ACTION] * beside[2, way, stage] * often
    return float(seconds)
