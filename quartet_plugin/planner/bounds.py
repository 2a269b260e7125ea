"""Lower bounds on the predicted time and memory of every layout of a table at once.

The time of a layer, of the embedding and of the head depends on few columns, so it is computed once for each
of their values by the cost model itself. The pipeline is bounded from below by

    max over devices d of  fill_d + num_microbatches * busy_d + drain_d

where fill_d is the forward of the stages before d, without which d cannot start, and drain_d their backward,
which starts after d's last action. Exposed gradient traffic and the optimizer's step are those of the
device that holds the most layers.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from quartet_plugin.cost import communication
from quartet_plugin.cost.compute import MEMORY_RATE, Times
from quartet_plugin.cost.constants import ClusterConstants, Constants
from quartet_plugin.cost.critical_path import FULL_ROUNDS
from quartet_plugin.cost.memory import HALF, bytes_per_weight, layer_activation_bytes, weights_of_stages
from quartet_plugin.cost.predict import COMPUTE, OPTIMIZER_BYTES, contention_gain, stage_parts
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.layout_table import (
    CP,
    DP,
    EP,
    EVEN,
    MODE,
    PP,
    SHARDED,
    SIZE,
    SPLIT,
    TP,
    VIRTUAL,
    WRITTEN,
    LayoutTable,
    layout_of,
    unique_rows,
    written_splits,
)
from quartet_plugin.split.layers import even_split, even_split_with_ends

# Rounding, and for pipelines that the cost model extrapolates the error of doing so.
ROUNDING, EXTRAPOLATION = 1e-9, 2e-3


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
        return split_of(job, shape, pp=pp, virtual=virtual, kind=kind, ends=ends)


def split_of(
    job: PlanRequest, shape: ModelShape, *, pp: int, virtual: int, kind: int, ends: tuple[int, int]
) -> tuple[int, ...]:
    """The split that the column `SPLIT` names: balanced, even, or one that the job writes out."""
    if kind >= WRITTEN:
        return written_splits(job)[kind - WRITTEN]
    if kind == EVEN:
        return even_split(shape.num_layers, num_stages=pp * virtual)
    embedding, head = ends
    return even_split_with_ends(shape.num_layers, num_stages=pp * virtual, embedding=embedding, head=head)


def bounds_of(
    job: PlanRequest,
    shape: ModelShape,
    table: LayoutTable,
    *,
    constants: Constants,
    slowdown: FloatArray | None = None,
) -> LowerBounds:
    """The bounds of all layouts of the table.

    With the slots' `slowdown` [num_slots] they hold for any split and order of ranks.
    """
    columns = table.columns
    if not len(columns):
        empty = np.zeros(0, dtype=np.int64)
        return LowerBounds(time_s=np.zeros(0), memory_bytes=np.zeros(0), first=empty, last=empty)
    units = _units(job, shape, columns, constants)
    layer = units[:, :2].sum(axis=1)
    ends = units[:, 2:6].reshape(-1, 2, 2)
    first = np.rint(ends[:, 0].sum(axis=1) / layer).astype(np.int64)
    last = np.rint(ends[:, 1].sum(axis=1) / layer).astype(np.int64)
    span, memory = np.zeros(len(columns)), np.zeros(len(columns))
    keys, _, groups = unique_rows(np.column_stack([columns[:, [PP, VIRTUAL, SPLIT]], first, last]))
    order = np.argsort(groups, kind="stable")
    edges = np.searchsorted(groups[order], np.arange(len(keys) + 1))
    transfers = _transfers(job, shape, columns, constants)
    states = _states(job, columns)
    for group, (pp, virtual, kind, a, b) in enumerate(keys.tolist()):
        rows = order[edges[group] : edges[group + 1]]
        microbatches = _num_microbatches(job, columns[rows])
        if slowdown is not None:
            span[rows] = _least_span(shape.num_layers, pp, virtual, units[rows], microbatches, slowdown)
            memory[rows] = _least_memory(shape.num_layers, pp, units[rows], states[rows])
        else:
            split = np.array(split_of(job, shape, pp=pp, virtual=virtual, kind=kind, ends=(a, b)))
            span[rows] = _span(split.reshape(virtual, pp), units[rows], microbatches, transfers[rows])
            memory[rows] = _memory(split.reshape(virtual, pp), units[rows], microbatches, states[rows])
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


def _span(split: IntArray, units: FloatArray, microbatches: IntArray, transfer: FloatArray) -> FloatArray:
    """The pipeline's bound; `split` is [virtual, pp], columns of `units` as in `_unit`."""
    virtual, pp = split.shape
    layer, ends = units[:, :2].sum(axis=1), units[:, 2:6].reshape(-1, 2, 2).sum(axis=2)
    devices = np.arange(pp)
    busy = layer[:, None] * split.sum(axis=0)
    busy[:, 0] += ends[:, 0]
    busy[:, -1] += ends[:, 1]
    ahead = layer[:, None] * np.concatenate(([0], np.cumsum(split[0])[:-1])) + ends[:, :1] * (devices > 0)
    if virtual == 1 and pp > 1:
        # 1F1B waits for its own sends: forward but on the last stage, backward but on the first.
        busy += transfer[:, None] * ((devices > 0) * 1.0 + (devices < pp - 1))
        ahead = ahead + transfer[:, None] * np.maximum(0, 2 * devices - 1)
    else:
        ahead = ahead + transfer[:, None] * 2 * devices
    bound: FloatArray = (busy * microbatches[:, None] + ahead).max(axis=1)
    return bound


def _least_span(
    num_layers: int,
    pp: int,
    virtual: int,
    units: FloatArray,
    microbatches: IntArray,
    slowdown: FloatArray,
) -> FloatArray:
    """The least that any split and any order of ranks can make of a microbatch's work.

    Work is shared among the pipeline ranks, computation by their speed. Of all replicas one has no more speed
    than the mean, and the one with the slowest slot has at most pp - 1 of the fastest beside it. Without
    virtual stages rank d is behind d others: from T >= m x_d + sum of x_k for k < d follows
    x_d <= T / m (1 - 1 / m)^d for the times x of a microbatch on the ranks, largest first.
    """
    work = units[:, :2].sum(axis=1) * num_layers + units[:, 2:6].sum(axis=1)
    compute = units[:, 14] * num_layers + units[:, 15]
    speed = min(pp * float((1 / slowdown).mean()), pp - 1 + 1 / float(slowdown.max()))
    ranks = np.arange(pp)
    waning = (1 - 1 / microbatches[:, None]) ** ranks if virtual == 1 else np.ones((len(units), pp))
    fastest = np.clip(speed - ranks, 0.0, 1.0)
    bound: FloatArray = microbatches * np.maximum(
        work / waning.sum(axis=1), compute / (waning * fastest).sum(axis=1)
    )
    return bound


def _least_memory(num_layers: int, pp: int, units: FloatArray, states: FloatArray) -> FloatArray:
    """Weights, gradients and optimizer state, shared among the pipeline ranks."""
    bound: FloatArray = states * (units[:, 8] * num_layers + units[:, 9]) / pp
    return bound


def _memory(split: IntArray, units: FloatArray, microbatches: IntArray, states: FloatArray) -> FloatArray:
    """Weights, gradients and optimizer state, and the chunks in flight before the first backward."""
    virtual, pp = split.shape
    devices = np.arange(pp)
    kept, layer, vocabulary = units[:, 6:7], units[:, 8:9], units[:, 9:10]
    held = states[:, None] * (layer * split.sum(axis=0) + vocabulary * (devices == 0))
    warm = pp - devices if virtual == 1 else 2 * (pp - devices - 1) + (virtual - 1) * pp + 1
    in_flight = np.minimum(microbatches[:, None] * virtual, warm)
    bound: FloatArray = (held + in_flight * (kept * split.min(axis=0) + units[:, 7:8])).max(axis=1)
    return bound


def _units(job: PlanRequest, shape: ModelShape, columns: IntArray, constants: Constants) -> FloatArray:
    """One row of 16 quantities a layout, of one transformer layer unless said otherwise.

    0 to 1: seconds forward and backward. 2 to 5: the seconds that the embedding adds to them, then the head.
    6 and 7: bytes kept a microbatch, and a stage's boundary. 8 and 9: weights, and the embedding's.
    10 and 11: seconds that selective and full recompute repeat. 12 and 13: dense and expert weights.
    14 and 15: seconds of computation, and those that both ends add.
    """
    keys, _, inverse = unique_rows(columns[:, [TP, CP, SIZE, EP]])
    table = np.array([_unit(job, shape, key, constants) for key in keys.tolist()]).reshape(-1, 16)
    units: FloatArray = table[inverse]
    mode = columns[:, MODE]
    # Repeated forwards belong to the backward; full recompute keeps a layer's input only.
    units[:, 1] += np.where(mode == 1, units[:, 10], np.where(mode == 2, units[:, 11], 0.0))
    units[:, 14] += np.where(mode > 0, units[:, 10], 0.0)
    units[:, 6] = np.where(mode == 2, units[:, 7], units[:, 6])
    return units


def _unit(job: PlanRequest, shape: ModelShape, key: list[int], constants: Constants) -> list[float]:
    """A row of `_units` without recompute.

    With dense layers before those of experts it is the minimum of both kinds: which layers a stage holds is
    not known here.
    """
    if job.experts is None:
        return _unit_of_alike(job, shape, key, constants)
    routed = replace(job, experts=replace(job.experts, num_dense_layers=0))
    expert = _unit_of_alike(routed, shape, key, constants)
    if job.experts.num_dense_layers == 0:
        return expert
    dense = _unit_of_alike(replace(job, experts=None), shape, key, constants)
    return [min(pair) for pair in zip(expert, dense, strict=True)]


def _unit_of_alike(job: PlanRequest, shape: ModelShape, key: list[int], constants: Constants) -> list[float]:
    """The row where all layers are alike."""
    tp, cp, size, ep = key
    layout = layout_of(tp, cp, 3, ep, size, 1, 0, 0, ep=ep)
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


def _num_microbatches(job: PlanRequest, columns: IntArray) -> IntArray:
    microbatches: IntArray = job.global_batch_size // (columns[:, DP] * columns[:, SIZE])
    return microbatches


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
