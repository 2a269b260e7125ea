"""Every legal layout of a job as rows of an integer table, and which combinations of degrees are refused."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from quartet_plugin.cost.memory import distinct_numbers
from quartet_plugin.cost.run import ScheduleKind
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.tensor_partition import TensorPartition
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.partition_choices import STOCK_ALONE, legal_partitions, partitions_of
from quartet_plugin.planner.table_rows import RECOMPUTE, layout_of, unique_rows
from quartet_plugin.planner.table_schedules import KINDS, schedules_of_rows
from quartet_plugin.space.forbidden import forbidden_rows
from quartet_plugin.space.knobs.divisors import divisors, nearest_words
from quartet_plugin.space.layouts import is_requested

# The columns of the table.
TP, CP, PP, DP, SIZE, VIRTUAL, EP, SPLIT, MODE, SHARDED, SCHEDULE, PARTITION = range(12)
MAX_MICRO_BATCH = 64
# Values of the column `SPLIT`; larger numbers are the job's written splits in order.
BALANCED, EVEN, WRITTEN = 0, 1, 2
# Sizes of FP8 products are multiples of it.
FP8_MULTIPLE = 16
GIB = 2**30

# (TP, CP, PP, DP, micro-batch) and the (virtual stages, EP, split) that go with it.
type _Row = tuple[int, int, int, int, int]
type _Variant = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTable:
    """One row a layout and schedule; the columns are `TP` to `PARTITION`.

    `SCHEDULE` is a number of `KINDS`, `PARTITION` one of `partitions`.
    """

    columns: IntArray
    partitions: tuple[TensorPartition | None, ...] = STOCK_ALONE

    def __len__(self) -> int:
        return len(self.columns)

    def layout(self, row: int) -> Layout:
        """The layout of one row."""
        tp, cp, pp, dp, size, virtual, ep, _, mode, sharded, _, cut = (int(x) for x in self.columns[row])
        partition = self.partitions[cut]
        return layout_of(tp, cp, pp, dp, size, virtual, mode, sharded, ep=ep, partition=partition)

    def schedule(self, row: int) -> ScheduleKind:
        """The schedule of one row."""
        return KINDS[int(self.columns[row, SCHEDULE])]


def layout_table_of(job: PlanRequest, shape: ModelShape) -> LayoutTable:
    """All layouts and schedules of `shape` that run on Megatron and the job allows, in a fixed order."""
    search = job.search
    modes = [index for index, mode in enumerate(RECOMPUTE) if is_requested(search.recompute, mode)]
    shards = [int(on) for on in (False, True) if is_requested(search.distributed_optimizer, on)]
    rows = list(_rows(job, shape))
    bases = np.array([base for base, _ in rows], dtype=np.int64).reshape(-1, 5)
    counts = [len(variants) for _, variants in rows]
    rest = np.array([variant for _, variants in rows for variant in variants], dtype=np.int64).reshape(-1, 3)
    bare = np.column_stack([np.repeat(bases, counts, axis=0), rest])
    options = np.array([(mode, on) for mode in modes for on in shards], dtype=np.int64).reshape(-1, 2)
    columns = np.hstack([np.repeat(bare, len(options), axis=0), np.tile(options, (len(bare), 1))])
    # One replica has nothing to share its optimizer with, unless nothing else was requested.
    alone = (columns[:, CP] * columns[:, DP] == 1) & (columns[:, SHARDED] == 1)
    columns = columns[~alone] if 0 in shards else columns
    kept, kinds = schedules_of_rows(
        job,
        pp=columns[:, PP],
        virtual=columns[:, VIRTUAL],
        microbatches=num_microbatches(job, columns),
        modes=columns[:, MODE],
    )
    columns = np.column_stack([columns[kept], kinds])
    columns = columns[~forbidden_rows(search.forbid, _axes(columns), num_rows=len(columns))]
    partitions = partitions_of(job)
    return LayoutTable(columns=_with_partitions(job, shape, columns, partitions), partitions=partitions)


def _with_partitions(
    job: PlanRequest, shape: ModelShape, columns: IntArray, partitions: tuple[TensorPartition | None, ...]
) -> IntArray:
    """The rows once for each partition of a layer that is asked for and legal there."""
    keys, _, inverse = unique_rows(columns[:, [TP, CP, EP, SIZE]])
    legal = [legal_partitions(job, shape, partitions, *key) for key in keys.tolist()]
    counts = np.array([len(cuts) for cuts in legal], dtype=np.int64)
    of_row = counts[inverse]
    each = [cut for key in inverse.tolist() for cut in legal[key]]
    return np.column_stack([np.repeat(columns, of_row, axis=0), np.array(each, dtype=np.int64)])


def _axes(columns: IntArray) -> dict[str, IntArray]:
    """The columns that rules of `search.forbid` are about; schedules as indices of `TABLE_SCHEDULES`."""
    return {
        "tensor_parallel": columns[:, TP],
        "pipeline_parallel": columns[:, PP],
        "data_parallel": columns[:, DP],
        "virtual_stages": columns[:, VIRTUAL],
        "micro_batch_size": columns[:, SIZE],
        "schedule": columns[:, SCHEDULE],
    }


def num_microbatches(job: PlanRequest, columns: IntArray) -> IntArray:
    """Microbatches an iteration of each row."""
    microbatches: IntArray = job.global_batch_size // (columns[:, DP] * columns[:, SIZE])
    return microbatches


def written_splits(job: PlanRequest) -> tuple[tuple[int, ...], ...]:
    """The splits that the job writes out, in its order."""
    return tuple(
        tuple(int(count) for count in text.split("+")) for text in job.search.split or () if text[0].isdigit()
    )


def fault_of_degrees(job: PlanRequest, shape: ModelShape, tp: int, cp: int, pp: int) -> str | None:
    """The constraint that refuses these degrees whatever else is chosen; None where they are legal.

    It is written `rule: the fault; nearest: the legal values`.
    """
    dp = job.machines.num_devices // (tp * cp * pp)
    legal = LegalDegrees(job, shape)
    joined = job.largest_tensor_parallel
    if joined % tp:
        fault = f"TP {tp} does not divide the {joined} devices that fast links join on a node"
        return f"scale-up domain: {fault}{nearest_words(tp, legal.tensor_parallel)}"
    undivided = fault_of_tensor_parallel(job, shape, tp, legal=legal.tensor_parallel)
    if undivided is not None:
        return undivided
    if job.precision == "fp8" and any(width % FP8_MULTIPLE for width in _widths(job, shape, tp)):
        return f"fp8 multiple: TP {tp} leaves FP8 products of sizes that are no multiples of {FP8_MULTIPLE}"
    # Megatron balances causal attention in two chunks a rank; sequence parallelism splits further.
    chunks = (2 * cp if cp > 1 else 1) * tp
    if shape.seq_length % tp:
        fault = f"TP {tp} does not divide sequences of {shape.seq_length}"
        return f"sequence: {fault}{nearest_words(tp, legal.tensor_parallel)}"
    if shape.seq_length % chunks:
        fault = (
            f"CP {cp} with TP {tp} does not cut sequences of {shape.seq_length} into {chunks} equal chunks"
        )
        return f"sequence: {fault}"
    if pp > shape.num_layers:
        fault = f"PP {pp} has more stages than {shape.num_layers} layers"
        return f"layers: {fault}{nearest_words(pp, legal.pipeline_parallel)}"
    if job.global_batch_size % dp:
        fault = f"DP {dp} does not divide a batch of {job.global_batch_size}"
        return f"batch: {fault}{nearest_words(dp, legal.data_parallel)}"
    return None


def fault_of_tensor_parallel(
    job: PlanRequest, shape: ModelShape, tp: int, *, legal: Sequence[int], shares_groups: bool = False
) -> str | None:
    """The first size of the model that `tp` does not divide, with the nearest of the `legal` values.

    With `shares_groups` several ranks may hold one query group, as Megatron lets them.
    """
    for name, size in _tensor_sizes(job, shape):
        if size % tp and not (shares_groups and name == "query groups" and tp % size == 0):
            rule = name.removeprefix("of ").removeprefix("the ")
            return f"{rule}: TP {tp} does not divide {size} {name}{nearest_words(tp, legal)}"
    return None


@dataclass(frozen=True, slots=True)
class LegalDegrees:
    """The sizes of each kind of parallelism that some layout of `shape` may have, each kind by itself."""

    job: PlanRequest
    shape: ModelShape

    @property
    def tensor_parallel(self) -> list[int]:
        """Divisors of all that tensor parallelism divides."""
        sizes = [size for _, size in _tensor_sizes(self.job, self.shape)]
        devices = (self.job.machines.num_devices, self.job.largest_tensor_parallel)
        return divisors(gcd(*devices, *sizes, self.shape.seq_length))

    @property
    def context_parallel(self) -> list[int]:
        """Divisors of the devices that cut the sequence in two chunks a rank."""
        seq_length = self.shape.seq_length
        return [cp for cp in divisors(self.job.machines.num_devices) if cp == 1 or seq_length % (2 * cp) == 0]

    @property
    def pipeline_parallel(self) -> list[int]:
        """Divisors of the devices, at most one for each layer."""
        return [pp for pp in divisors(self.job.machines.num_devices) if pp <= self.shape.num_layers]

    @property
    def data_parallel(self) -> list[int]:
        """Divisors of the devices and the batch."""
        return divisors(gcd(self.job.machines.num_devices, self.job.global_batch_size))

    def nearest_of_search(self) -> str:
        """The nearest legal values of the first request that has no legal one, in words; "" without one."""
        for name in ("tensor_parallel", "context_parallel", "pipeline_parallel", "data_parallel"):
            requested: tuple[int, ...] | None = getattr(self.job.search, name)
            legal: list[int] = getattr(self, name)
            if requested and not set(requested) & set(legal):
                return nearest_words(requested[0], legal)
        return ""


def degrees(job: PlanRequest) -> Iterator[tuple[int, int, int]]:
    """(tp, cp, pp) whose product divides the devices."""
    world = job.machines.num_devices
    for tp in divisors(world):
        for cp in divisors(world // tp):
            for pp in divisors(world // tp // cp):
                yield tp, cp, pp


def _rows(job: PlanRequest, shape: ModelShape) -> Iterator[tuple[_Row, list[_Variant]]]:
    """The legal rows of all degrees that the job allows."""
    for tp, cp, pp in degrees(job):
        if _is_asked(job, tp, cp, pp) and fault_of_degrees(job, shape, tp, cp, pp) is None:
            yield from _rows_of_degrees(job, shape, tp, cp, pp, job.machines.num_devices // (tp * cp * pp))


def _is_asked(job: PlanRequest, tp: int, cp: int, pp: int) -> bool:
    """Whether the search allows the degrees, and the data parallelism that they leave."""
    search = job.search
    return (
        is_requested(search.tensor_parallel, tp)
        and is_requested(search.context_parallel, cp)
        and is_requested(search.pipeline_parallel, pp)
        and is_requested(search.data_parallel, job.machines.num_devices // (tp * cp * pp))
    )


def _rows_of_degrees(
    job: PlanRequest, shape: ModelShape, tp: int, cp: int, pp: int, dp: int
) -> Iterator[tuple[_Row, list[_Variant]]]:
    share = job.global_batch_size // dp
    sizes = job.search.micro_batch_size or [n for n in divisors(share) if n <= MAX_MICRO_BATCH]
    experts = _expert_degrees(job, cp * dp)
    splits = {virtual: _splits(job, pp * virtual) for virtual in _virtual_stages(job, shape, pp)}
    variants = [(virtual, ep, kind) for virtual, kinds in splits.items() for ep in experts for kind in kinds]
    for size in sizes:
        if share % size == 0:
            yield (tp, cp, pp, dp, size), variants


def _tensor_sizes(job: PlanRequest, shape: ModelShape) -> list[tuple[str, int]]:
    """The sizes that tensor parallelism divides, by name."""
    sizes = [
        ("heads", shape.num_attention_heads),
        ("query groups", shape.num_query_groups),
        ("of the FFN", shape.ffn_hidden_size),
        ("of the vocabulary", shape.vocab_size),
    ]
    if job.experts is not None:
        sizes.append(("of an expert's FFN", job.experts.ffn_hidden_size))
        sizes.append(("of the shared expert's FFN", job.experts.shared_ffn_hidden_size))
    return sizes


def _widths(job: PlanRequest, shape: ModelShape, tp: int) -> list[int]:
    """Sizes of a rank's products."""
    sizes = [shape.hidden_size, shape.attention_size // tp, shape.ffn_hidden_size // tp]
    return sizes if job.experts is None else [*sizes, job.experts.ffn_hidden_size // tp]


def _expert_degrees(job: PlanRequest, copies: int) -> list[int]:
    """Expert-parallel sizes: divisors of the experts and of the ranks that hold equal dense weights."""
    if job.experts is None:
        return [1]
    return [
        ep
        for ep in divisors(copies)
        if job.experts.num_experts % ep == 0 and is_requested(job.search.expert_parallel, ep)
    ]


def _splits(job: PlanRequest, num_stages: int) -> list[int]:
    """The values of the column `SPLIT` that the job allows for `num_stages` stages."""
    requested = job.search.split
    if requested is None:
        return [BALANCED]
    kinds = [EVEN] if any(not text[0].isdigit() for text in requested) else []
    for index, counts in enumerate(written_splits(job)):
        if len(counts) == num_stages and min(counts[1:-1], default=1) > 0:
            kinds.append(WRITTEN + index)
    return kinds


def _virtual_stages(job: PlanRequest, shape: ModelShape, pp: int) -> list[int]:
    """Chunks a device that the job allows and the layers fill."""
    most = max(1, shape.num_layers // pp) if pp > 1 else 1
    return [v for v in job.search.virtual_stages or range(1, most + 1) if v <= most]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One constraint and how many it refused: combinations of TP, CP and PP, or layouts for memory."""

    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLarge:
    """Layouts of equal degrees that do not fit, and a lower bound of the bytes that the smallest needs."""

    tensor_parallel: int
    context_parallel: int
    pipeline_parallel: int
    count: int
    least_bytes: float

    @classmethod
    def by_degrees(cls, columns: IntArray, memory_bytes: FloatArray) -> "list[TooLarge]":
        """Rows of the table with their bounds, grouped by TP, CP and PP."""
        if not len(columns):
            return []
        keys, _, groups = unique_rows(columns[:, [TP, CP, PP]])
        counts = np.bincount(groups, minlength=len(keys))
        least = np.full(len(keys), np.inf)
        np.minimum.at(least, groups, memory_bytes)
        return [
            cls(
                tensor_parallel=tp,
                context_parallel=cp,
                pipeline_parallel=pp,
                count=int(count),
                least_bytes=float(need),
            )
            for (tp, cp, pp), count, need in zip(keys.tolist(), counts, least, strict=True)
        ]

    def refusal(self, available_bytes: float) -> Refusal:
        """The layouts' refusal for lack of memory."""
        context = f" CP {self.context_parallel}" if self.context_parallel > 1 else ""
        label = f"TP {self.tensor_parallel}{context} PP {self.pipeline_parallel}"
        least, available = distinct_numbers(self.least_bytes / GIB, available_bytes / GIB, digits=0)
        if self.least_bytes > available_bytes:
            need = f"at least {least} GiB of the {available} GiB that are usable"
        else:
            need = f"more than the {available_bytes / GIB:.0f} GiB that are usable"
        return Refusal(reason=f"memory: {label} needs {need}", count=self.count)


def refused_degrees(job: PlanRequest, shape: ModelShape) -> list[Refusal]:
    """Combinations of degrees that no layout can have, by the first constraint each breaks."""
    return _refused(job, shape, degrees(job))


def refused_requests(job: PlanRequest, shape: ModelShape) -> list[Refusal]:
    """The same of the combinations that the job asks for."""
    return _refused(job, shape, (combination for combination in degrees(job) if _is_asked(job, *combination)))


def _refused(
    job: PlanRequest, shape: ModelShape, combinations: Iterable[tuple[int, int, int]]
) -> list[Refusal]:
    faults = (fault_of_degrees(job, shape, tp, cp, pp) for tp, cp, pp in combinations)
    counted = Counter(fault for fault in faults if fault is not None)
    return [Refusal(reason=reason, count=count) for reason, count in counted.most_common()]
