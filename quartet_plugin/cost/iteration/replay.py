"""The one replay of orders: makespans, the counts on the critical path, and what blocks.

A makespan is the sum of the actions and transfers on one path through the schedule, so the counts of each
stage's actions on that path are its derivatives by their times: one replay gives a time and all its slopes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quartet_plugin.cost.iteration.orders import device_of_stages, lanes_of, orders_of, stages_of_devices
from quartet_plugin.cost.run import ScheduleKind, Software, TrainingRun
from quartet_plugin.cost.times import Times
from quartet_plugin.errors import PlanError
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule import kernel
from quartet_plugin.schedule.compilation import compiled
from quartet_plugin.schedule.schedule import PartArray
from quartet_plugin.schedule.simulate import bubble_fraction

DEADLOCK = "orders: deadlock, the devices wait for one another; use another schedule"
# Two times count as equal within this part of the makespan.
SAME = 1e-9
# Schedules that wait for their sends where the framework's transfers block. Runtimes of split backwards and
# the plugin's own send asynchronously.
BLOCKABLE = (ScheduleKind.INTERLEAVED, ScheduleKind.GPIPE)
# Rounds after which the steady interval of an order that repeats is computed exactly.
_PERIOD_ROUNDS = np.int64(24)


def blocks_on_sends(run: TrainingRun) -> bool:
    """Whether a rank waits until its sends have arrived; no rank of an order that a plan carries does."""
    return run.custom is None and kind_blocks_on_sends(run.schedule, run.software)


def kind_blocks_on_sends(kind: ScheduleKind, software: Software) -> bool:
    """Whether a rank waits until its sends have arrived: Megatron overlaps transfers beside 1F1B's."""
    return kind is ScheduleKind.ONE_F_ONE_B or (software.blocking_transfers and kind in BLOCKABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpan:
    """The pipeline's makespan, and all ranks' bubble.

    Of one rank it has the part of the makespan that is blocked by its sends, and the seconds of all-to-all
    that its overlapped pairs hide.
    """

    makespan_s: float
    blocked_s: float
    hidden_s: float
    bubble_fraction: float


def pipeline_span(
    run: TrainingRun,
    sums: Sequence[Times],
    device: int,
    *,
    forward_s: FloatArray,
    backward_s: FloatArray,
    exchange_s: FloatArray | None = None,
) -> PipelineSpan:
    """The pipeline's span, with the sends that block `device` and what its pairs hide.

    `sums` are the stages' times without their sends. `forward_s` and `backward_s` [num_stages] are the
    seconds of a stage's transfers to the next and to the one before, `exchange_s` [2, num_stages] those of
    its forward's and of its backward's all-to-all that a pair can hide (None: nothing).
    """
    work = np.array(sums).T
    sends = np.stack((forward_s, backward_s))
    is_blocking = blocks_on_sends(run)
    makespan = replayed_s(run, work, sends, exchange_s)
    count, devices = run.num_microbatches, run.layout.pipeline_parallel
    hidden = np.zeros(devices) if exchange_s is None else hidden_by_pairs(run, work, exchange_s)
    blocked = count * float(sends[:, list(stages_of_devices(run)[device])].sum()) if is_blocking else 0.0
    busy = count * float(work.sum() + (sends.sum() if is_blocking else 0.0)) - float(hidden.sum())
    bubble = bubble_fraction(busy, makespan_s=makespan, num_devices=devices)
    return PipelineSpan(
        makespan_s=makespan, blocked_s=blocked, hidden_s=float(hidden[device]), bubble_fraction=bubble
    )


def replayed_s(
    run: TrainingRun, work: FloatArray, sends: FloatArray, exchange_s: FloatArray | None = None
) -> float:
    """Seconds from the first forward to the last gradient of a step.

    `work` [3, num_stages] are the seconds of a stage's forward, input and weight gradient, `sends`
    [2, num_stages] of its transfers to the next and to the one before, `exchange_s` [2, num_stages] of what
    overlapped pairs can hide; None for nothing. With post-validation the steady interval instead: the
    optimizer's barrier is gone (Qi et al. 2024). Raises PlanError for orders that do not run.
    """
    if run.layout.pipeline_parallel == 1:
        return run.num_microbatches * float(work.sum())
    is_steady = run.software.post_validation and run.schedule is ScheduleKind.ZB_H2
    times, left = with_sends(work, np.ascontiguousarray(sends), blocks_on_sends(run))
    seconds = 0.0
    # Two kernels: few runs have a steady interval, and its kernel takes seconds to compile.
    replay = steady_interval if is_steady else makespan
    hideable = np.zeros_like(left) if exchange_s is None else exchange_s
    orders = orders_of(run)
    for order, weight in orders:
        span = replay(
            order.orders,
            order.offsets,
            order.parts,
            order.placement,
            order.num_microbatches,
            times,
            left,
            hideable,
        )
        if span < 0.0:
            raise PlanError(DEADLOCK)
        seconds += weight * span
    if any(len(order.parts) for order, _ in orders):
        # Pairs keep a rank busy for less than its actions take alone. Such orders are never folded.
        return seconds
    # A line through two shorter orders may be less steep than a rank is busy.
    busy = np.bincount(device_of_stages(run), weights=times[:3].sum(axis=0))
    return max(seconds, run.num_microbatches * float(busy.max()))


def hidden_by_pairs(run: TrainingRun, work: FloatArray, exchange_s: FloatArray) -> FloatArray:
    """Seconds of all-to-all that the overlapped pairs of each pipeline rank hide in an iteration [pp].

    The arguments are those of `replayed_s`.
    """
    hidden = np.zeros(run.layout.pipeline_parallel)
    backward = np.stack((work[0], work[1], work[2], work[1] + work[2]))
    for order, weight in orders_of(run):
        for index in np.flatnonzero(order.parts == 1).tolist():
            stages = order.orders[index : index + 2] // 4 // order.num_microbatches
            hidden[order.placement[stages[0]]] += weight * kernel.hidden_s(
                work[0, stages[0]],
                exchange_s[0, stages[0]],
                backward[order.orders[index + 1] & 3, stages[1]],
                exchange_s[1, stages[1]],
            )
    return hidden


def both_ways(ahead_s: FloatArray) -> FloatArray:
    """Seconds of each stage's transfers to the next and to the one before [2, num_stages]: as long back."""
    return np.stack((ahead_s, np.concatenate(([0.0], ahead_s[:-1]))))


@compiled
def with_sends(work: FloatArray, sends: FloatArray, is_blocking: bool) -> tuple[FloatArray, FloatArray]:
    """The times of actions [4, num_stages] by kind, and the sends that delay their receiver alone.

    The one rule for what blocks: where ranks wait for their sends, a send belongs to the action before it.
    """
    # Element by element: to compile an operation on arrays takes numba seconds.
    num_stages = work.shape[1]
    times = np.zeros((4, num_stages))
    left = np.zeros((2, num_stages))
    for stage in range(num_stages):
        for kind in range(3):
            times[kind, stage] = work[kind, stage]
        for way in range(2):
            if is_blocking:
                times[way, stage] += sends[way, stage]
            else:
                left[way, stage] = sends[way, stage]
        times[3, stage] = times[1, stage] + times[2, stage]
    return times, left


@compiled
def makespan(
    orders: IntArray,
    offsets: IntArray,
    parts: PartArray,
    placement: IntArray,
    num_microbatches: int,
    times_s: FloatArray,
    sends_s: FloatArray,
    exchange_s: FloatArray,
) -> float:
    """The makespan in seconds; -1 where the orders do not run.

    `parts` marks the parts of pairs, which hide what they can of `exchange_s` [2, num_stages]: see `kernel`.
    """
    route = np.zeros(num_microbatches, dtype=np.int64)
    lanes = lanes_of(placement, route, times_s, sends_s, exchange_s)
    ran, _, end, _ = kernel.run_orders(orders, offsets, parts, lanes)
    if ran < len(orders):
        return -1.0
    last = 0.0
    for index in range(len(end)):
        last = max(last, end[index])
    return last


@compiled
def makespans(
    orders: IntArray,
    sequence: IntArray,
    num_devices: int,
    placement: IntArray,
    num_microbatches: int,
    times_s: FloatArray,
    sends_s: FloatArray,
) -> FloatArray:
    """The makespans in seconds [num] of orders under several times; -1 where the orders do not run.

    `times_s` [4, num_stages, num] are by kind, `sends_s` [2, num_stages, num] as `critical_path` has them.
    What waits for what does not depend on times: all are replayed together in the `sequence` of
    `OrderedActions`.
    """
    num_stages, num = len(placement), times_s.shape[2]
    if len(sequence) < len(orders):
        return np.full(num, -1.0)
    free = np.zeros((num_devices, num))
    # Every end is written before it is read.
    forward = np.empty((num_stages * num_microbatches, num))
    gradient = np.empty((num_stages * num_microbatches, num))
    for position in sequence:
        unit = orders[position] >> 2
        kind = orders[position] & 3
        stage = unit // num_microbatches
        device = placement[stage]
        # One loop a case, over elements: it reads and writes each end once.
        if kind == kernel.W:
            for index in range(num):
                free[device, index] += times_s[kind, stage, index]
        elif kind == kernel.F and stage > 0:
            for index in range(num):
                arrival = forward[unit - num_microbatches, index] + sends_s[0, stage - 1, index]
                end = max(free[device, index], arrival) + times_s[kind, stage, index]
                free[device, index] = end
                forward[unit, index] = end
        elif kind == kernel.F:
            for index in range(num):
                end = free[device, index] + times_s[kind, stage, index]
                free[device, index] = end
                forward[unit, index] = end
        elif stage < num_stages - 1:
            for index in range(num):
                arrival = gradient[unit + num_microbatches, index] + sends_s[1, stage + 1, index]
                end = max(free[device, index], arrival) + times_s[kind, stage, index]
                free[device, index] = end
                gradient[unit, index] = end
        else:
            for index in range(num):
                end = free[device, index] + times_s[kind, stage, index]
                free[device, index] = end
                gradient[unit, index] = end
    last = np.zeros(num)
    for device in range(num_devices):
        for index in range(num):
            last[index] = max(last[index], free[device, index])
    return last


@compiled
def steady_interval(
    orders: IntArray,
    offsets: IntArray,
    parts: PartArray,
    placement: IntArray,
    num_microbatches: int,
    times_s: FloatArray,
    sends_s: FloatArray,
    exchange_s: FloatArray,
) -> float:
    """The seconds after which orders that repeat come again; -1 where they do not run. See `makespan`."""
    route = np.zeros(num_microbatches, dtype=np.int64)
    lanes = lanes_of(placement, route, times_s, sends_s, exchange_s)
    ran, _, _, sequence = kernel.run_orders(orders, offsets, parts, lanes)
    if ran < len(orders):
        return -1.0
    return float(kernel.steady_period(orders, offsets, parts, sequence, lanes, _PERIOD_ROUNDS))


@compiled
def critical_path(
    orders: IntArray,
    offsets: IntArray,
    placement: IntArray,
    route: IntArray,
    times_s: FloatArray,
    sends_s: FloatArray,
    same: float,
    actions: FloatArray,
    sends: FloatArray,
) -> float:
    """The makespan in seconds, -1 where the orders do not run.

    `times_s` [4, num_stages] are by kind; `sends_s[0, s]` is from stage s to s + 1, `sends_s[1, s]` from s
    to s - 1. The counts on the path are added to `actions` [4, num_stages] and `sends` [2, num_stages].
    Two times count as equal within the part `same` of the makespan.
    """
    count = len(orders)
    num_stages, num_microbatches = len(placement), len(route)
    lanes = lanes_of(placement, route, times_s, sends_s, np.zeros((2, num_stages)))
    ran, start, end, _ = kernel.run_orders(orders, offsets, np.empty(0, dtype=np.uint8), lanes)
    if ran < count:
        return -1.0
    # The position of each unit's forward, and of the action that makes its gradient.
    forward = np.full(num_stages * num_microbatches, -1)
    gradient = np.full(num_stages * num_microbatches, -1)
    first = np.zeros(count, dtype=np.uint8)
    for device in range(len(offsets) - 1):
        if offsets[device] < offsets[device + 1]:
            first[offsets[device]] = 1
    for position in range(count):
        kind = orders[position] & 3
        if kind == kernel.F:
            forward[orders[position] >> 2] = position
        elif kind != kernel.W:
            gradient[orders[position] >> 2] = position
    position = 0
    for other in range(count):
        if end[other] > end[position]:
            position = other
    makespan = end[position]
    tolerance = same * makespan
    while True:
        unit = orders[position] >> 2
        kind = orders[position] & 3
        stage = unit // num_microbatches
        actions[kind, stage] += 1.0
        if start[position] <= tolerance:
            break
        if first[position] == 0 and end[position - 1] >= start[position] - tolerance:
            position -= 1
            continue
        # It waited for another stage: the only other reason to start late.
        if kind == kernel.F:
            sends[0, stage - 1] += 1.0
            position = forward[unit - num_microbatches]
        else:
            sends[1, stage + 1] += 1.0
            position = gradient[unit + num_microbatches]
    return float(makespan)
