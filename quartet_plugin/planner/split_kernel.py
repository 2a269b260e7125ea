"""The compiled search for the best splits of a pipeline under a mapping: local search, then branch and bound.

An iteration is the longest path through its orders, and every path bounds it from below for every split: it
holds each stage's actions a fixed number of times, so the bound is a constant plus a slope times the layers
of each kind on each stage. Evaluating a split yields its longest path; these cuts prune the enumeration
exactly.
"""

from typing import NamedTuple

import numpy as np

from quartet_plugin.cost.iteration.split_kernel import SplitArrays, counts_by_kind, evaluate
from quartet_plugin.cost.iteration.split_model import StepLine
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.compilation import compiled

# Cuts that are kept at a time, those of the start left out.
MAX_CUTS = 48
# Operations on bounds that take as long as one simulated action.
FLOPS_OF_ACTION = 32
# Bounds are compared with times beyond this part of the time: rounding.
ROUNDING = 1e-9


# In `Cuts.places`: how many are kept, and which of them the next one replaces.
NUM_CUTS, NEXT_CUT = range(2)


class Cuts(NamedTuple):
    """Lower bounds of a split's pipeline: `const[cut]` + `slope[cut]` @ layers of each kind, in seconds.

    `const` [most], `slope` [most, num_kinds, S]. The first S are of the start and stay, the others are
    replaced in turn.
    """

    const: FloatArray
    slope: FloatArray
    places: IntArray


class Best(NamedTuple):
    """The best splits found, ascending by time, each once: `counts` [k, S] in `seconds` [k], else inf."""

    seconds: FloatArray
    counts: IntArray


@compiled
def step_s(counts: IntArray, placement: IntArray, num_ranks: int, step: StepLine) -> float:
    """Seconds once an iteration of a split; `counts` are its layers of each kind [num_kinds, S]."""
    held, layers = np.zeros(num_ranks), np.zeros((len(counts), num_ranks))
    for kind in range(len(counts)):
        for stage in range(len(placement)):
            held[placement[stage]] += counts[kind, stage] * step.weights[kind]
            layers[kind, placement[stage]] += counts[kind, stage]
    held[placement[0]] += step.first
    held[placement[-1]] += step.last
    if step.mtp:
        held[placement[-2]] += step.mtp
    fullest = held.argmax()
    seconds = step.fixed_s + step.per_layer_s * held[fullest]
    for kind in range(len(counts)):
        seconds += step.start_s[kind] * layers[kind, fullest]
    return float(seconds)


@compiled
def balance(
    counts: IntArray,
    num_layers: int,
    placement: IntArray,
    fixed_s: FloatArray,
    layer_s: FloatArray,
    num_layer_stages: int,
) -> None:
    """Add layers to `counts` [S] up to `num_layers`, each to the device that then has the least to do.

    There it goes to the stage with the least to do, one of the first `num_layer_stages`. `fixed_s` and
    `layer_s` [S] are a microbatch's.
    """
    num_stages = len(placement)
    loads = np.zeros(int(placement.max()) + 1)
    for stage in range(num_stages):
        loads[placement[stage]] += fixed_s[stage] + counts[stage] * layer_s[stage]
    for _ in range(num_layers - int(counts.sum())):
        chosen, least_s, least_stage_s = 0, np.inf, np.inf
        for stage in range(num_layer_stages):
            then_s = loads[placement[stage]] + layer_s[stage]
            stage_s = fixed_s[stage] + counts[stage] * layer_s[stage]
            if then_s < least_s or (then_s == least_s and stage_s < least_stage_s):
                chosen, least_s, least_stage_s = stage, then_s, stage_s
        counts[chosen] += 1
        loads[placement[chosen]] += layer_s[chosen]


@compiled
def keep(counts: IntArray, seconds: float, best: Best) -> None:
    """Insert a split into the best ones."""
    size = len(best.seconds)
    if seconds >= best.seconds[size - 1]:
        return
    for index in range(size):
        if best.seconds[index] == np.inf:
            break
        is_same = True
        for stage in range(len(counts)):
            if best.counts[index, stage] != counts[stage]:
                is_same = False
                break
        if is_same:
            return
    place = size - 1
    while place > 0 and best.seconds[place - 1] > seconds:
        best.seconds[place] = best.seconds[place - 1]
        best.counts[place] = best.counts[place - 1]
        place -= 1
    best.seconds[place] = seconds
    best.counts[place] = counts


@compiled
def is_bounded(counts: IntArray, cuts: Cuts, once_s: float, limit_s: float) -> bool:
    """Whether a cut proves that a split with `once_s` seconds an iteration takes at least `limit_s`.

    `counts` are its layers of each kind [num_kinds, S].
    """
    # Element by element: an operation on arrays would allocate one for each cut.
    for cut in range(cuts.places[NUM_CUTS]):
        total = 0.0
        for kind in range(counts.shape[0]):
            for stage in range(counts.shape[1]):
                total += cuts.slope[cut, kind, stage] * counts[kind, stage]
        if cuts.const[cut] + total + once_s >= limit_s:
            return True
    return once_s >= limit_s


@compiled
def seconds_and_cut(counts: IntArray, pipeline: SplitArrays, cuts: Cuts) -> float:
    """Seconds of a split's pipeline, -1 where the orders do not run; its longest path becomes a cut.

    `counts` are its layers of each kind [num_kinds, S].
    """
    num_stages = counts.shape[1]
    cut = cuts.places[NEXT_CUT]
    seconds, path_s = evaluate(counts, pipeline, cuts.slope[cut])
    if seconds < 0.0:
        return seconds
    cuts.const[cut] = path_s - (cuts.slope[cut] * counts).sum()
    cuts.places[NUM_CUTS] = max(cuts.places[NUM_CUTS], cut + 1)
    cuts.places[NEXT_CUT] = cut + 1 if cut + 1 < len(cuts.const) else num_stages
    return seconds


@compiled
def cuts_of_stages(least: IntArray, free: int, pipeline: SplitArrays) -> Cuts:
    """One cut a stage, of the split that puts all `free` layers there; fewer where the orders do not run."""
    num_stages, num_kinds = len(least), len(pipeline.layer_s)
    most = num_stages + MAX_CUTS
    cuts = Cuts(np.zeros(most), np.zeros((most, num_kinds, num_stages)), np.zeros(2, dtype=np.int64))
    for stage in range(num_stages):
        counts = least.copy()
        counts[stage] += free
        if seconds_and_cut(counts_by_kind(counts, pipeline.before), pipeline, cuts) < 0.0:
            break
    return cuts


@compiled
def mean_cuts(cuts: Cuts) -> Cuts:
    """The mean of the cuts of each stage and of all later ones, which bounds these about equally."""
    num_kinds, num_stages = cuts.slope.shape[1:]
    const, slope = np.zeros(num_stages + 1), np.zeros((num_stages + 1, num_kinds, num_stages))
    for first in range(num_stages):
        total = 0.0
        for stage in range(first, num_stages):
            share = 1.0 / max(cuts.slope[stage, :, stage].max(), 1e-300)
            total += share
            const[first] += share * cuts.const[stage]
            slope[first] += share * cuts.slope[stage]
        const[first] /= total
        slope[first] /= total
    return Cuts(const, slope, np.full(2, num_stages))


@compiled
def least_step_s(totals: IntArray, num_ranks: int, step: StepLine) -> float:
    """Seconds once an iteration of the split with the least weights on its fullest rank.

    `totals` [num_kinds] are all layers of each kind.
    """
    held, start_s = 0.0, np.inf
    for kind in range(len(totals)):
        held += totals[kind] * step.weights[kind]
        start_s = min(start_s, step.start_s[kind] / step.weights[kind])
    held = (held + step.first + step.last + step.mtp) / num_ranks
    layers = max(0.0, held - step.first - step.last - step.mtp)
    return float(step.fixed_s + step.per_layer_s * held + start_s * layers)


@compiled
def descend(
    start: IntArray,
    least: IntArray,
    pipeline: SplitArrays,
    step: StepLine,
    cuts: Cuts,
    best: Best,
    work: int,
    max_work: int,
    num_layer_stages: int,
) -> int:
    """Local search: the best move of one layer, while one is better. The work, negative where cut off."""
    num_stages, num_ranks = len(start), pipeline.offsets.shape[1] - 1
    counts, current = start.copy(), start.copy()
    held = counts_by_kind(counts, pipeline.before)
    current_s, _ = evaluate(held, pipeline, np.empty(held.shape))
    current_s += step_s(held, pipeline.placement, num_ranks, step)
    keep(counts, current_s, best)
    while True:
        better_s, source, target = current_s, -1, -1
        for donor in range(num_stages):
            if current[donor] <= least[donor]:
                continue
            for taker in range(num_layer_stages):
                if taker == donor:
                    continue
                counts[:] = current
                counts[donor] -= 1
                counts[taker] += 1
                if work > max_work:
                    return -work
                work += 1 + cuts.places[NUM_CUTS] * num_stages // FLOPS_OF_ACTION
                held = counts_by_kind(counts, pipeline.before)
                once_s = step_s(held, pipeline.placement, num_ranks, step)
                if is_bounded(held, cuts, once_s, better_s):
                    continue
                seconds = seconds_and_cut(held, pipeline, cuts) + once_s
                work += len(pipeline.orders)
                keep(counts, seconds, best)
                if seconds < better_s * (1.0 - ROUNDING):
                    better_s, source, target = seconds, donor, taker
        if source < 0:
            return work
        current[source] -= 1
        current[target] += 1
        current_s = better_s


@compiled
def rest_s(
    cut: int, depth: int, held: IntArray, left: IntArray, least: IntArray, spare: int, cuts: Cuts
) -> float:
    """What a cut proves of the splits that begin with `held` up to stage `depth`, in seconds.

    The `spare` layers beyond `least` of the later stages go where the cut is flattest; or, of several kinds,
    all `left` [num_kinds] of each kind go where it is flattest for that kind.
    """
    num_kinds, num_stages = held.shape
    seconds = cuts.const[cut]
    for kind in range(num_kinds):
        for stage in range(depth + 1):
            seconds += cuts.slope[cut, kind, stage] * held[kind, stage]
    if num_kinds > 1:
        for kind in range(num_kinds):
            if left[kind] > 0:
                seconds += left[kind] * cuts.slope[cut, kind, depth + 1 :].min()
        return float(seconds)
    flattest = np.inf
    for stage in range(depth + 1, num_stages):
        seconds += cuts.slope[cut, 0, stage] * least[stage]
        flattest = min(flattest, cuts.slope[cut, 0, stage])
    if spare > 0:
        seconds += spare * flattest
    return float(seconds)


@compiled
def totals_of(num_layers: int, before: IntArray) -> IntArray:
    """All layers of each kind [num_kinds]."""
    totals = np.full(1, num_layers)
    return totals if before.shape[1] == 0 else before[:, -1].copy()


@compiled
def hold_stage(
    depth: int, used: IntArray, before: IntArray, totals: IntArray, held: IntArray, left: IntArray
) -> None:
    """Fill in the layers of each kind that stage `depth` holds, and those that are left behind it.

    `used` are the layers before each stage.
    """
    first, end = used[depth], used[depth + 1]
    if before.shape[1] == 0:
        held[0, depth] = end - first
        left[0] = totals[0] - end
        return
    for kind in range(len(totals)):
        held[kind, depth] = before[kind, end] - before[kind, first]
        left[kind] = totals[kind] - before[kind, end]


@compiled
def enumerate_splits(
    num_layers: int,
    least: IntArray,
    incumbent_s: float,
    pipeline: SplitArrays,
    step: StepLine,
    cuts: Cuts,
    means: Cuts,
    best: Best,
    work: int,
    max_work: int,
    num_layer_stages: int,
) -> int:
    """Branch and bound over the stages in order. The work, negative where cut off."""
    num_stages, num_ranks = len(least), pipeline.offsets.shape[1] - 1
    totals = totals_of(num_layers, pipeline.before)
    least_once_s = least_step_s(totals, num_ranks, step)
    limit_s = min(incumbent_s, best.seconds[-1])
    least_after = np.zeros(num_stages + 1, dtype=np.int64)
    for stage in range(num_stages - 1, -1, -1):
        least_after[stage] = least_after[stage + 1] + least[stage]
    counts = np.zeros(num_stages, dtype=np.int64)
    used = np.zeros(num_stages + 1, dtype=np.int64)
    value = np.full(num_stages, -1, dtype=np.int64)
    held = np.zeros((len(totals), num_stages), dtype=np.int64)
    left = np.zeros(len(totals), dtype=np.int64)
    depth = 0
    while depth >= 0:
        value[depth] = least[depth] if value[depth] < 0 else value[depth] + 1
        is_last = depth == num_stages - 1
        num_left = num_layers - used[depth]
        if depth >= num_layer_stages - 1 and value[depth] <= num_left:
            value[depth] = max(value[depth], num_left)
        if value[depth] > num_left - least_after[depth + 1]:
            value[depth] = -1
            depth -= 1
            continue
        if work > max_work:
            return -work
        work += 1 + cuts.places[NUM_CUTS] * num_stages // FLOPS_OF_ACTION
        counts[depth] = value[depth]
        used[depth + 1] = used[depth] + value[depth]
        spare = num_layers - used[depth + 1] - least_after[depth + 1]
        hold_stage(depth, used, pipeline.before, totals, held, left)
        bound_s = 0.0
        for cut in range(cuts.places[NUM_CUTS]):
            bound_s = max(bound_s, rest_s(cut, depth, held, left, least, spare, cuts))
        if not is_last:
            bound_s = max(bound_s, rest_s(depth + 1, depth, held, left, least, spare, means))
        if bound_s + least_once_s >= limit_s * (1.0 - ROUNDING):
            continue
        if not is_last:
            depth += 1
            continue
        once_s = step_s(held, pipeline.placement, num_ranks, step)
        if bound_s + once_s >= limit_s * (1.0 - ROUNDING):
            continue
        keep(counts, seconds_and_cut(held, pipeline, cuts) + once_s, best)
        work += len(pipeline.orders)
        limit_s = min(limit_s, best.seconds[-1])
    return work


@compiled
def search(
    start: IntArray,
    least: IntArray,
    incumbent_s: float,
    max_work: int,
    pipeline: SplitArrays,
    step: StepLine,
    best: Best,
    num_layer_stages: int,
) -> int:
    """The work done, in simulated actions, negative where the search was cut off at `max_work`.

    Fills `best`. Splits that are proven to take no less than `incumbent_s` and than the k best found are not
    visited. `start` is a legal split, `least` [S] the fewest layers of each stage, of which the first
    `num_layer_stages` may have some. The seconds of `best` stay infinite where nothing can be better.
    """
    num_layers, num_stages = int(start.sum()), len(start)
    num_ranks = pipeline.offsets.shape[1] - 1
    free = num_layers - int(least.sum())
    cuts = cuts_of_stages(least, free, pipeline)
    work = int(cuts.places[NUM_CUTS]) * len(pipeline.orders)
    if cuts.places[NUM_CUTS] < num_stages:
        return work
    means = mean_cuts(cuts)
    totals = totals_of(num_layers, pipeline.before)
    root_s = rest_s(0, -1, np.zeros((len(totals), num_stages), dtype=np.int64), totals, least, free, means)
    if root_s + least_step_s(totals, num_ranks, step) >= incumbent_s * (1.0 - ROUNDING):
        return work
    work = descend(start, least, pipeline, step, cuts, best, work, max_work, num_layer_stages)
    if work < 0:
        return work
    return enumerate_splits(
        num_layers,
        least,
        incumbent_s,
        pipeline,
        step,
        cuts,
        means,
        best,
        work,
        max_work,
        num_layer_stages,
    )
