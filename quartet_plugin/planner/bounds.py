"""Lower bounds on the predicted time and memory of every layout of a table at once.

The time of a layer, of the embedding and of the head depends on few columns, so it is computed once for each
of their values by the cost model itself. The pipeline is bounded from below by

    max over devices d of  fill_d + num_microbatches * busy_d + drain_d

where fill_d is the forward of the stages before d, without which d cannot start, and drain_d their backward,
which starts after d's last action; where backwards are split that may be a weight gradient, and nothing has
to follow. It holds for every group of an interleaved order. Exposed gradient traffic and the optimizer's step
are those of the device that holds the most layers.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from quartet_plugin.cost import communication
from quartet_plugin.cost.compute import MEMORY_RATE, Times
from quartet_plugin.cost.constants import ClusterConstants, Constants
from quartet_plugin.cost.iteration.orders import FULL_ROUNDS
from quartet_plugin.cost.iteration.step import OPTIMIZER_BYTES, contention_gain
from quartet_plugin.cost.iteration.terms import COMPUTE, stage_parts
from quartet_plugin.cost.memory import HALF, bytes_per_weight, layer_activation_bytes, weights_of_stages
from quartet_plugin.cost.run import ScheduleKind, TrainingRun
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.tensor_partition import TensorPartition
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.layout_table import (
    CP,
    DP,
    EP,
    EVEN,
    MODE,
    PARTITION,
    PP,
    SCHEDULE,
    SHARDED,
    SIZE,
    SPLIT,
    TP,
    VIRTUAL,
    WRITTEN,
    LayoutTable,
    num_microbatches,
    written_splits,
)
from quartet_plugin.planner.table_rows import layout_of, unique_rows
from quartet_plugin.planner.table_schedules import KINDS, is_turning
from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.named import named
from quartet_plugin.split.layers import even_split, even_split_with_ends

# Rounding, and for pipelines that the cost model extrapolates the error of doing so.
ROUNDING, EXTRAPOLATION = 1e-9, 2e-3
# Steps of the search for the least time of whole layers.
_HALVINGS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBounds:
    """Of each layout: seconds and bytes that its prediction cannot be under, and its whole end loads.

    `first` and `last` are the loads of embedding and head, rounded to whole layers.
    """

    time_s: FloatArray
    memory_bytes: FloatArray
    first: IntArray
    last: IntArray

    def split(self, job: PlanRequest, shape: ModelShape, table: LayoutTable, row: int) -> tuple[int, ...]:
        """The split that the layout of `row` is planned with."""
        pp, virtual, kind = (int(table.columns[row, column]) for column in (PP, VIRTUAL, SPLIT))
        ends = (int(self.first[row]), int(self.last[row]))
        turns = is_turning(table.schedule(row))
        return split_of(job, shape, pp=pp, virtual=virtual, kind=kind, ends=ends, turns=turns)


def split_of(
    job: PlanRequest,
    shape: ModelShape,
    *,
    pp: int,
    virtual: int,
    kind: int,
    ends: tuple[int, int],
    turns: bool = False,
) -> tuple[int, ...]:
    """The split that the column `SPLIT` names: balanced, even, or one that the job writes out.

    Where the second chunks `turn` back, the first device holds both ends.
    """
    if kind >= WRITTEN:
        return written_splits(job)[kind - WRITTEN]
    if kind == EVEN:
        return even_split(shape.num_layers, num_stages=pp * virtual)
    embedding, head = ends
    if turns:
        return turning_split(shape.num_layers, num_devices=pp, embedding=embedding, head=head)
    return even_split_with_ends(shape.num_layers, num_stages=pp * virtual, embedding=embedding, head=head)


def turning_split(num_layers: int, *, num_devices: int, embedding: int, head: int) -> tuple[int, ...]:
    """The balanced split of two stages a device, the second ones back over the devices.

    `embedding` and `head` are the ends' loads in whole layers, both on device 0, whose stages they even out;
    elsewhere the first stage takes the odd layer. With too few layers it is the split of a loop.
    """
    loads = even_split_with_ends(num_layers, num_stages=num_devices, embedding=embedding + head, head=0)
    if min(loads[1:], default=2) < 2:
        return even_split_with_ends(num_layers, num_stages=2 * num_devices, embedding=embedding, head=head)
    ahead = [(load + 1) // 2 for load in loads]
    ahead[0] = min(max(0, (loads[0] + head - embedding + 1) // 2), loads[0])
    back = [load - first for load, first in zip(loads, ahead, strict=True)]
    return (*ahead, *reversed(back))


def bounds_of(
    job: PlanRequest,
    shape: ModelShape,
    table: LayoutTable,
    *,
    constants: Constants,
    slowdown: FloatArray | None = None,
    limit_bytes: float = math.inf,
) -> LowerBounds:
    """The bounds of all layouts of the table.

    With the slots' `slowdown` [num_slots] they hold for any split and order of ranks. The pipeline's time is
    left out of the bounds of layouts that need more than `limit_bytes`.
    """
    columns = table.columns
    if not len(columns):
        empty = np.zeros(0, dtype=np.int64)
        return LowerBounds(time_s=np.zeros(0), memory_bytes=np.zeros(0), first=empty, last=empty)
    units = _units(job, shape, table, constants)
    layer = units[:, :2].sum(axis=1)
    ends = units[:, 2:6].reshape(-1, 2, 2)
    first = np.rint(ends[:, 0].sum(axis=1) / layer).astype(np.int64)
    last = np.rint(ends[:, 1].sum(axis=1) / layer).astype(np.int64)
    span, memory = np.zeros(len(columns)), np.zeros(len(columns))
    keys, _, groups = unique_rows(np.column_stack([columns[:, [PP, VIRTUAL, SPLIT, SCHEDULE]], first, last]))
    order = np.argsort(groups, kind="stable")
    edges = np.searchsorted(groups[order], np.arange(len(keys) + 1))
    transfers = _transfers(job, shape, columns, constants)
    states = _states(job, columns)
    microbatches_of_rows = num_microbatches(job, columns)
    for group, (pp, virtual, kind, number, a, b) in enumerate(keys.tolist()):
        rows = order[edges[group] : edges[group + 1]]
        schedule = KINDS[number]
        if slowdown is None:
            turns = is_turning(schedule)
            split = split_of(job, shape, pp=pp, virtual=virtual, kind=kind, ends=(a, b), turns=turns)
            stages = np.array(split).reshape(virtual, pp)
            if turns:
                stages[1] = stages[1, ::-1].copy()
            memory[rows] = _memory(stages, units[rows], microbatches_of_rows[rows], states[rows], schedule)
        else:
            memory[rows] = _least_memory(
                shape.num_layers, pp, virtual, units[rows], microbatches_of_rows[rows], states[rows], schedule
            )
        rows = rows[memory[rows] <= limit_bytes]
        microbatches = microbatches_of_rows[rows]
        if slowdown is None:
            span[rows] = _span(stages, units[rows], microbatches, transfers[rows], schedule)
        else:
            span[rows] = _least_span(
                shape.num_layers, pp, virtual, units[rows], microbatches, slowdown, schedule
            )
        extrapolated = (microbatches > (FULL_ROUNDS + 1) * pp) & (pp > 1)
        span[rows] *= np.where(extrapolated, 1 - EXTRAPOLATION, 1.0)
    nodes = job.machines.num_devices / job.machines.devices_per_node
    whole = span + _once(job, shape, columns, units[:, 12], units[:, 13], constants) + constants.step_s
    time = whole * (1 + constants.straggler * max(0.0, math.log2(nodes)))
    if isinstance(constants, ClusterConstants):
        # Ranks that share a memory gain by each other's waiting: at most in all of the pipeline's time.
        time -= contention_gain(job.software, job.machines, constants) * span
        time *= constants.residual
    return LowerBounds(
        time_s=time * (1 - ROUNDING), memory_bytes=memory * (1 - ROUNDING), first=first, last=last
    )


def _span(
    split: IntArray, units: FloatArray, microbatches: IntArray, transfer: FloatArray, schedule: ScheduleKind
) -> FloatArray:
    """The pipeline's bound; `split` [virtual, pp] by chunk and device, columns of `units` as in `_unit`."""
    _, pp = split.shape
    layer, ends = units[:, :2].sum(axis=1), units[:, 2:6].reshape(-1, 2, 2).sum(axis=2)
    devices = np.arange(pp)
    busy = layer[:, None] * split.sum(axis=0)
    busy[:, 0] += ends[:, 0]
    busy[:, 0 if is_turning(schedule) else -1] += ends[:, 1]
    before = np.concatenate(([0], np.cumsum(split[0])[:-1]))
    if _follows_nothing(schedule):
        ahead = units[:, :1] * before + units[:, 2:3] * (devices > 0) + transfer[:, None] * devices
    elif schedule is ScheduleKind.ONE_F_ONE_B:
        # 1F1B waits for its own sends: forward but on the last stage, backward but on the first.
        busy += transfer[:, None] * ((devices > 0) * 1.0 + (devices < pp - 1))
        ahead = layer[:, None] * before + ends[:, :1] * (devices > 0)
        ahead = ahead + transfer[:, None] * np.maximum(0, 2 * devices - 1)
    else:
        ahead = layer[:, None] * before + ends[:, :1] * (devices > 0) + transfer[:, None] * 2 * devices
    bound: FloatArray = (busy * microbatches[:, None] + ahead).max(axis=1)
    return bound


def _follows_nothing(schedule: ScheduleKind) -> bool:
    """Whether a device's last action may be a weight gradient, after which nothing has to follow."""
    return schedule.splits_backward


def _least_span(
    num_layers: int,
    pp: int,
    virtual: int,
    units: FloatArray,
    microbatches: IntArray,
    slowdown: FloatArray,
    schedule: ScheduleKind,
) -> FloatArray:
    """The least that any split and any order of ranks can make of a microbatch's work.

    Work is shared among the pipeline ranks, computation by their speed. Of all replicas one has no more speed
    than the mean, and the one with the slowest slot has at most pp - 1 of the fastest beside it. With
    one stage a rank and whole backwards rank d is behind d others: from T >= m x_d + sum of x_k for k < d
    follows x_d <= T / m (1 - 1 / m)^d for the times x of a microbatch on the ranks, largest first.
    """
    work = units[:, :2].sum(axis=1) * num_layers + units[:, 2:6].sum(axis=1)
    compute = units[:, 14] * num_layers + units[:, 15]
    speed = min(pp * float((1 / slowdown).mean()), pp - 1 + 1 / float(slowdown.max()))
    ranks = np.arange(pp)
    is_behind = virtual == 1 and not _follows_nothing(schedule)
    waning = (1 - 1 / microbatches[:, None]) ** ranks if is_behind else np.ones((len(units), pp))
    fastest = np.clip(speed - ranks, 0.0, 1.0)
    bound: FloatArray = microbatches * np.maximum(
        work / waning.sum(axis=1), compute / (waning * fastest).sum(axis=1)
    )
    slowest = float(slowdown.max())
    whole = _least_busy(num_layers, pp, virtual, units, slowest, turns=is_turning(schedule))
    return np.maximum(bound, microbatches * whole)


def _least_busy(
    num_layers: int, pp: int, virtual: int, units: FloatArray, slowest: float, *, turns: bool
) -> FloatArray:
    """Seconds of a microbatch on the busiest rank of the replica with the slowest slot, layers being whole.

    An interval that holds the time is halved until it is narrow: in t seconds each rank holds as many layers
    as fit beside its end of the model, the slowest slot being on the rank where that costs the fewest. Only a
    stage at an end may have no layer.
    """
    layer = units[:, :2].sum(axis=1)
    slow_layer = layer + (slowest - 1) * units[:, 14]
    embedding, head = units[:, 2:6].reshape(-1, 2, 2).sum(axis=2).T
    nothing = np.zeros(len(units))
    if pp == 1 or turns:
        ends = [(embedding + head, 1), (nothing, pp - 1)]
    else:
        ends = [(embedding, 1), (head, 1), (nothing, pp - 2)]
    ends = [(end, count) for end, count in ends if count]
    least = max(0, virtual - (2 if turns else 1))

    def capacity(t: FloatArray) -> FloatArray:
        usual = [np.floor((t - end) / layer + ROUNDING) for end, _ in ends]
        slow = [np.floor((t - end) / slow_layer + ROUNDING) for end, _ in ends]
        loss = [np.where(few < least, np.inf, many - few) for many, few in zip(usual, slow, strict=True)]
        total: FloatArray = sum(
            (count * many for many, (_, count) in zip(usual, ends, strict=True)), start=nothing
        )
        total -= np.min(loss, axis=0)
        return total

    low = np.zeros(len(units))
    high = slow_layer * (num_layers + virtual) + np.abs(embedding) + np.abs(head)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_enough = capacity(middle) >= num_layers
        low, high = np.where(is_enough, low, middle), np.where(is_enough, middle, high)
    return low


def _least_memory(
    num_layers: int,
    pp: int,
    virtual: int,
    units: FloatArray,
    microbatches: IntArray,
    states: FloatArray,
    schedule: ScheduleKind,
) -> FloatArray:
    """Weights, gradients, optimizer state and the microbatches in flight, shared among the pipeline ranks."""
    kept, layer = units[:, 6:7], units[:, 8:9]
    flying = _least_in_flight(schedule, virtual, pp, microbatches)
    a_layer = states[:, None] * layer + kept * flying
    bound: FloatArray = num_layers / (1.0 / a_layer).sum(axis=1)
    return np.maximum(bound, states * (units[:, 8] * num_layers + units[:, 9]) / pp)


def _least_in_flight(schedule: ScheduleKind, virtual: int, pp: int, microbatches: IntArray) -> IntArray:
    """The microbatches that every chunk of a device has in flight before its first backward [rows, pp]."""
    if is_turning(schedule):
        return _in_flight_of_chunks(schedule, pp, microbatches).min(axis=1)
    devices, m = np.arange(pp), microbatches[:, None]
    match schedule:
        case ScheduleKind.BREADTH_FIRST:
            return m + 0 * devices
        case ScheduleKind.INTERLEAVED:
            return np.minimum(m, np.minimum(pp, 2 * (pp - devices) - 1))
        case _:
            return _in_flight(schedule, virtual, pp, microbatches)


def _memory(
    split: IntArray, units: FloatArray, microbatches: IntArray, states: FloatArray, schedule: ScheduleKind
) -> FloatArray:
    """Weights, gradients and optimizer state, and the chunks in flight before the first backward."""
    virtual, pp = split.shape
    kept, layer, vocabulary = units[:, 6:7], units[:, 8:9], units[:, 9:10]
    held = states[:, None] * (layer * split.sum(axis=0) + vocabulary * (np.arange(pp) == 0))
    if is_turning(schedule):
        by_chunk = _in_flight_of_chunks(schedule, pp, microbatches)
        flying = (by_chunk * (kept[:, :, None] * split + units[:, 7, None, None])).sum(axis=1)
    else:
        in_flight = _in_flight(schedule, virtual, pp, microbatches)
        flying = in_flight * (kept * split.min(axis=0) + units[:, 7:8])
    bound: FloatArray = (held + flying).max(axis=1)
    return bound


def _in_flight_of_chunks(schedule: ScheduleKind, pp: int, microbatches: IntArray) -> IntArray:
    """The forwards of both chunks before each device's first backward where chunks turn [rows, 2, pp]."""
    # Longer orders begin alike.
    counts, inverse = np.unique(np.minimum(microbatches, 2 * pp), return_inverse=True)
    each = np.array([first_forwards(schedule, pp, count) for count in counts.tolist()])
    begun: IntArray = each[inverse]
    return begun


@lru_cache(maxsize=4096)
def first_forwards(schedule: ScheduleKind, pp: int, count: int) -> tuple[tuple[int, ...], ...]:
    """The forwards of each chunk before each device's first backward [2][pp], of `count` microbatches."""
    made = named(schedule.value, num_devices=pp, num_microbatches=count, chunks=2)
    begun = np.zeros((2, pp), dtype=np.int64)
    for device, codes in enumerate(made.orders):
        forwards = codes[: int(np.argmax(codes & 3 != ActionKind.F))]
        chunks = (forwards >> 2) // count >= pp
        begun[:, device] = np.bincount(chunks.astype(np.int64), minlength=2)
    return tuple(tuple(row) for row in begun.tolist())


def _in_flight(schedule: ScheduleKind, virtual: int, pp: int, microbatches: IntArray) -> IntArray:
    """The forwards of all chunks that each device runs before its first backward, at least [rows, pp]."""
    devices, m = np.arange(pp), microbatches[:, None]
    match schedule:
        case ScheduleKind.GPIPE | ScheduleKind.BREADTH_FIRST:
            return m * virtual + 0 * devices
        case ScheduleKind.ZB_H2:
            return np.minimum(m, 2 * (pp - devices) - 1)
        case ScheduleKind.INTERLEAVED:
            return np.minimum(m * virtual, 2 * (pp - devices - 1) + (virtual - 1) * pp + 1)
        case _:
            return np.minimum(m, pp - devices)


def _units(job: PlanRequest, shape: ModelShape, layouts: LayoutTable, constants: Constants) -> FloatArray:
    """One row of 16 quantities a layout, of one transformer layer unless said otherwise.

    0 to 1: seconds forward and backward. 2 to 5: the seconds that the embedding adds to them, then the head.
    6 and 7: bytes kept a microbatch, and a stage's boundary. 8 and 9: weights, and the embedding's.
    10 and 11: seconds that selective and full recompute repeat. 12 and 13: dense and expert weights.
    14 and 15: seconds of computation, and those that both ends add.
    """
    columns = layouts.columns
    keys, _, inverse = unique_rows(columns[:, [TP, CP, SIZE, EP, PARTITION]])
    table = np.array(
        [_unit(job, shape, key, layouts.partitions[cut], constants) for *key, cut in keys.tolist()]
    ).reshape(-1, 16)
    units: FloatArray = table[inverse]
    mode = columns[:, MODE]
    # Repeated forwards belong to the backward; full recompute keeps a layer's input only.
    units[:, 1] += np.where(mode == 1, units[:, 10], np.where(mode == 2, units[:, 11], 0.0))
    units[:, 14] += np.where(mode > 0, units[:, 10], 0.0)
    units[:, 6] = np.where(mode == 2, units[:, 7], units[:, 6])
    return units


def _unit(
    job: PlanRequest,
    shape: ModelShape,
    key: list[int],
    partition: TensorPartition | None,
    constants: Constants,
) -> list[float]:
    """A row of `_units` without recompute.

    With dense layers before those of experts it is the minimum of both kinds: which layers a stage holds is
    not known here.
    """
    if job.experts is None:
        return _unit_of_alike(job, shape, key, partition, constants)
    routed = replace(job, experts=replace(job.experts, num_dense_layers=0))
    expert = _unit_of_alike(routed, shape, key, partition, constants)
    if job.experts.num_dense_layers == 0:
        return expert
    dense = _unit_of_alike(replace(job, experts=None), shape, key, partition, constants)
    return [min(pair) for pair in zip(expert, dense, strict=True)]


def _unit_of_alike(
    job: PlanRequest,
    shape: ModelShape,
    key: list[int],
    partition: TensorPartition | None,
    constants: Constants,
) -> list[float]:
    """The row where all layers are alike."""
    tp, cp, size, ep = key
    layout = layout_of(tp, cp, 3, ep, size, 1, 0, 0, ep=ep, partition=partition)
    run = probe(job, replace(shape, num_layers=3), layout)
    parts = stage_parts(run, constants)
    # A stage's time beside its layers is left out.
    first, middle, last = (
        Times.sum_of(times for name, times in part.items() if name != "action") for part in parts
    )
    layer = (middle.forward, middle.input_grad + middle.weight_grad)
    ends = [(end.forward, end.input_grad + end.weight_grad) for end in (first, last)]
    extra = [end[direction] - layer[direction] for end in ends for direction in (0, 1)]
    whole = layer_activation_bytes(run, experts=run.experts)
    boundary = HALF * run.tokens_per_microbatch * shape.hidden_size / tp
    bare = [sum(part[name].total for name in COMPUTE if name in part) for part in parts]
    computed = [bare[1], bare[0] + bare[2] - 2 * bare[1]]
    weights = weights_of_stages(run)
    sizes = [weights[1].total, weights[0].total - weights[1].total]
    repeated = [parts[1][name].forward for name in ("attention", "gemm", "elementwise", "launch", "tp_comm")]
    return [
        *layer,
        *extra,
        whole,
        boundary,
        *sizes,
        repeated[0],
        sum(repeated),
        weights[1].dense,
        weights[1].expert,
        *computed,
    ]


def probe(job: PlanRequest, shape: ModelShape, layout: Layout) -> TrainingRun:
    """A small run on as many devices as `layout` needs, its layers split evenly."""
    small = replace(
        job,
        machines=replace(job.machines, num_devices=layout.world_size),
        global_batch_size=layout.micro_batch_size * layout.data_parallel * layout.pipeline_parallel,
    )
    return small.run(shape, layout, (shape.num_layers // layout.num_stages,) * layout.num_stages)


def _transfers(job: PlanRequest, shape: ModelShape, columns: IntArray, constants: Constants) -> FloatArray:
    """A boundary tensor's seconds on the faster of the links that it may take."""
    tp, cp, pp, dp, size, virtual = columns[:, [TP, CP, PP, DP, SIZE, VIRTUAL]].T
    domain = job.machines.scale_up_devices
    apart = tp * cp * dp >= domain
    keys, _, inverse = unique_rows(np.column_stack([tp, cp, apart, virtual > 1]).astype(np.int64))
    each = np.array([_transfer(job, shape, key, constants) for key in keys.tolist()])
    seconds: FloatArray = communication.transfer_latency_s(constants) + each[inverse] * size
    return np.where(pp > 1, seconds, 0.0)


def _transfer(job: PlanRequest, shape: ModelShape, key: list[int], constants: Constants) -> float:
    """Seconds a sequence, without latency; neighbours that may share a domain count as sharing it."""
    tp, cp, apart, looped = key
    layout = layout_of(tp, cp, 2, 1, 1, 1 + looped, 0, 0)
    run = probe(job, replace(shape, num_layers=layout.num_stages), layout)
    inter = communication.transfer_s(run, constants, sender=0, receiver=job.machines.scale_up_devices)
    intra = communication.transfer_s(run, constants, sender=0, receiver=0)
    return (inter if apart else min(intra, inter)) - communication.transfer_latency_s(constants)


def _states(job: PlanRequest, columns: IntArray) -> FloatArray:
    """Bytes a weight of parameters, gradients and optimizer state."""
    copies = columns[:, CP] * columns[:, DP]
    weight, gradient, optimizer = bytes_per_weight(job.half, job.software)
    total: FloatArray = weight + gradient + optimizer / np.where(columns[:, SHARDED] == 1, copies, 1)
    return total


def _once(
    job: PlanRequest,
    shape: ModelShape,
    columns: IntArray,
    dense: FloatArray,
    expert: FloatArray,
    constants: Constants,
) -> FloatArray:
    """Exposed data-parallel traffic and the optimizer's step, of the most layers one device must hold."""
    keys, index, inverse = unique_rows(columns[:, [TP, CP, PP, DP, SHARDED, EP]])
    memory = job.machines.device.memory_bandwidth_bytes_per_s * MEMORY_RATE
    seconds = []
    for (tp, cp, pp, dp, sharded, ep), row in zip(keys.tolist(), index.tolist(), strict=True):
        most = -(-shape.num_layers // pp)
        held, routed = most * float(dense[row]), most * float(expert[row])
        run = probe(job, shape, layout_of(tp, cp, 1, dp, 1, 1, 0, sharded, ep=ep))
        # All traffic that compute can hide is hidden: the exposed share is what is left.
        traffic = communication.data_parallel(
            run, constants, dense=held, expert=routed, forward_s=math.inf, backward_s=math.inf
        )
        shards = run.optimizer_group if sharded else 1
        step = constants.optimizer * (held + routed) * OPTIMIZER_BYTES / shards / memory
        seconds.append(traffic + step)
    once: FloatArray = np.array(seconds)[inverse]
    return once
