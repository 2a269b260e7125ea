"""What no layout can beat: lower bounds on the predicted time and memory of every candidate at once.

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
from quartet_plugin.cost.compute import MEMORY_RATE
from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.jobs import run_of
from quartet_plugin.cost.memory import HALF, layer_activation_bytes, weights_of_stages
from quartet_plugin.cost.pipeline import FULL_ROUNDS
from quartet_plugin.cost.predict import OPTIMIZER_BYTES, stage_parts, total_of
from quartet_plugin.cost.run import Run
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.search.planner.candidates import Candidates, balanced_split, even_split, layout_of
from quartet_plugin.search.planner.job import PlanJob

# Rounding, and for pipelines that the cost model extrapolates the error of doing so.
ROUNDING, EXTRAPOLATION = 1e-9, 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of each candidate: seconds and bytes that its prediction cannot be under, and the split's ends."""

    time_s: FloatArray
    memory_bytes: FloatArray
    first: IntArray
    last: IntArray

    def split(self, job: PlanJob, shape: ModelShape, candidates: Candidates, row: int) -> tuple[int, ...]:
        """The split that candidate `row` is planned with."""
        pp, virtual = (int(candidates.columns[row, at]) for at in (2, 5))
        ends = (int(self.first[row]), int(self.last[row]))
        return split_of(job, shape, pp=pp, virtual=virtual, ends=ends)


def split_of(
    job: PlanJob, shape: ModelShape, *, pp: int, virtual: int, ends: tuple[int, int]
) -> tuple[int, ...]:
    """The balanced split, or the even one where the job asks for it."""
    if job.search.split:
        return even_split(shape.num_layers, pp * virtual)
    return balanced_split(shape.num_layers, pp, virtual, *ends)


def bounds_of(job: PlanJob, shape: ModelShape, candidates: Candidates, *, constants: Constants) -> Bounds:
    """The bounds of all `candidates`."""
    columns = candidates.columns
    if not len(columns):
        nothing = np.zeros(0, dtype=np.int64)
        return Bounds(time_s=np.zeros(0), memory_bytes=np.zeros(0), first=nothing, last=nothing)
    units = _units(job, shape, columns, constants)
    layer = units[:, :2].sum(axis=1)
    ends = units[:, 2:6].reshape(-1, 2, 2)
    first = np.rint(ends[:, 0].sum(axis=1) / layer).astype(np.int64)
    last = np.rint(ends[:, 1].sum(axis=1) / layer).astype(np.int64)
    span, memory = np.zeros(len(columns)), np.zeros(len(columns))
    keys, _, groups = unique_rows(np.column_stack([columns[:, [2, 5]], first, last]))
    order = np.argsort(groups, kind="stable")
    edges = np.searchsorted(groups[order], np.arange(len(keys) + 1))
    transfers = _transfers(job, shape, columns, constants)
    states = _states(columns)
    for at, (pp, virtual, a, b) in enumerate(keys.tolist()):
        rows = order[edges[at] : edges[at + 1]]
        split = np.array(split_of(job, shape, pp=pp, virtual=virtual, ends=(a, b)))
        microbatches = _num_microbatches(job, columns[rows])
        span[rows] = _span(split.reshape(virtual, pp), units[rows], microbatches, transfers[rows])
        memory[rows] = _memory(split.reshape(virtual, pp), units[rows], microbatches, states[rows])
        extrapolated = (microbatches > (FULL_ROUNDS + 1) * pp) & (pp > 1)
        span[rows] *= np.where(extrapolated, 1 - EXTRAPOLATION, 1.0)
    nodes = job.machines.num_devices / job.machines.devices_per_node
    whole = span + _once(job, shape, columns, units[:, 8], constants) + constants.step_s
    time = whole * (1 + constants.straggler * max(0.0, math.log2(nodes)))
    return Bounds(time_s=time * (1 - ROUNDING), memory_bytes=memory * (1 - ROUNDING), first=first, last=last)


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


def _memory(split: IntArray, units: FloatArray, microbatches: IntArray, states: FloatArray) -> FloatArray:
    """Weights, gradients and optimizer state, and the chunks in flight before the first backward."""
    virtual, pp = split.shape
    devices = np.arange(pp)
    kept, layer, vocabulary = units[:, 6:7], units[:, 8:9], units[:, 9:10]
    held = states[:, None] * (layer * split.sum(axis=0) + vocabulary * (devices == 0))
    warm = pp - devices if virtual == 1 else 2 * (pp - devices - 1) + (virtual - 1) * pp + 1
    flying = np.minimum(microbatches[:, None] * virtual, warm)
    bound: FloatArray = (held + flying * (kept * split.min(axis=0) + units[:, 7:8])).max(axis=1)
    return bound


def unique_rows(columns: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The different rows, where each first is, and which one every row is; rows are packed in one number."""
    spans = columns.max(axis=0, initial=0) + 1
    assert math.prod(int(span) for span in spans) < 2**62
    packed = np.zeros(len(columns), dtype=np.int64)
    for column, span in zip(columns.T, spans, strict=True):
        packed = packed * span + column
    _, index, inverse = np.unique(packed, return_index=True, return_inverse=True)
    return columns[index], index, inverse.ravel()


def _units(job: PlanJob, shape: ModelShape, columns: IntArray, constants: Constants) -> FloatArray:
    """One row a candidate: seconds forward and backward of a layer, and more of the embedding and of the
    head; bytes kept by a layer and by a stage; weights of a layer and of the embedding."""
    keys, _, inverse = unique_rows(columns[:, [0, 1, 4]])
    table = np.array([_unit(job, shape, key, constants) for key in keys.tolist()]).reshape(-1, 12)
    units: FloatArray = table[inverse]
    mode = columns[:, 6]
    # Repeated forwards belong to the backward; full recompute keeps a layer's input only.
    units[:, 1] += np.where(mode == 1, units[:, 10], np.where(mode == 2, units[:, 11], 0.0))
    units[:, 6] = np.where(mode == 2, units[:, 7], units[:, 6])
    return units


def _unit(job: PlanJob, shape: ModelShape, key: list[int], constants: Constants) -> list[float]:
    """A row of `_units` without recompute, and what selective and full recompute repeat."""
    tp, cp, size = key
    layout = layout_of(tp, cp, 3, 1, size, 1, 0, 0)
    run = _probe(job, replace(shape, num_layers=3), layout)
    parts = stage_parts(run, constants)
    first, middle, last = (total_of(part.values()) for part in parts)
    layer = (middle.forward, middle.input_grad + middle.weight_grad)
    ends = [(one.forward, one.input_grad + one.weight_grad) for one in (first, last)]
    extra = [end[at] - layer[at] for end in ends for at in (0, 1)]
    whole = layer_activation_bytes(run, experts=None)
    boundary = HALF * run.tokens_per_microbatch * shape.hidden_size / tp
    weights = weights_of_stages(run)
    sizes = [weights[1].total, weights[0].total - weights[1].total]
    repeated = [parts[1][name].forward for name in ("attention", "gemm", "elementwise", "launch", "tp_comm")]
    return [*layer, *extra, whole, boundary, *sizes, repeated[0], sum(repeated)]


def _probe(job: PlanJob, shape: ModelShape, layout: Layout) -> Run:
    """A small run on as many devices as `layout` needs, its layers split evenly."""
    return run_of(
        shape,
        layout,
        global_batch_size=layout.micro_batch_size * layout.data_parallel * layout.pipeline_parallel,
        layers_per_stage=(shape.num_layers // layout.num_stages,) * layout.num_stages,
        machines=replace(job.machines, num_devices=layout.world_size),
        precision=job.precision,
    )


def _num_microbatches(job: PlanJob, columns: IntArray) -> IntArray:
    found: IntArray = job.global_batch_size // (columns[:, 3] * columns[:, 4])
    return found


def _transfers(job: PlanJob, shape: ModelShape, columns: IntArray, constants: Constants) -> FloatArray:
    """A boundary tensor's seconds on the faster of the links that it may take."""
    tp, cp, pp, dp, size, virtual = columns[:, :6].T
    domain = job.machines.scale_up_devices
    apart = tp * cp * dp >= domain
    keys, _, inverse = unique_rows(np.column_stack([tp, cp, apart, virtual > 1]).astype(np.int64))
    one = [_transfer(job, shape, key, constants) for key in keys.tolist()]
    found: FloatArray = constants.hop_s + np.array(one)[inverse] * size
    return np.where(pp > 1, found, 0.0)


def _transfer(job: PlanJob, shape: ModelShape, key: list[int], constants: Constants) -> float:
    """Seconds a sequence, without latency; neighbours that may share a domain count as sharing it."""
    tp, cp, apart, looped = key
    layout = layout_of(tp, cp, 2, 1, 1, 1 + looped, 0, 0)
    run = _probe(job, replace(shape, num_layers=layout.num_stages), layout)
    far = communication.transfer_s(run, constants, sender=0, receiver=job.machines.scale_up_devices)
    near = communication.transfer_s(run, constants, sender=0, receiver=0)
    return (far if apart else min(near, far)) - constants.hop_s


def _states(columns: IntArray) -> FloatArray:
    """Bytes a weight of parameters, gradients and optimizer state."""
    copies = columns[:, 1] * columns[:, 3]
    found: FloatArray = 2.0 + 4.0 + 12.0 / np.where(columns[:, 7] == 1, copies, 1)
    return found


def _once(
    job: PlanJob, shape: ModelShape, columns: IntArray, layer: FloatArray, constants: Constants
) -> FloatArray:
    """Exposed data-parallel traffic and the optimizer's step, of the most layers one device must hold."""
    keys, index, inverse = unique_rows(columns[:, [0, 1, 2, 3, 7]])
    memory = job.machines.device.memory_bandwidth_bytes_per_s * MEMORY_RATE
    table = []
    for (tp, cp, pp, dp, sharded), at in zip(keys.tolist(), index.tolist(), strict=True):
        held = -(-shape.num_layers // pp) * float(layer[at])
        run = _probe(job, shape, layout_of(tp, cp, 1, dp, 1, 1, 0, sharded))
        # All traffic that compute can hide is hidden: the exposed share is what is left.
        traffic = communication.data_parallel(
            run, constants, dense=held, expert=0.0, forward_s=math.inf, backward_s=math.inf
        )
        shards = run.optimizer_group if sharded else 1
        table.append(traffic + constants.optimizer * held * OPTIMIZER_BYTES / shards / memory)
    found: FloatArray = np.array(table)[inverse]
    return found
