"""The compiled hill climbs: over the family's parameters and the split, and over a fixed order's split."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.compilation import compiled, inner
from quartet_plugin.schedule.generator import (
    GROUP,
    MEMORY_CAP,
    NUM_SCALARS,
    PATIENCE,
    SLACK,
    W_FILL,
    W_GAP,
    W_LIMIT,
    orders_of_params,
)
from quartet_plugin.schedule.kernel import Lanes, check_memory, run_orders, steady_period

_GAPS = np.array([0.0, 0.25, 0.5, 1.0, 2.0, 4.0, np.inf])
_FILLS = np.array([0.0, 0.25, 0.5, 1.0])
_PATIENCE = np.array([0.0, 0.0, 0.1, 0.25, 0.5, 1.0])


TOO_LARGE = 1e30
# Not an int: a kernel is compiled once more for each int that is written out where it is called.
_PERIOD_ROUNDS = np.int64(8)


class PlacedCosts(NamedTuple):
    """A cost table on a placement, whatever the split.

    `prefix` [5, layers + 1] are cumulated F, I, W, B seconds and bytes; `limit` [num_devices] in bytes, inf
    for none. `has_period_objective`: scores are periods instead of makespans. `slacks` and `w_limits` are the
    values of these parameters that a climb picks from.
    """

    placement: IntArray
    chunk: IntArray
    prefix: FloatArray
    slowdown: FloatArray
    transfer: FloatArray
    limit: FloatArray
    held: float
    num_microbatches: int
    has_period_objective: bool
    slacks: FloatArray
    w_limits: FloatArray


@inner
def lanes_of_split(counts: IntArray, costs: PlacedCosts) -> Lanes:
    """The stages of a split of `counts` entries; the same numbers as `costs.stage_costs`."""
    placement, prefix, transfer = costs.placement, costs.prefix, costs.transfer
    num_stages = len(counts)
    cost = np.empty((4, num_stages))
    send = np.empty((2, num_stages))
    sizes = np.empty(num_stages)
    begin = 0
    for stage in range(num_stages):
        end = begin + counts[stage]
        slow = costs.slowdown[placement[stage]]
        for kind in range(4):
            cost[kind, stage] = (prefix[kind, end] - prefix[kind, begin]) * slow
        sizes[stage] = prefix[4, end] - prefix[4, begin]
        send[0, stage] = transfer[placement[stage], placement[stage + 1]] if stage < num_stages - 1 else 0.0
        send[1, stage] = transfer[placement[stage], placement[stage - 1]] if stage > 0 else 0.0
        begin = end
    route = np.zeros(costs.num_microbatches, dtype=np.int64)
    unhidden = np.zeros((2, num_stages))
    return Lanes(
        num_stages, costs.num_microbatches, placement, cost, send, sizes, costs.held, route, unhidden
    )


@inner
def order_score(orders: IntArray, offsets: IntArray, counts: IntArray, costs: PlacedCosts) -> float:
    """Seconds of a fixed order under a split; over 1e30 by the excess when memory does not fit."""
    num_devices = len(costs.slowdown)
    lanes = lanes_of_split(counts, costs)
    peak = np.zeros(num_devices)
    check_memory(orders, offsets, lanes, np.full(num_devices, np.inf), peak)
    excess = 0.0
    for device in range(num_devices):
        if peak[device] > costs.limit[device] * (1.0 + 1e-9):
            excess += peak[device] / max(costs.limit[device], 1e-300) - 1.0
    if excess > 0.0:
        return TOO_LARGE * (1.0 + excess)
    parts = np.empty(0, dtype=np.uint8)
    ran, _, end, sequence = run_orders(orders, offsets, parts, lanes)
    if ran < len(orders):
        return np.inf
    if costs.has_period_objective:
        return steady_period(orders, offsets, parts, sequence, lanes, _PERIOD_ROUNDS)
    last = 0.0
    for position in range(len(end)):
        last = max(last, end[position])
    return last


@inner
def _take(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Fill one list of numbers with another; to compile an assignment of arrays takes numba long."""
    for index in range(len(source)):
        target[index] = source[index]


@compiled
def climb_split(
    orders: IntArray,
    offsets: IntArray,
    counts: IntArray,
    least: IntArray,
    costs: PlacedCosts,
    steps: int,
    seed: int,
) -> float:
    """Improve `counts` in place by `steps` random moves of layers; return the best score."""
    np.random.seed(seed)
    score = order_score(orders, offsets, counts, costs)
    trial = counts.copy()
    for _ in range(steps):
        _take(trial, counts)
        _move_layers(trial, least)
        trial_score = order_score(orders, offsets, trial, costs)
        if trial_score <= score:
            score = trial_score
            _take(counts, trial)
    return score


@compiled
def family_score(params: FloatArray, full_backward: IntArray, counts: IntArray, costs: PlacedCosts) -> float:
    """Seconds of the order that a parameter vector and a split make; inf where it cannot be made."""
    lanes = lanes_of_split(counts, costs)
    makespan, orders, offsets = orders_of_params(params, full_backward, costs.chunk, lanes, costs.limit)
    if not costs.has_period_objective or makespan == np.inf:
        return makespan
    parts = np.empty(0, dtype=np.uint8)
    _, _, _, sequence = run_orders(orders, offsets, parts, lanes)
    return steady_period(orders, offsets, parts, sequence, lanes, _PERIOD_ROUNDS)


@inner
def _mutate(params: FloatArray, costs: PlacedCosts) -> None:
    """Change one to three parameters in place."""
    num_devices, num_microbatches = len(costs.slowdown), costs.num_microbatches
    slacks, w_limits = costs.slacks, costs.w_limits
    v = (len(params) - NUM_SCALARS) // 4
    for _ in range(1 + np.random.randint(0, 3)):
        pick = np.random.randint(0, 4 * v + 5)
        if pick < 2 * v:
            params[pick] = min(8.0, max(0.1, params[pick] * np.exp(np.random.normal() * 0.2)))
        elif pick < 4 * v:
            params[pick] += np.random.normal() * (0.1 if np.random.random() < 0.5 else 0.6)
        elif pick == 4 * v:
            params[4 * v + SLACK] = slacks[np.random.randint(0, len(slacks))]
        elif pick == 4 * v + 1:
            which = np.random.randint(0, 3)
            if which == 0:
                params[4 * v + W_GAP] = _GAPS[np.random.randint(0, len(_GAPS))]
            elif which == 1:
                params[4 * v + W_LIMIT] = w_limits[np.random.randint(0, len(w_limits))]
            else:
                params[4 * v + W_FILL] = _FILLS[np.random.randint(0, len(_FILLS))]
        elif pick == 4 * v + 2:
            cap = params[4 * v + MEMORY_CAP]
            if cap == np.inf or np.random.random() < 0.2:
                cap = 1.0 + np.random.random() * 1.5 * num_devices
            else:
                cap += (np.random.randint(0, 5) - 2) / (2.0 * v)
            params[4 * v + MEMORY_CAP] = np.inf if np.random.random() < 0.15 else max(1.0, cap)
        elif pick == 4 * v + 3:
            params[4 * v + PATIENCE] = _PATIENCE[np.random.randint(0, len(_PATIENCE))]
        elif v > 1:
            group = 1 + np.random.randint(0, min(num_microbatches, 2 * num_devices))
            params[4 * v + GROUP] = float(group if np.random.random() < 0.5 else 1)
        else:
            shift = np.random.normal() * 0.3
            params[2] += shift
            params[3] += shift * 0.5


@inner
def _move_layers(counts: IntArray, least: IntArray) -> None:
    """Move one entry from a random stage to another, now and then two."""
    num_stages = len(counts)
    for _ in range(1 if np.random.random() < 0.8 else 2):
        for _attempt in range(20):
            source = np.random.randint(0, num_stages)
            target = np.random.randint(0, num_stages)
            if np.random.random() < 0.3:
                target = min(num_stages - 1, max(0, source + (1 if np.random.random() < 0.5 else -1)))
            if source != target and counts[source] > least[source]:
                counts[source] -= 1
                counts[target] += 1
                break


@compiled
def climb_family(
    params: FloatArray,
    full_backward: IntArray,
    counts: IntArray,
    least: IntArray,
    costs: PlacedCosts,
    split_rate: float,
    full_backward_rate: float,
    score: float,
    steps: int,
    target: float,
    seed: int,
) -> float:
    """Improve the parameters and the split in place by `steps` random changes; return the best score.

    `score` is the score before the first change, inf when unknown. Equal scores are accepted: they are how a
    plateau is crossed. Stops early at `target`, a proven bound.
    """
    np.random.seed(seed)
    trial = params.copy()
    trial_counts = counts.copy()
    trial_backward = full_backward.copy()
    for _ in range(steps):
        if score <= target:
            break
        _take(trial, params)
        _take(trial_counts, counts)
        _take(trial_backward, full_backward)
        if np.random.random() < split_rate:
            _move_layers(trial_counts, least)
            if np.random.random() < 0.3:
                _mutate(trial, costs)
        elif np.random.random() < full_backward_rate:
            stage = np.random.randint(0, len(full_backward))
            trial_backward[stage] = 1 - trial_backward[stage]
        else:
            _mutate(trial, costs)
        trial_score = family_score(trial, trial_backward, trial_counts, costs)
        if trial_score <= score * (1.0 + 1e-12):
            score = trial_score
            _take(params, trial)
            _take(counts, trial_counts)
            _take(full_backward, trial_backward)
    return score
