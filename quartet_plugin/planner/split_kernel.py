"""The compiled search for the best splits of a pipeline under a mapping: local search, then branch and bound.

An iteration is the longest path through its orders, and every path bounds it from below for every split: it
holds each stage's actions a fixed number of times, so the bound is a constant plus a slope times the layers
of each stage. Evaluating a split yields its longest path; these cuts prune the enumeration exactly.
"""

import numpy as np

from quartet_plugin.cost.iteration.split_kernel import evaluate
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.compilation import compiled

# Cuts that are kept at a time, those of the start left out.
MAX_CUTS = 48
# Operations on bounds that take as long as one simulated action.
FLOPS_OF_ACTION = 32
# Bounds are compared with times beyond this part of the time: rounding.
ROUNDING = 1e-9


@compiled
def step_s(counts: IntArray, placement: IntArray, num_ranks: int, step: FloatArray) -> float:
    """Seconds once an iteration.

    `step` has the fixed seconds, those of a layer's weights on the fullest rank, the ends' weights in layers,
    and the seconds to start a layer's kernels on that rank.
    """
    layers = np.zeros(num_ranks)
    for stage in range(len(placement)):
        layers[placement[stage]] += counts[stage]
    held = layers.copy()
    held[placement[0]] += step[2]
    held[placement[-1]] += step[3]
    fullest = held.argmax()
    return float(step[0] + step[1] * held[fullest] + step[4] * layers[fullest])


@compiled
def balance(
    counts: IntArray, num_layers: int, placement: IntArray, fixed_s: FloatArray, layer_s: FloatArray
) -> None:
    """Add layers to `counts` [S] up to `num_layers`, each to the device that then has the least to do.

    There it goes to the stage with the least to do. `fixed_s` and `layer_s` [S] are a microbatch's.
    """
    num_stages = len(placement)
    loads = np.zeros(int(placement.max()) + 1)
    for stage in range(num_stages):
        loads[placement[stage]] += fixed_s[stage] + counts[stage] * layer_s[stage]
    for _ in range(num_layers - int(counts.sum())):
        chosen, least_s, least_stage_s = 0, np.inf, np.inf
        for stage in range(num_stages):
            then_s = loads[placement[stage]] + layer_s[stage]
            stage_s = fixed_s[stage] + counts[stage] * layer_s[stage]
            if then_s < least_s or (then_s == least_s and stage_s < least_stage_s):
                chosen, least_s, least_stage_s = stage, then_s, stage_s
        counts[chosen] += 1
        loads[placement[chosen]] += layer_s[chosen]


@compiled
def keep(counts: IntArray, seconds: float, best_s: FloatArray, best: IntArray) -> None:
    """Insert a split into the best ones, ascending by time, each once."""
    size = len(best_s)
    if seconds >= best_s[size - 1]:
        return
    for index in range(size):
        if best_s[index] == np.inf:
            break
        is_same = True
        for stage in range(len(counts)):
            if best[index, stage] != counts[stage]:
                is_same = False
                break
        if is_same:
            return
    place = size - 1
    while place > 0 and best_s[place - 1] > seconds:
        best_s[place] = best_s[place - 1]
        best[place] = best[place - 1]
        place -= 1
    best_s[place] = seconds
    best[place] = counts


@compiled
def is_bounded(
    counts: IntArray, const: FloatArray, slope: FloatArray, num_cuts: int, once_s: float, limit_s: float
) -> bool:
    """Whether a cut proves that a split with `once_s` seconds an iteration takes at least `limit_s`."""
    # Element by element: an operation on arrays would allocate one for each cut.
    for cut in range(num_cuts):
        total = 0.0
        for stage in range(len(counts)):
            total += slope[cut, stage] * counts[stage]
        if const[cut] + total + once_s >= limit_s:
            return True
    return once_s >= limit_s


@compiled
def search(
    start: IntArray,
    least: IntArray,
    incumbent_s: float,
    max_work: int,
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
    step: FloatArray,
    best_s: FloatArray,
    best: IntArray,
) -> int:
    """The work done, in simulated actions, negative where the search was cut off at `max_work`.

    Fills `best_s` [k] and `best` [k, S]. Splits that are proven to take no less than `incumbent_s` and than
    the k best found are not visited. `start` is a legal split, `least` [S] the fewest layers of each stage.
    `best_s` stays infinite where nothing can be better.
    """
    num_stages = len(placement)
    num_layers = int(start.sum())
    num_ranks = len(offsets[0]) - 1
    free = num_layers - int(least.sum())
    most_cuts = num_stages + MAX_CUTS
    const, slope = np.zeros(most_cuts), np.zeros((most_cuts, num_stages))
    slopes = np.zeros(num_stages)
    num_actions, work = len(orders), 0
    counts = start.copy()
    # One cut a stage: of the split that puts every free layer there.
    for stage in range(num_stages):
        counts[:] = least
        counts[stage] += free
        seconds = evaluate(
            counts, orders, order_starts, offsets, num_microbatches, order_weights, placement, fixed_s,
            layer_s, sends_s, is_blocking, slopes,
        )  # fmt: skip
        if seconds < 0.0:
            return work
        work += num_actions
        slope[stage] = slopes
        const[stage] = seconds - (slopes * counts).sum()
    num_cuts, next_cut = num_stages, num_stages
    # Their mean over the stages from k on, by which each of these stages bounds the rest about equally.
    mean_const, mean_slope = np.zeros(num_stages + 1), np.zeros((num_stages + 1, num_stages))
    for first in range(num_stages):
        total = 0.0
        for stage in range(first, num_stages):
            share = 1.0 / max(slope[stage, stage], 1e-300)
            total += share
            mean_const[first] += share * const[stage]
            mean_slope[first] += share * slope[stage]
        mean_const[first] /= total
        mean_slope[first] /= total
    # Seconds once an iteration of the split with the least weights on its fullest rank.
    least_held = (num_layers + step[2] + step[3]) / num_ranks
    least_step = step[0] + step[1] * least_held + step[4] * max(0.0, least_held - step[2] - step[3])
    root = mean_const[0] + (mean_slope[0] * least).sum() + free * mean_slope[0].min() + least_step
    if root >= incumbent_s * (1.0 - ROUNDING):
        return work
    # Local search: the best move of one layer, while one is better.
    counts[:] = start
    seconds = evaluate(
        counts, orders, order_starts, offsets, num_microbatches, order_weights, placement, fixed_s,
        layer_s, sends_s, is_blocking, slopes,
    )  # fmt: skip
    current_s = seconds + step_s(counts, placement, num_ranks, step)
    keep(counts, current_s, best_s, best)
    current = counts.copy()
    while True:
        better_s, source, target = current_s, -1, -1
        for donor in range(num_stages):
            if current[donor] <= least[donor]:
                continue
            for taker in range(num_stages):
                if taker == donor:
                    continue
                counts[:] = current
                counts[donor] -= 1
                counts[taker] += 1
                if work > max_work:
                    return -work
                work += 1 + num_cuts * num_stages // FLOPS_OF_ACTION
                once = step_s(counts, placement, num_ranks, step)
                if is_bounded(counts, const, slope, num_cuts, once, better_s):
                    continue
                seconds = evaluate(
                    counts, orders, order_starts, offsets, num_microbatches, order_weights, placement,
                    fixed_s, layer_s, sends_s, is_blocking, slopes,
                )  # fmt: skip
                work += num_actions
                slope[next_cut] = slopes
                const[next_cut] = seconds - (slopes * counts).sum()
                num_cuts = max(num_cuts, next_cut + 1)
                next_cut = next_cut + 1 if next_cut + 1 < most_cuts else num_stages
                keep(counts, seconds + once, best_s, best)
                if seconds + once < better_s * (1.0 - ROUNDING):
                    better_s, source, target = seconds + once, donor, taker
        if source < 0:
            break
        current[source] -= 1
        current[target] += 1
        current_s = better_s
    # Branch and bound over the stages in order.
    limit = min(incumbent_s, best_s[-1])
    least_after = np.zeros(num_stages + 1, dtype=np.int64)
    for stage in range(num_stages - 1, -1, -1):
        least_after[stage] = least_after[stage + 1] + least[stage]
    counts[:] = 0
    used = np.zeros(num_stages + 1, dtype=np.int64)
    value = np.full(num_stages, -1, dtype=np.int64)
    depth = 0
    while depth >= 0:
        value[depth] = least[depth] if value[depth] < 0 else value[depth] + 1
        is_last = depth == num_stages - 1
        rest = num_layers - used[depth]
        if is_last and value[depth] <= rest:
            value[depth] = max(value[depth], rest)
        if value[depth] > rest - least_after[depth + 1]:
            value[depth] = -1
            depth -= 1
            continue
        if work > max_work:
            return -work
        work += 1 + num_cuts * num_stages // FLOPS_OF_ACTION
        counts[depth] = value[depth]
        used[depth + 1] = used[depth] + value[depth]
        spare = num_layers - used[depth + 1] - least_after[depth + 1]
        bound = 0.0
        for cut in range(num_cuts):
            value_s = const[cut]
            for stage in range(depth + 1):
                value_s += slope[cut, stage] * counts[stage]
            steepest = np.inf
            for stage in range(depth + 1, num_stages):
                value_s += slope[cut, stage] * least[stage]
                steepest = min(steepest, slope[cut, stage])
            if spare > 0:
                value_s += spare * steepest
            bound = max(bound, value_s)
        if not is_last:
            value_s = mean_const[depth + 1]
            for stage in range(depth + 1):
                value_s += mean_slope[depth + 1, stage] * counts[stage]
            steepest = np.inf
            for stage in range(depth + 1, num_stages):
                value_s += mean_slope[depth + 1, stage] * least[stage]
                steepest = min(steepest, mean_slope[depth + 1, stage])
            bound = max(bound, value_s + spare * steepest)
        if bound + least_step >= limit * (1.0 - ROUNDING):
            continue
        if not is_last:
            depth += 1
            continue
        once = step_s(counts, placement, num_ranks, step)
        if bound + once >= limit * (1.0 - ROUNDING):
            continue
        seconds = evaluate(
            counts, orders, order_starts, offsets, num_microbatches, order_weights, placement, fixed_s,
            layer_s, sends_s, is_blocking, slopes,
        )  # fmt: skip
        work += num_actions
        slope[next_cut] = slopes
        const[next_cut] = seconds - (slopes * counts).sum()
        num_cuts = max(num_cuts, next_cut + 1)
        next_cut = next_cut + 1 if next_cut + 1 < most_cuts else num_stages
        keep(counts, seconds + once, best_s, best)
        limit = min(limit, best_s[-1])
    return work
