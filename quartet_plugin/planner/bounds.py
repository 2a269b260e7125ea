"""Lower bounds on the predicted time and memory of every layout of a table at once.

The time of a layer, of the embedding and of the head depends on few columns, so it is computed once for each
of their values by the cost model itself. The pipeline is bounded from below by

    max over devices d of  fill_d + num_microbatches * busy_d + drain_d

where fill_d is the forward of the stages before d, without which d cannot start, and drain_d their backward,
which starts after d's last action; where backwards are split that may be a weight gradient, and nothing has
to follow. It holds for every group of an interleaved order. Exposed gradient traffic and the optimizer's step
are those of the device that holds the most layers.

On equal devices they are those of the split that a row is planned with first. `fitting_bounds` has those of
every other split that fits in memory.
"""

import math
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from quartet_plugin.cost.constants import ClusterConstants, Constants
from quartet_plugin.cost.iteration.orders import FULL_ROUNDS
from quartet_plugin.cost.iteration.replay import kind_blocks_on_sends
from quartet_plugin.cost.iteration.step import contention_gain
from quartet_plugin.cost.layer_kinds import layers_before, letters_in
from quartet_plugin.cost.run import ScheduleKind, Software
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.bound_units import SplitUnits, UnitRows, row_inputs
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.layout_table import (
    EVEN,
    PP,
    SCHEDULE,
    SPLIT,
    VIRTUAL,
    WRITTEN,
    LayoutTable,
    num_microbatches,
    written_splits,
)
from quartet_plugin.planner.table_rows import unique_rows
from quartet_plugin.planner.table_schedules import KINDS, has_v_placement
from quartet_plugin.schedule import placement as places
from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.named import named
from quartet_plugin.space.expert_stages import split_with_experts
from quartet_plugin.split.kinds import KindLoads, balanced_by_kinds, least_by_stage
from quartet_plugin.split.layers import EndLoads, even_split, even_split_with_ends, split_for_end_loads

# Rounding, and for pipelines that the cost model extrapolates the error of doing so.
ROUNDING, EXTRAPOLATION = 1e-9, 2e-3
# Parts of the mean layer to which a hybrid model's loads are rounded, so that many layouts share a split.
LOAD_PARTS = 16
# Steps of the search for the least time of whole layers.
_HALVINGS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundInputs:
    """What the bounds of a table's rows are computed from.

    `once_s` [rows] are the seconds of what happens once an iteration. The sum of an iteration's terms is
    multiplied by `straggler`, loses the part `gain` of the pipeline's span, which ranks gain by each other's
    waiting, and is multiplied by `residual`. `slowest` is the slowdown of the slowest slot.
    """

    units: UnitRows
    microbatches: IntArray
    transfers_s: FloatArray
    software: Software
    once_s: FloatArray
    straggler: float
    gain: float
    residual: float
    slowest: float

    def seconds(self, rows: IntArray, span: FloatArray) -> FloatArray:
        """The bounds of iterations whose pipelines take at least `span` seconds."""
        time: FloatArray = (span + self.once_s[rows]) * self.straggler
        # Ranks that share a memory gain by each other's waiting: at most in all of the pipeline's time.
        time = (time - self.gain * span) * self.residual
        return time * (1 - ROUNDING)

    def span_of_split(self, rows: IntArray, units: SplitUnits, schedule: ScheduleKind) -> FloatArray:
        """Seconds that the pipelines of `rows` take at least with one split."""
        waits_s = self.transfer_waits(rows, units.pp, units.virtual, schedule)
        return _span(units, self.microbatches[rows], waits_s, schedule)

    def transfer_waits(
        self, rows: IntArray, pp: int, virtual: int, schedule: ScheduleKind
    ) -> tuple[FloatArray, FloatArray]:
        """Seconds of transfers that each device waits for [rows, pp].

        First those of every microbatch: its sends where they block, forward of all stages but the last one,
        backward of all but the first. Then those before its first action and after its last one.
        """
        transfer, devices = self.transfers_s[rows][:, None], np.arange(pp)
        hops = devices if _follows_nothing(schedule) else 2 * devices
        sends = np.zeros(pp)
        if kind_blocks_on_sends(schedule, self.software):
            sends = 2.0 * virtual - (devices == 0) - (devices == pp - 1)
            # Its last send is one of every microbatch's.
            hops = np.maximum(0, hops - 1)
        return transfer * sends, transfer * hops


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBounds:
    """Of each layout: seconds and bytes that its prediction cannot be under, and its whole end loads.

    `first` and `last` are the loads of embedding and head, rounded to whole layers. `loads` [rows, num_kinds
    + 2] are those of a hybrid model's embedding, layers of each kind, and head, in 16ths of the mean layer;
    of other models they have no columns. `mtp` [rows] is the load of multi-token prediction on the stage
    before the last one, in whole layers; empty elsewhere.
    """

    time_s: FloatArray
    memory_bytes: FloatArray
    first: IntArray
    last: IntArray
    loads: IntArray
    mtp: IntArray
    inputs: BoundInputs

    def end_loads(self, row: int) -> EndLoads:
        """The loads of the ends of a row, in whole layers."""
        mtp = float(self.mtp[row]) if len(self.mtp) else None
        return EndLoads(embedding=float(self.first[row]), head=float(self.last[row]), mtp=mtp)

    def split(self, job: PlanRequest, shape: ModelShape, table: LayoutTable, row: int) -> tuple[int, ...]:
        """The split that the layout of `row` is planned with."""
        pp, virtual, kind = (int(table.columns[row, column]) for column in (PP, VIRTUAL, SPLIT))
        return split_of(
            job,
            shape,
            pp=pp,
            virtual=virtual,
            kind=kind,
            end_loads=self.end_loads(row),
            loads=tuple(self.loads[row].tolist()),
            is_v_placement=has_v_placement(table.schedule(row)),
        )

    def of_split(self, table: LayoutTable, row: int, split: tuple[int, ...]) -> tuple[float, float]:
        """The seconds and bytes that `row` with `split` cannot be under, on any order of ranks."""
        inputs, rows, schedule = self.inputs, np.array([row]), table.schedule(row)
        pp = int(table.columns[row, PP])
        units = inputs.units.of_split(rows, split, pp, is_v_placement=has_v_placement(schedule))
        microbatches = inputs.microbatches[rows]
        memory = _memory(units, microbatches, schedule)
        span = inputs.span_of_split(rows, units, schedule)
        # One replica has the slowest slot, at best on the rank where it has the least to do.
        span = np.maximum(span, _with_slowest(units, inputs.slowest) * microbatches)
        span = span * extrapolation(microbatches, pp)
        return float(inputs.seconds(rows, span)[0]), float(memory[0]) * (1 - ROUNDING)


def split_of(
    job: PlanRequest,
    shape: ModelShape,
    *,
    pp: int,
    virtual: int,
    kind: int,
    end_loads: EndLoads,
    loads: tuple[int, ...] = (),
    is_v_placement: bool = False,
) -> tuple[int, ...]:
    """The split that the column `SPLIT` names: balanced, even, or one that the job writes out.

    In a V the second chunks run back over the devices, and the first device holds both ends. `end_loads` are
    in whole layers, and `loads` are those of `LowerBounds`.
    """
    if kind >= WRITTEN:
        return written_splits(job)[kind - WRITTEN]
    if kind == EVEN:
        is_before_last = job.has_mtp_before_last
        return even_split(shape.num_layers, num_stages=pp * virtual, is_mtp_before_last=is_before_last)
    if job.has_mtp_before_last:
        return split_for_end_loads(shape.num_layers, num_devices=pp, num_chunks=virtual, end_loads=end_loads)
    if loads:
        return _split_of_pattern(
            shape.pattern or "",
            loads=loads,
            pp=pp,
            virtual=virtual,
            is_v_placement=is_v_placement,
            expert_layers=job.logged_expert_layers,
        )
    embedding, head = int(end_loads.embedding), int(end_loads.head)
    if is_v_placement:
        return v_split(shape.num_layers, num_devices=pp, embedding=embedding, head=head)
    return even_split_with_ends(shape.num_layers, num_stages=pp * virtual, embedding=embedding, head=head)


@lru_cache(maxsize=4096)
def _split_of_pattern(
    pattern: str,
    *,
    loads: tuple[int, ...],
    pp: int,
    virtual: int,
    is_v_placement: bool,
    expert_layers: tuple[int, ...],
) -> tuple[int, ...]:
    """The split of a hybrid model's layers that balances devices, or the nearest one with `expert_layers`.

    Every device needs one of these where there are some.
    """
    embedding, *kinds, head = loads
    num_stages = pp * virtual
    fixed = np.zeros(num_stages)
    fixed[0] += embedding
    fixed[-1] += head
    placement = places.v_shape(pp) if is_v_placement else places.loop(pp, virtual)
    layers = KindLoads(
        fixed=fixed,
        layer=np.repeat(np.array(kinds, dtype=np.float64)[:, None], num_stages, axis=1),
        before=layers_before(pattern, letters_in(pattern)),
        placement=placement,
    )
    balanced = balanced_by_kinds(layers, least_by_stage(num_stages, len(pattern)))
    return split_with_experts(balanced, placement=placement, expert_layers=expert_layers)


def v_split(num_layers: int, *, num_devices: int, embedding: int, head: int) -> tuple[int, ...]:
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
    inputs = _inputs(job, shape, table, constants, slowdown)
    units, microbatches_of_rows = inputs.units.least, inputs.microbatches
    layer = inputs.units.summed(_layer_s) / shape.num_layers if inputs.units.is_hybrid else _layer_s(units)
    ends = units[:, 2:6].reshape(-1, 2, 2)
    loads, mtp = _loads_of_kinds(inputs.units, layer), _mtp_loads(inputs.units, layer)
    first = np.rint(ends[:, 0].sum(axis=1) / layer).astype(np.int64)
    last = np.rint(ends[:, 1].sum(axis=1) / layer).astype(np.int64)
    more_loads = mtp[:, None] if len(mtp) else loads
    which = 0 * first
    if more_loads.shape[1]:
        which = np.unique(more_loads, axis=0, return_inverse=True)[1].ravel()
    span, memory = np.zeros(len(columns)), np.zeros(len(columns))
    keys, examples, groups = unique_rows(
        np.column_stack([columns[:, [PP, VIRTUAL, SPLIT, SCHEDULE]], first, last, which])
    )
    order = np.argsort(groups, kind="stable")
    edges = np.searchsorted(groups[order], np.arange(len(keys) + 1))
    for group, (pp, virtual, kind, number, a, b, _) in enumerate(keys.tolist()):
        rows = order[edges[group] : edges[group + 1]]
        schedule = KINDS[number]
        if slowdown is None:
            is_v = has_v_placement(schedule)
            split = split_of(
                job,
                shape,
                pp=pp,
                virtual=virtual,
                kind=kind,
                end_loads=EndLoads(
                    embedding=float(a),
                    head=float(b),
                    mtp=float(mtp[examples[group]]) if len(mtp) else None,
                ),
                loads=tuple(loads[examples[group]].tolist()),
                is_v_placement=is_v,
            )
            of_split = partial(inputs.units.of_split, split=split, pp=pp, is_v_placement=is_v)
            memory[rows] = _memory(of_split(rows), microbatches_of_rows[rows], schedule)
        else:
            memory[rows] = _least_memory(
                shape.num_layers, pp, virtual, units[rows], microbatches_of_rows[rows], schedule
            )
        rows = rows[memory[rows] <= limit_bytes]
        microbatches = microbatches_of_rows[rows]
        if slowdown is None:
            span[rows] = inputs.span_of_split(rows, of_split(rows), schedule)
        else:
            span[rows] = _least_span(
                shape.num_layers, pp, virtual, units[rows], microbatches, slowdown, schedule
            )
        span[rows] *= extrapolation(microbatches, pp)
    return LowerBounds(
        time_s=inputs.seconds(np.arange(len(columns)), span),
        memory_bytes=memory * (1 - ROUNDING),
        first=first,
        last=last,
        loads=loads,
        mtp=mtp,
        inputs=inputs,
    )


def _loads_of_kinds(units: UnitRows, mean_s: FloatArray) -> IntArray:
    """`LowerBounds.loads`, of which the mean layer takes `mean_s` [rows]."""
    if not units.is_hybrid:
        return np.zeros((len(mean_s), 0), dtype=np.int64)
    embedding, head = units.least[:, 2:6].reshape(-1, 2, 2).sum(axis=2).T
    seconds = np.column_stack([embedding, *map(_layer_s, units.kinds), head])
    loads: IntArray = np.maximum(1, np.rint(LOAD_PARTS * seconds / mean_s[:, None])).astype(np.int64)
    return loads


def _mtp_loads(units: UnitRows, layer_s: FloatArray) -> IntArray:
    """`LowerBounds.mtp`, of which a layer takes `layer_s` [rows]."""
    if not units.is_mtp_before_last:
        return np.zeros(0, dtype=np.int64)
    loads: IntArray = np.rint(units.least[:, 17] / layer_s).astype(np.int64)
    return loads


def _inputs(
    job: PlanRequest,
    shape: ModelShape,
    table: LayoutTable,
    constants: Constants,
    slowdown: FloatArray | None,
) -> BoundInputs:
    units, microbatch_transfers_s, seconds_once = row_inputs(job, shape, table, constants)
    nodes = job.machines.num_devices / job.machines.devices_per_node
    gain, residual = 0.0, 1.0
    if isinstance(constants, ClusterConstants):
        gain, residual = contention_gain(job.software, job.machines, constants), constants.residual
    return BoundInputs(
        units=units,
        microbatches=num_microbatches(job, table.columns),
        transfers_s=microbatch_transfers_s,
        software=job.software,
        once_s=seconds_once + constants.step_s,
        straggler=1 + constants.straggler * max(0.0, math.log2(nodes)),
        gain=gain,
        residual=residual,
        slowest=1.0 if slowdown is None else float(slowdown.max()),
    )


def extrapolation(microbatches: IntArray, pp: int | IntArray) -> FloatArray:
    """What is left of a bound where the cost model extrapolates the pipeline."""
    is_extrapolated = (microbatches > (FULL_ROUNDS + 1) * pp) & (pp > 1)
    return np.where(is_extrapolated, 1 - EXTRAPOLATION, 1.0)


def _with_slowest(units: SplitUnits, slowest: float) -> FloatArray:
    """Seconds of a microbatch on the rank where the slowest slot costs the fewest [rows]."""
    slow = units.summed(lambda kind: kind[:, :2].sum(axis=1) + (slowest - 1) * kind[:, 14])
    least: FloatArray = units.with_ends(slow).min(axis=1)
    return least


def _layer_s(kind: FloatArray) -> FloatArray:
    """Seconds of a layer's forward and backward."""
    seconds: FloatArray = kind[:, :2].sum(axis=1)
    return seconds


def _span(
    of_split: SplitUnits,
    microbatches: IntArray,
    transfer_waits_s: tuple[FloatArray, FloatArray],
    schedule: ScheduleKind,
) -> FloatArray:
    """The pipeline's bound."""
    units, devices = of_split.units, np.arange(of_split.pp)
    each_s, once_s = transfer_waits_s
    busy = of_split.with_ends(of_split.summed(_layer_s)) + each_s
    embedding = units[:, 2:4].sum(axis=1)[:, None]
    if _follows_nothing(schedule):
        ahead = of_split.before(lambda kind: kind[:, 0]) + units[:, 2:3] * (devices > 0)
    else:
        ahead = of_split.before(_layer_s) + embedding * (devices > 0)
    bound: FloatArray = (busy * microbatches[:, None] + ahead + once_s).max(axis=1)
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
    one stage a rank and full backwards rank d is behind d others: from T >= m x_d + sum of x_k for k < d
    follows x_d <= T / m (1 - 1 / m)^d for the times x of a microbatch on the ranks, largest first.
    """
    work = units[:, :2].sum(axis=1) * num_layers + units[:, 2:6].sum(axis=1) + units[:, 17]
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
    whole = _least_busy(num_layers, pp, virtual, units, slowest, is_v_placement=has_v_placement(schedule))
    return np.maximum(bound, microbatches * whole)


def _least_busy(
    num_layers: int, pp: int, virtual: int, units: FloatArray, slowest: float, *, is_v_placement: bool
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
    if pp == 1 or is_v_placement:
        ends = [(embedding + head, 1), (nothing, pp - 1)]
    else:
        ends = [(embedding, 1), (head, 1), (nothing, pp - 2)]
    ends = [(end, count) for end, count in ends if count]
    least = max(0, virtual - (2 if is_v_placement else 1))

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
    schedule: ScheduleKind,
) -> FloatArray:
    """Weights, gradients, optimizer state and the microbatches in flight, shared among the pipeline ranks."""
    kept, layer = units[:, 6:7], units[:, 8:9]
    in_flight = _least_in_flight(schedule, virtual, pp, microbatches)
    a_layer = layer + kept * in_flight
    bound: FloatArray = num_layers / (1.0 / a_layer).sum(axis=1)
    return np.maximum(bound, (units[:, 8] * num_layers + units[:, 9]) / pp)


def in_flight_at_least(
    schedule: ScheduleKind, virtual: int, pp: int, microbatches: IntArray
) -> tuple[IntArray, IntArray]:
    """The forwards of every chunk, and of all chunks, that each device runs before its first backward.

    Both [rows, pp] are lower bounds.
    """
    each = _least_in_flight(schedule, virtual, pp, microbatches)
    if has_v_placement(schedule):
        return each, _in_flight_of_chunks(schedule, pp, microbatches).sum(axis=1)
    return each, _in_flight(schedule, virtual, pp, microbatches)


def _least_in_flight(schedule: ScheduleKind, virtual: int, pp: int, microbatches: IntArray) -> IntArray:
    """The microbatches that every chunk of a device has in flight before its first backward [rows, pp]."""
    if has_v_placement(schedule):
        return _in_flight_of_chunks(schedule, pp, microbatches).min(axis=1)
    devices, m = np.arange(pp), microbatches[:, None]
    match schedule:
        case ScheduleKind.BREADTH_FIRST:
            return m + 0 * devices
        case ScheduleKind.INTERLEAVED:
            return np.minimum(m, np.minimum(pp, 2 * (pp - devices) - 1))
        case _:
            return _in_flight(schedule, virtual, pp, microbatches)


def _memory(of_split: SplitUnits, microbatches: IntArray, schedule: ScheduleKind) -> FloatArray:
    """Weights, gradients and optimizer state, and the chunks in flight before the first backward."""
    virtual, pp, units = of_split.virtual, of_split.pp, of_split.units
    held = of_split.summed(lambda kind: kind[:, 8]) + units[:, 9:10] * (np.arange(pp) == 0)
    if has_v_placement(schedule):
        by_chunk = _in_flight_of_chunks(schedule, pp, microbatches)
        kept = of_split.by_chunk(lambda kind: kind[:, 6])
        in_flight_bytes = (by_chunk * (kept + units[:, 7, None, None])).sum(axis=1)
    else:
        in_flight = _in_flight(schedule, virtual, pp, microbatches)
        in_flight_bytes = in_flight * (of_split.least_chunk(lambda kind: kind[:, 6]) + units[:, 7:8])
    bound: FloatArray = (held + in_flight_bytes).max(axis=1)
    return bound


def _in_flight_of_chunks(schedule: ScheduleKind, pp: int, microbatches: IntArray) -> IntArray:
    """The forwards of both chunks before each device's first backward in a V [rows, 2, pp]."""
    # Longer orders begin alike.
    counts, inverse = np.unique(np.minimum(microbatches, 2 * pp), return_inverse=True)
    each = np.array([first_forwards(schedule, pp, count) for count in counts.tolist()])
    begun: IntArray = each[inverse]
    return begun


@lru_cache(maxsize=4096)
def first_forwards(schedule: ScheduleKind, pp: int, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    """The forwards of each chunk before each device's first backward [2][pp], of `num_microbatches`."""
    made = named(schedule.value, num_devices=pp, num_microbatches=num_microbatches, num_chunks=2)
    begun = np.zeros((2, pp), dtype=np.int64)
    for device, codes in enumerate(made.orders):
        forwards = codes[: int(np.argmax(codes & 3 != ActionKind.F))]
        chunks = (forwards >> 2) // num_microbatches >= pp
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
