"""What the lower bounds are made of: times, bytes and transfers of the layouts of a table, one row each.

The time of a layer, of the embedding and of the head depends on few columns, so it is computed once for each
of their values by the cost model itself.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quartet_plugin.cost import activation_offload, communication
from quartet_plugin.cost.compute import MEMORY_RATE
from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.iteration.step import OPTIMIZER_BYTES
from quartet_plugin.cost.iteration.terms import COMPUTE, unit_parts
from quartet_plugin.cost.layer_kinds import layers_before, letters_of, priced_layers, sequence_of
from quartet_plugin.cost.memory import (
    HALF,
    attention_bytes_again,
    bytes_per_weight,
    layer_activation_bytes,
    weights_of_stages,
)
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.cost.times import Times
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.tensor_partition import TensorPartition
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.layout_table import (
    CP,
    DP,
    EP,
    MODE,
    PARTITION,
    PP,
    SHARDED,
    SIZE,
    TP,
    VIRTUAL,
    LayoutTable,
)
from quartet_plugin.planner.table_rows import layout_of, unique_rows

# Stages of the runs that units are read from: the first, an inner one, the last.
_SMALL_STAGES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRows:
    """One row of 18 quantities a layout, of one transformer layer unless said otherwise.

    0 to 1: seconds forward and backward. 2 to 5: the seconds that the embedding adds to them, then the head.
    6 and 7: bytes kept a microbatch, and a stage's boundary. 8 and 9: bytes of weights, gradients and
    optimizer state, and the embedding's. 10 and 11: seconds that selective and full recompute repeat.
    12 and 13: dense and expert weights. 14 and 15: seconds of computation, and those that both ends add.
    16: of 6, the bytes that selective recompute of the attention's inner part leaves. 17: seconds that
    multi-token prediction adds to the stage before the last one, 0 where it counts with the head.

    `kinds` are those of each kind of layers, and `least` the smallest of all. `before` [num_kinds, num_layers
    + 1] are the layers of each kind before each layer, and in all. `is_hybrid`: the model's pattern has them
    in any order. `is_mtp_before_last`: multi-token prediction lies on the stage before the last one, and the
    last stage has no transformer layer.
    """

    least: FloatArray
    kinds: tuple[FloatArray, ...]
    before: IntArray
    is_hybrid: bool
    is_mtp_before_last: bool = False

    @property
    def totals(self) -> list[int]:
        """All layers of each kind."""
        totals: list[int] = self.before[:, -1].tolist()
        return totals

    def summed(self, quantity: Callable[[FloatArray], FloatArray]) -> FloatArray:
        """A quantity of a layer [rows], summed over all layers of the model."""
        kinds = zip(self.kinds, self.totals, strict=True)
        return sum((num * quantity(kind) for kind, num in kinds), start=np.zeros(len(self.least)))

    def of_split(
        self, rows: IntArray, split: tuple[int, ...], pp: int, *, is_v_placement: bool
    ) -> "SplitUnits":
        """The units of some rows that have one split."""
        counts = np.array(split, dtype=np.int64)
        ends = np.cumsum(counts)
        each = self.before[:, ends] - self.before[:, ends - counts]
        return SplitUnits(
            units=self.least[rows],
            kinds=tuple(kind[rows] for kind in self.kinds),
            counts=tuple(_by_chunk(count, pp, is_v_placement=is_v_placement) for count in each),
            is_v_placement=is_v_placement,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitUnits:
    """Rows of `UnitRows` with the split that they have: `counts` [virtual, pp] of each kind of layer."""

    units: FloatArray
    kinds: tuple[FloatArray, ...]
    counts: tuple[IntArray, ...]
    is_v_placement: bool

    @property
    def virtual(self) -> int:
        """Chunks a device."""
        return len(self.counts[0])

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return int(self.counts[0].shape[1])

    def summed(self, quantity: Callable[[FloatArray], FloatArray]) -> FloatArray:
        """A quantity of a layer [rows], summed over each device's layers [rows, pp]."""
        return self._total(quantity, [count.sum(axis=0) for count in self.counts])

    def before(self, quantity: Callable[[FloatArray], FloatArray]) -> FloatArray:
        """The same over the layers of the first chunk on the devices before each [rows, pp]."""
        return self._total(quantity, [np.cumsum(count[0]) - count[0] for count in self.counts])

    def by_chunk(self, quantity: Callable[[FloatArray], FloatArray]) -> FloatArray:
        """The same over each chunk's layers [rows, virtual, pp]."""
        flat = self._total(quantity, [count.ravel() for count in self.counts])
        return flat.reshape(-1, self.virtual, self.pp)

    def least_chunk(self, quantity: Callable[[FloatArray], FloatArray]) -> FloatArray:
        """The same over the layers of each device's chunk that has the least [rows, pp]."""
        if len(self.counts) == 1:
            return self._total(quantity, [self.counts[0].min(axis=0)])
        least: FloatArray = self.by_chunk(quantity).min(axis=1)
        return least

    def with_ends(self, busy: FloatArray) -> FloatArray:
        """Seconds of each device with those that the embedding and the head add [rows, pp]."""
        ends = self.units[:, 2:6].reshape(-1, 2, 2).sum(axis=2)
        busy[:, 0] += ends[:, 0]
        busy[:, 0 if self.is_v_placement else -1] += ends[:, 1]
        if self.pp > 1:
            busy[:, -2] += self.units[:, 17]
        return busy

    def _total(self, quantity: Callable[[FloatArray], FloatArray], counts: Sequence[IntArray]) -> FloatArray:
        total: FloatArray = sum(
            (quantity(kind)[:, None] * count for kind, count in zip(self.kinds, counts, strict=True)),
            start=np.zeros((len(self.units), len(counts[0]))),
        )
        return total


def _by_chunk(counts: IntArray, pp: int, *, is_v_placement: bool) -> IntArray:
    """The layers of each chunk and device [virtual, pp]; the second chunks may run back."""
    stages = counts.reshape(-1, pp).copy()
    if is_v_placement:
        stages[1] = stages[1, ::-1].copy()
    return stages


def row_inputs(
    job: PlanRequest, shape: ModelShape, table: LayoutTable, constants: Constants
) -> tuple[UnitRows, FloatArray, FloatArray]:
    """The units of every row, a boundary tensor's seconds, and seconds once an iteration [rows].

    They are computed for the rows of equal settings together.
    """
    if len(table.options) == 1:
        return _row_inputs(job, shape, table, constants)
    parts = [
        (rows, _row_inputs(with_settings, shape, part, constants))
        for rows, part, with_settings in table.by_settings(job)
    ]
    order = np.argsort(np.concatenate([rows for rows, _ in parts]), kind="stable")

    def joined(arrays: Iterable[FloatArray]) -> FloatArray:
        whole: FloatArray = np.concatenate(list(arrays))[order]
        return whole

    first = parts[0][1][0]
    kinds = [joined(units.kinds[kind] for _, (units, _, _) in parts) for kind in range(len(first.kinds))]
    units = replace(first, least=joined(units.least for _, (units, _, _) in parts), kinds=tuple(kinds))
    return units, joined(part[1] for _, part in parts), joined(part[2] for _, part in parts)


def _row_inputs(
    job: PlanRequest, shape: ModelShape, table: LayoutTable, constants: Constants
) -> tuple[UnitRows, FloatArray, FloatArray]:
    columns, units = table.columns, unit_rows(job, shape, table, constants)
    once = once_s(job, shape, columns, units, constants)
    return units, transfers_s(job, shape, columns, constants), once


def unit_rows(job: PlanRequest, shape: ModelShape, layouts: LayoutTable, constants: Constants) -> UnitRows:
    """The units of every layout of the table."""
    columns = layouts.columns
    keys, _, inverse = unique_rows(columns[:, [TP, CP, SIZE, EP, PARTITION]])

    def table(job: PlanRequest, shape: ModelShape) -> FloatArray:
        rows = [_unit(job, shape, key, layouts.partitions[cut], constants) for *key, cut in keys.tolist()]
        return np.array(rows).reshape(-1, 18)

    tables = [table(*kind_job) for kind_job in jobs_of_kinds(job, shape)]
    kinds = tuple(_of_rows(job, columns, each[inverse]) for each in tables)
    least = kinds[0] if len(kinds) == 1 else _of_rows(job, columns, np.minimum.reduce(tables)[inverse])
    return UnitRows(
        least=least,
        kinds=kinds,
        before=layers_before_of(job, shape),
        is_hybrid=bool(shape.pattern),
        is_mtp_before_last=job.has_mtp_before_last,
    )


def jobs_of_kinds(job: PlanRequest, shape: ModelShape) -> Iterator[tuple[PlanRequest, ModelShape]]:
    """Jobs and shapes whose layers are all of one kind, for each kind of layers."""
    if shape.pattern:
        # MTP layers without kinds are mean ones of the whole pattern, which no run of one kind has: left out.
        job = job if job.mtp_kinds is not None else replace(job, mtp_layers=0)
        for kind in priced_layers(shape, job.experts, job.latent).kinds:
            yield job, shape.with_pattern(kind.letter * _SMALL_STAGES)
        return
    if job.experts is not None and job.experts.num_dense_layers:
        yield replace(job, experts=None), shape
        job = replace(job, experts=replace(job.experts, num_dense_layers=0))
    yield job, shape


def layers_before_of(job: PlanRequest, shape: ModelShape) -> IntArray:
    """`UnitRows.before` of a job's model."""
    layers = priced_layers(shape, job.experts, job.latent)
    sequence = sequence_of(shape.num_layers, layers.experts, layers.pattern)
    return layers_before(sequence, letters_of(layers.experts, layers.kinds))


def _of_rows(job: PlanRequest, columns: IntArray, units: FloatArray) -> FloatArray:
    """The units with the rows' recompute, and with bytes of states in place of weights."""
    mode, values = columns[:, MODE], job.values_in(None)
    # Repeated forwards belong to the backward; full recompute keeps a layer's input only.
    has_core = values.get("recompute_modules", "core_attn") == "core_attn"
    has_all = values.get("recompute_method") != "block"
    selective, full = units[:, 10] * has_core, units[:, 11] * has_all
    units[:, 1] += np.where(mode == 1, selective, np.where(mode == 2, full, 0.0))
    units[:, 14] += np.where(mode > 0, units[:, 10] * (has_core and has_all), 0.0)
    # Of other modules hardly more than the input may be left; layers in groups share an input.
    together = int(values.get("recompute_num_layers") or 1) if has_all else 1
    of_core = units[:, 16] if has_core else units[:, 7]
    kept = [units[:, 6], of_core, units[:, 7] / together]
    units[:, 6] = np.select([mode == 0, mode == 1, mode == 2], kept)
    weight, gradient, optimizer = bytes_per_weight(job.half, job.software)
    copies = np.where(columns[:, SHARDED] == 1, columns[:, CP] * columns[:, DP], 1)
    holders = columns[:, TP] if values.get("expert_tensor_parallel") == 1 else 1
    if job.software.shards_parameters:
        # Of weights and gradients, too, a rank holds a share at least.
        weight, gradient, optimizer = 0.0, 0.0, weight + gradient + optimizer
        copies = columns[:, CP] * columns[:, DP]
    # The ranks of an expert group hold different experts.
    dense = weight + gradient + optimizer / copies
    routed = weight + gradient + optimizer / np.maximum(1.0, copies * holders / columns[:, EP])
    units[:, 8] = units[:, 12] * dense + units[:, 13] * routed
    units[:, 9] *= dense
    return units


def _unit(
    job: PlanRequest,
    shape: ModelShape,
    key: list[int],
    partition: TensorPartition | None,
    constants: Constants,
) -> list[float]:
    """A row of `UnitRows` without recompute where all layers are alike, with weights for bytes."""
    tp, cp, size, ep = key
    layout = layout_of(tp, cp, _SMALL_STAGES, ep, size, 1, 0, 0, ep=ep, partition=partition)
    run = small_run(job, shape, layout)
    # A stage's time beside its layers is left out.
    unit = unit_parts(replace(run, is_mtp_before_last=job.has_mtp_before_last), constants)
    (parts,), ((kind_run, experts),) = unit.layers, run.runs_by_kind
    # Recompute leaves less to copy, and hides more of it, than a run without it has.
    timed, further = (
        {name: times for name, times in part.items() if name != "offload"} for part in (parts, unit.further)
    )
    layer, *ends = (_both_ways(Times.sum_of(part.values())) for part in (timed, unit.embedding, unit.head))
    whole = layer_activation_bytes(kind_run, experts=experts)
    whole -= activation_offload.layer_bytes(kind_run, experts=experts).freed_bytes
    boundary = HALF * run.tokens_per_microbatch * shape.hidden_size / tp
    bare = [
        sum(part[name].total_s for name in COMPUTE if name in part)
        for part in (parts, unit.embedding, unit.head, further)
    ]
    weights = weights_of_stages(run)
    sizes = [weights[1].num_total, weights[0].num_total - weights[1].num_total]
    repeated = [parts[name].forward_s for name in ("attention", "gemm", "elementwise", "launch")]
    repeated.append(_repeated_collectives_s(kind_run, constants))
    return [
        *layer,
        *ends[0],
        *ends[1],
        whole,
        boundary,
        *sizes,
        repeated[0],
        sum(repeated),
        weights[1].num_dense,
        weights[1].num_expert,
        bare[0],
        bare[1] + bare[2] + bare[3],
        whole - attention_bytes_again(kind_run),
        Times.sum_of(further.values()).total_s,
    ]


def _repeated_collectives_s(run: TrainingRun, constants: Constants) -> float:
    """Seconds of a layer's tensor-parallel collectives that full recompute repeats: ranks wait for none."""
    ffn = float(run.has_ffn) if run.experts is None else sum(communication.ffn_pairs(run, run.experts))
    pairs = float(run.has_attention) + ffn
    return communication.tensor_parallel(run, constants)[1] * pairs / 2.0


def _both_ways(times: Times) -> tuple[float, float]:
    """The seconds forward and backward."""
    return times.forward_s, times.input_grad_s + times.weight_grad_s


def small_run(
    job: PlanRequest, shape: ModelShape, layout: Layout, *, layers_per_stage: int = 1
) -> TrainingRun:
    """A small run on as many devices as `layout` needs, `layers_per_stage` on each stage."""
    small = replace(
        job,
        machines=replace(job.machines, num_devices=layout.world_size),
        global_batch_size=layout.micro_batch_size * layout.data_parallel * layout.pipeline_parallel,
    )
    # An inner stage has nothing beside its layers.
    split = (layers_per_stage,) * layout.num_stages
    return small.run(shape, layout, split, is_mtp_before_last=False)


def transfers_s(job: PlanRequest, shape: ModelShape, columns: IntArray, constants: Constants) -> FloatArray:
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
    run = small_run(job, shape, layout)
    inter = communication.transfer_s(run, constants, sender=0, receiver=job.machines.scale_up_devices)
    intra = communication.transfer_s(run, constants, sender=0, receiver=0)
    return (inter if apart else min(intra, inter)) - communication.transfer_latency_s(constants)


def once_s(
    job: PlanRequest,
    shape: ModelShape,
    columns: IntArray,
    units: UnitRows,
    constants: Constants,
) -> FloatArray:
    """Least seconds once an iteration [rows]: exposed data-parallel traffic and the optimizer's step."""
    keys, index, inverse = unique_rows(columns[:, [TP, CP, PP, DP, SHARDED, EP]])
    memory = job.machines.device.memory_bandwidth_bytes_per_s * MEMORY_RATE
    seconds = []
    for (tp, cp, pp, dp, sharded, ep), row in zip(keys.tolist(), index.tolist(), strict=True):
        layout = layout_of(tp, cp, 1, dp, 1, 1, 0, sharded, ep=ep)
        run = small_run(job, shape, layout, layers_per_stage=shape.num_layers)
        weights = _fullest_weights(units, row, shape.num_layers, pp)
        seconds.append(min(_weights_s(run, constants, held, routed, memory) for held, routed in weights))
    once: FloatArray = np.array(seconds)[inverse]
    return once


def _fullest_weights(units: UnitRows, row: int, num_layers: int, pp: int) -> list[tuple[float, float]]:
    """Pairs of dense and expert weights; the fullest device holds at least as many as one of the pairs.

    A model without a pattern has one pair, of the layers that some device must hold. A hybrid model's fullest
    device holds 1 / `pp` of all weights at least: half of that in dense weights, or half of it in experts'.
    """
    if not units.is_hybrid:
        most = -(-num_layers // pp)
        return [(most * float(units.least[row, 12]), most * float(units.least[row, 13]))]
    kinds = list(zip(units.totals, units.kinds, strict=True))
    share = sum(num * float(kind[row, 12:14].sum()) for num, kind in kinds) / pp
    has_experts = any(kind[row, 13] > 0.0 for _, kind in kinds)
    return [(share / 2, 0.0), (0.0, share / 2)] if has_experts else [(share, 0.0)]


def _weights_s(run: TrainingRun, constants: Constants, held: float, routed: float, memory: float) -> float:
    """Seconds once an iteration of a device with `held` dense weights and `routed` ones of experts."""
    # All traffic that compute can hide is hidden: the exposed share is what is left.
    traffic = communication.data_parallel_s(
        run, constants, num_dense=held, num_expert=routed, forward_s=math.inf, backward_s=math.inf
    )
    shards, expert_shards = run.optimizer_shards
    stepped = held / shards + routed / expert_shards
    return traffic + constants.optimizer * stepped * OPTIMIZER_BYTES / memory
