"""The compiled time of a pipeline by the layers of its stages, and the seconds of one more layer on each."""

import numpy as np

from quartet_plugin.cost.iteration.replay import SAME, critical_path, with_sends
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.compilation import compiled


@compiled
def evaluate(
    counts: IntArray,
    orders: IntArray,
    order_starts: IntArray,
    offsets: IntArray,
    num_microbatches: IntArray,
    order_weights: FloatArray,
    placement: IntArray,
    fixed_s: FloatArray,
    layer_s: FloatArray,
    sends_s: FloatArray,
    is_blocking: bool,
    slopes: FloatArray,
) -> float:
    """Seconds of the pipeline's part of an iteration, -1 where the orders do not run.

    Fills `slopes` [S] with the seconds of one more layer on each stage along the longest path. Several orders
    lie behind each other in `orders`, from `order_starts` on; `offsets` [num_orders, pp + 1].
    """
    num_stages = len(placement)
    slopes[:] = 0.0
    work = np.zeros((3, num_stages))
    sends = np.zeros((2, num_stages))
    for stage in range(num_stages):
        for way in range(3):
            work[way, stage] = fixed_s[way, stage] + counts[stage] * layer_s[way, stage]
    for stage in range(num_stages - 1):
        sends[0, stage] = sends_s[stage]
        sends[1, stage + 1] = sends_s[stage]
    times, passing = with_sends(work, sends, is_blocking)
    seconds = 0.0
    for index in range(len(order_weights)):
        actions = np.zeros((4, num_stages))
        passed = np.zeros((2, num_stages))
        route = np.zeros(num_microbatches[index], dtype=np.int64)
        span = critical_path(
            orders[order_starts[index] : order_starts[index + 1]],
            offsets[index],
            placement,
            route,
            times,
            passing,
            SAME,
            actions,
            passed,
        )
        if span < 0.0:
            return -1.0
        seconds += order_weights[index] * span
        for stage in range(num_stages):
            full = actions[3, stage]
            slopes[stage] += order_weights[index] * (
                actions[0, stage] * layer_s[0, stage]
                + (actions[1, stage] + full) * layer_s[1, stage]
                + (actions[2, stage] + full) * layer_s[2, stage]
            )
    return float(seconds)
