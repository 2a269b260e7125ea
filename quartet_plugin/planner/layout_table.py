"""Every legal layout of a job as rows of an integer table, and which combinations of degrees are refused."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from quartet_plugin.cost.memory import distinct_numbers
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.layout import Layout, Recompute
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.space.forbidden import forbidden_rows
from quartet_plugin.space.layouts import divisors, is_requested

# The columns of the table.
TP, CP, PP, DP, SIZE, VIRTUAL, EP, SPLIT, MODE, SHARDED = range(10)
MAX_MICRO_BATCH = 64
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
# Values of the column `SPLIT`; larger numbers are the job's written splits in order.
BALANCED, EVEN, WRITTEN = 0, 1, 2
# Sizes of FP8 products are multiples of it.
FP8_MULTIPLE = 16
GB = 1e9

# (TP, CP, PP, DP, micro-batch) and the (virtual stages, EP, split) that go with it.
type _Row = tuple[int, int, int, int, int]
type _Variant = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTable:
    """One row a layout; the columns are `TP` to `SHARDED`."""

    columns: IntArray

    def __len__(self) -> int:
        return len(self.columns)

    def layout(self, row: int) -> Layout:
        """The layout of one row; sequence parallelism goes with tensor parallelism."""
        tp, cp, pp, dp, size, virtual, ep, _, mode, sharded = (int(x) for x in self.columns[row])
        return layout_of(tp, cp, pp, dp, size, virtual, mode, sharded, ep=ep)


def layout_of(
    tp: int, cp: int, pp: int, dp: int, size: int, virtual: int, recompute: int, sharded: int, *, ep: int = 1
) -> Layout:
    """A layout from the columns of `LayoutTable`."""
    return Layout(
        tensor_parallel=tp,
        pipeline_parallel=pp,
        data_parallel=dp,
        virtual_stages=virtual,
        context_parallel=cp,
        expert_parallel=ep,
        micro_batch_size=size,
        sequence_parallel=tp > 1,
        distributed_optimizer=bool(sharded),
        recompute=RECOMPUTE[recompute],
    )


def layout_table_of(job: PlanRequest, shape: ModelShape) -> LayoutTable:
    """All layouts of `shape` that Megatron accepts and the job allows, in a fixed order."""
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
    return LayoutTable(columns=columns[~forbidden_rows(search.forbid, _axes(columns), num_rows=len(columns))])


def _axes(columns: IntArray) -> dict[str, IntArray]:
    """The columns that rules of `search.forbid` are about; schedules as indices of `STOCK_NAMES`."""
    return {
        "tensor_parallel": columns[:, TP],
        "pipeline_parallel": columns[:, PP],
        "data_parallel": columns[:, DP],
        "virtual_stages": columns[:, VIRTUAL],
        "micro_batch_size": columns[:, SIZE],
        "schedule": np.where(columns[:, PP] == 1, 0, np.where(columns[:, VIRTUAL] == 1, 1, 2)),
    }


def unique_rows(columns: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The different rows, the index where each first occurs, and the different row of every row.

    Rows are packed into one number each, which must fit in 62 bits.
    """
    spans = columns.max(axis=0, initial=0) + 1
    assert prod(int(span) for span in spans) < 2**62
    packed = np.zeros(len(columns), dtype=np.int64)
    for column, span in zip(columns.T, spans, strict=True):
        packed = packed * span + column
    _, index, inverse = np.unique(packed, return_index=True, return_inverse=True)
    return columns[index], index, inverse.ravel()


def written_splits(job: PlanRequest) -> tuple[tuple[int, ...], ...]:
    """The splits that the job writes out, in its order."""
    return tuple(
        tuple(int(count) for count in text.split("+")) for text in job.search.split or () if text[0].isdigit()
    )


def fault_of_degrees(job: PlanRequest, shape: ModelShape, tp: int, cp: int, pp: int) -> str | None:
    """The constraint that refuses these degrees whatever else is chosen; None where they are legal."""
    dp = job.machines.num_devices // (tp * cp * pp)
    joined = job.largest_tensor_parallel
    if joined % tp:
        return f"TP {tp} does not divide the {joined} devices that fast links join on a node"
    for name, size in _tensor_sizes(job, shape):
        if size % tp:
            return f"TP {tp} does not divide {size} {name}"
    if job.precision == "fp8" and any(width % FP8_MULTIPLE for width in _widths(job, shape, tp)):
        return f"TP {tp} leaves FP8 products of sizes that are no multiples of {FP8_MULTIPLE}"
    # Megatron balances causal attention in two chunks a rank; sequence parallelism splits further.
    chunks = (2 * cp if cp > 1 else 1) * tp
    if shape.seq_length % tp:
        return f"TP {tp} does not divide sequences of {shape.seq_length}"
    if shape.seq_length % chunks:
        return f"CP {cp} with TP {tp} does not cut sequences of {shape.seq_length} into {chunks} equal chunks"
    if pp > shape.num_layers:
        return f"PP {pp} has more stages than {shape.num_layers} layers"
    if job.global_batch_size % dp:
        return f"DP {dp} does not divide a batch of {job.global_batch_size}"
    return None


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
    plain = [variant for variant in variants if variant[0] == 1]
    for size in sizes:
        if share % size == 0:
            # Interleaving takes whole rounds of microbatches.
            yield (tp, cp, pp, dp, size), variants if (share // size) % pp == 0 else plain


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
    requested = None if "stock" in (job.search.schedule or ()) else job.search.schedule
    most = max(1, shape.num_layers // pp) if pp > 1 else 1
    return [
        virtual
        for virtual in job.search.virtual_stages or range(1, most + 1)
        if virtual <= most
        and is_requested(
            requested, "no-pipelining" if pp == 1 else ("1f1b" if virtual == 1 else "interleaved")
        )
    ]


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
        least, available = distinct_numbers(self.least_bytes / GB, available_bytes / GB, digits=0)
        if self.least_bytes > available_bytes:
            need = f"at least {least} GB of the {available} GB that are usable"
        else:
            need = f"more than the {available_bytes / GB:.0f} GB that are usable"
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
