"""The compiled time of a pipeline by the layers of its stages, and the seconds of one more layer on each."""

from typing import NamedTuple

import numpy as np

from quartet_plugin.cost.iteration.replay import SAME, critical_path, with_sends
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.compilation import compiled


class SplitArrays(NamedTuple):
    """A pipeline whose layers are free, as kernels take it: `SplitTimes` in arrays, S stages.

    Several orders lie behind each other in `orders`, from `order_starts` on; `offsets` [num_orders, pp + 1].
    An iteration is the sum of their times by `order_weights`. `fixed_s` [3, S] and `layer_s`
    [num_kinds, 3, S] are the seconds of F, I and W besides the layers and of one layer of each kind,
    `sends_s` [S - 1] those between stages. `before` is that of `SplitTimes`.
    """

    orders: IntArray
    order_starts: IntArray
    offsets: IntArray
    num_microbatches: IntArray
    order_weights: FloatArray
    placement: IntArray
    fixed_s: FloatArray
    layer_s: FloatArray
    sends_s: FloatArray
    is_blocking: bool
    before: IntArray


@compiled
def counts_by_kind(counts: IntArray, before: IntArray) -> IntArray:
    """The layers of each kind on each stage [num_kinds, S] of a split; `before` is that of `SplitTimes`."""
    num_kinds, num_stages = len(before), len(counts)
    held = np.zeros((num_kinds, num_stages), dtype=np.int64)
    if before.shape[1] == 0:
        held[0] = counts
        return held
    first = 0
    for stage in range(num_stages):
        end = first + counts[stage]
        for kind in range(num_kinds):
            held[kind, stage] = before[kind, end] - before[kind, first]
        first = end
    return held


@compiled
def busiest_work(times: FloatArray, placement: IntArray, layer_s: FloatArray, slopes: FloatArray) -> float:
    """Seconds of work a microbatch on the busiest rank.

    Fills `slopes` [num_kinds, S] with those of one more layer of each kind.
    """
    num_stages = len(placement)
    work_s = np.zeros(int(placement.max()) + 1)
    for stage in range(num_stages):
        work_s[placement[stage]] += times[0, stage] + times[1, stage] + times[2, stage]
    busiest = work_s.argmax()
    for kind in range(len(layer_s)):
        for stage in range(num_stages):
            layer = layer_s[kind, 0, stage] + layer_s[kind, 1, stage] + layer_s[kind, 2, stage]
            slopes[kind, stage] = layer if placement[stage] == busiest else 0.0
    return float(work_s[busiest])


@compiled
def evaluate(counts: IntArray, pipeline: SplitArrays, slopes: FloatArray) -> tuple[float, float]:
    """Seconds of the pipeline's part of an iteration, and of its longest path; -1 where orders do not run.

    `counts` [num_kinds, S] are the layers. `slopes` [num_kinds, S] becomes the seconds of one more layer of
    each kind on each stage along the path. Where the time is extrapolated from two orders, it is at least the
    busiest rank's work, and the path is the shorter order's with the busiest rank's work of each further
    microbatch: a difference of two longest paths is no bound.
    """
    placement, fixed_s, layer_s = pipeline.placement, pipeline.fixed_s, pipeline.layer_s
    order_starts, order_weights = pipeline.order_starts, pipeline.order_weights
    num_stages, num_orders, num_kinds = len(placement), len(order_weights), len(layer_s)
    slopes[:] = 0.0
    work = np.zeros((3, num_stages))
    sends = np.zeros((2, num_stages))
    for stage in range(num_stages):
        for way in range(3):
            work[way, stage] = fixed_s[way, stage]
            for kind in range(num_kinds):
                work[way, stage] += counts[kind, stage] * layer_s[kind, way, stage]
    for stage in range(num_stages - 1):
        sends[0, stage] = pipeline.sends_s[stage]
        sends[1, stage + 1] = pipeline.sends_s[stage]
    times, passing = with_sends(work, sends, pipeline.is_blocking)
    busy_slopes = np.zeros((num_kinds, num_stages))
    busy_s = busiest_work(times, placement, layer_s, busy_slopes)
    seconds, path_s, total = 0.0, 0.0, 0.0
    for index in range(num_orders):
        weight, size = order_weights[index], pipeline.num_microbatches[index]
        actions = np.zeros((4, num_stages))
        passed = np.zeros((2, num_stages))
        route = np.zeros(size, dtype=np.int64)
        span = critical_path(
            pipeline.orders[order_starts[index] : order_starts[index + 1]],
            pipeline.offsets[index],
            placement,
            route,
            times,
            passing,
            SAME,
            actions,
            passed,
        )
        if span < 0.0:
            return -1.0, -1.0
        seconds += weight * span
        total += weight * size
        # A longer order and the shorter one behind it, which has a negative weight, are extrapolated from.
        if index + 1 < num_orders and order_weights[index + 1] < 0.0:
            continue
        share, further = weight, 0.0
        if weight < 0.0:
            share += order_weights[index - 1]
            further = order_weights[index - 1] * (pipeline.num_microbatches[index - 1] - size)
        path_s += share * span + further * busy_s
        for kind in range(num_kinds):
            for stage in range(num_stages):
                full = actions[3, stage]
                slopes[kind, stage] += further * busy_slopes[kind, stage] + share * (
                    actions[0, stage] * layer_s[kind, 0, stage]
                    + (actions[1, stage] + full) * layer_s[kind, 1, stage]
                    + (actions[2, stage] + full) * layer_s[kind, 2, stage]
                )
    if num_orders > 1:
        seconds = max(seconds, total * busy_s)
    return float(seconds), float(min(path_s, seconds))
