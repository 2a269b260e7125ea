"""The compiled hill climb over the family's parameters (see `keys.fill_keys`) and the split."""

import numpy as np

from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.generator import generate_orders
from quartet_plugin.schedule.kernel import compiled, run_orders, steady_period
from quartet_plugin.schedule.keys import (
    GROUP,
    MEMORY_CAP,
    NUM_SCALARS,
    PATIENCE,
    SLACK,
    W_FILL,
    W_GAP,
    W_LIMIT,
    fill_keys,
)

_SLACKS = np.array([0.0, 0.1, 0.2, 0.34, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, np.inf])
_GAPS = np.array([0.0, 0.25, 0.5, 1.0, 2.0, 4.0, np.inf])
_LIMITS = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, np.inf])
_FILLS = np.array([0.0, 0.25, 0.5, 1.0])
_PATIENCE = np.array([0.0, 0.0, 0.1, 0.25, 0.5, 1.0])


@compiled
def stage_arrays(
    counts: IntArray,
    placement: IntArray,
    prefix: FloatArray,
    slowdown: FloatArray,
    transfer: FloatArray,
    cost: FloatArray,
    send: FloatArray,
    sizes: FloatArray,
) -> None:
    """Fill `cost` [4, stages], `send` [2, stages] and `sizes` [stages] for a split.

    `prefix` [5, layers + 1] are cumulated F, I, W, B seconds and bytes. The twin of `costs.stage_costs`.
    """
    num_stages = len(counts)
    begin = 0
    for stage in range(num_stages):
        end = begin + counts[stage]
        slow = slowdown[placement[stage]]
        for kind in range(4):
            cost[kind, stage] = (prefix[kind, end] - prefix[kind, begin]) * slow
        sizes[stage] = prefix[4, end] - prefix[4, begin]
        send[0, stage] = transfer[placement[stage], placement[stage + 1]] if stage < num_stages - 1 else 0.0
        send[1, stage] = transfer[placement[stage], placement[stage - 1]] if stage > 0 else 0.0
        begin = end


@compiled
def evaluate(
    params: FloatArray,
    whole: IntArray,
    counts: IntArray,
    placement: IntArray,
    chunk: IntArray,
    prefix: FloatArray,
    slowdown: FloatArray,
    transfer: FloatArray,
    limit: FloatArray,
    held: float,
    num_microbatches: int,
    want_period: bool,
) -> float:
    """Makespan, or period, of the order that a parameter vector and a split make; inf if it cannot be."""
    num_devices = len(slowdown)
    num_stages = len(counts)
    v = num_stages // num_devices
    cost = np.empty((4, num_stages))
    send = np.empty((2, num_stages))
    sizes = np.empty(num_stages)
    stage_arrays(counts, placement, prefix, slowdown, transfer, cost, send, sizes)
    load = np.zeros(num_devices)
    share = np.zeros(num_devices)
    offsets = np.zeros(num_devices + 1, dtype=np.int64)
    for stage in range(num_stages):
        device = placement[stage]
        load[device] += cost[0, stage] + min(cost[1, stage] + cost[2, stage], cost[3, stage])
        share[device] += sizes[stage]
        offsets[device + 1] += num_microbatches * (2 if whole[stage] else 3)
    beat = float(load.max())
    if beat <= 0.0:
        beat = 1.0
    cap = np.empty(num_devices)
    for device in range(num_devices):
        offsets[device + 1] += offsets[device]
        cap[device] = limit[device]
        if params[4 * v + MEMORY_CAP] < np.inf:
            cap[device] = min(limit[device], params[4 * v + MEMORY_CAP] * share[device])
    forward_key = np.empty(num_stages)
    backward_key = np.empty(num_stages)
    progress = np.empty(num_microbatches)
    fill_keys(params, whole, chunk, cost, send, beat, forward_key, backward_key, progress)
    orders = np.empty(offsets[num_devices], dtype=np.int64)
    makespan = generate_orders(
        num_devices,
        num_stages,
        num_microbatches,
        placement,
        cost,
        send,
        sizes,
        held,
        np.zeros(num_stages, dtype=np.int64),
        np.full(num_stages, num_microbatches),
        forward_key,
        backward_key,
        progress,
        whole,
        params[4 * v :],
        cap,
        orders,
        offsets,
    )
    if not want_period or makespan == np.inf:
        return makespan
    start = np.empty(len(orders))
    end = np.empty(len(orders))
    sequence = np.empty(len(orders), dtype=np.int64)
    route = np.zeros(num_microbatches, dtype=np.int64)
    run_orders(
        orders, offsets, num_stages, num_microbatches, placement, cost, send, route, start, end, sequence
    )
    return steady_period(orders, offsets, sequence, num_stages, num_microbatches, cost, send, route, 8)


@compiled
def _mutate(params: FloatArray, num_devices: int, num_microbatches: int) -> None:
    """Change one to three parameters in place."""
    v = (len(params) - NUM_SCALARS) // 4
    for _ in range(1 + np.random.randint(0, 3)):
        pick = np.random.randint(0, 4 * v + 5)
        if pick < 2 * v:
            params[pick] = min(8.0, max(0.1, params[pick] * np.exp(np.random.normal() * 0.2)))
        elif pick < 4 * v:
            params[pick] += np.random.normal() * (0.1 if np.random.random() < 0.5 else 0.6)
        elif pick == 4 * v:
            params[4 * v + SLACK] = _SLACKS[np.random.randint(0, len(_SLACKS))]
        elif pick == 4 * v + 1:
            which = np.random.randint(0, 3)
            if which == 0:
                params[4 * v + W_GAP] = _GAPS[np.random.randint(0, len(_GAPS))]
            elif which == 1:
                params[4 * v + W_LIMIT] = _LIMITS[np.random.randint(0, len(_LIMITS))]
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


@compiled
def _move_layers(counts: IntArray, least: IntArray) -> None:
    """Move one entry from a random stage to another, now and then two."""
    num_stages = len(counts)
    for _ in range(1 if np.random.random() < 0.8 else 2):
        for _try in range(20):
            source = np.random.randint(0, num_stages)
            target = np.random.randint(0, num_stages)
            if np.random.random() < 0.3:
                target = min(num_stages - 1, max(0, source + (1 if np.random.random() < 0.5 else -1)))
            if source != target and counts[source] > least[source]:
                counts[source] -= 1
                counts[target] += 1
                break


@compiled
def climb(
    params: FloatArray,
    whole: IntArray,
    counts: IntArray,
    least: IntArray,
    placement: IntArray,
    chunk: IntArray,
    prefix: FloatArray,
    slowdown: FloatArray,
    transfer: FloatArray,
    limit: FloatArray,
    held: float,
    num_microbatches: int,
    want_period: bool,
    split_rate: float,
    whole_rate: float,
    score: float,
    steps: int,
    target: float,
    seed: int,
) -> float:
    """Improve `params`, `counts` and `whole` in place by `steps` random changes; return the best score.

    `score` is the score of what is given, inf when unknown. Equal scores are accepted: they are how a
    plateau is crossed. Stops early at `target`, a proven bound.
    """
    np.random.seed(seed)
    trial = params.copy()
    trial_counts = counts.copy()
    trial_whole = whole.copy()
    for _ in range(steps):
        if score <= target:
            break
        trial[:] = params
        trial_counts[:] = counts
        trial_whole[:] = whole
        if np.random.random() < split_rate:
            _move_layers(trial_counts, least)
            if np.random.random() < 0.3:
                _mutate(trial, len(slowdown), num_microbatches)
        elif np.random.random() < whole_rate:
            stage = np.random.randint(0, len(whole))
            trial_whole[stage] = 1 - trial_whole[stage]
        else:
            _mutate(trial, len(slowdown), num_microbatches)
        value = evaluate(
            trial,
            trial_whole,
            trial_counts,
            placement,
            chunk,
            prefix,
            slowdown,
            transfer,
            limit,
            held,
            num_microbatches,
            want_period,
        )
        if value <= score * (1.0 + 1e-12):
            score = value
            params[:] = trial
            counts[:] = trial_counts
            whole[:] = trial_whole
    return score
