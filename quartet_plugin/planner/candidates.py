"""Every legal layout of a job, as columns, and the one split that goes with each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quartet_plugin.model.costs import IntArray
from quartet_plugin.model.layout import Layout, Recompute
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.columns import CP, DP, SHARDED, is_forbidden
from quartet_plugin.planner.job import PlanRequest

MAX_MICRO_BATCH = 64
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
# What the column `SPLIT` says; larger numbers are the job's own splits in order.
BALANCED, EVEN, GIVEN = 0, 1, 2
# Sizes of FP8 products are multiples of it.
FP8_MULTIPLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCandidates:
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
    """A layout from the columns of `LayoutCandidates`."""
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


def legal_candidates(job: PlanRequest, shape: ModelShape) -> LayoutCandidates:
    """All layouts of `shape` that Megatron accepts and the job allows, in a fixed order."""
    search = job.search
    modes = [at for at, mode in enumerate(RECOMPUTE) if asked(search.recompute, mode)]
    shards = [int(on) for on in (False, True) if asked(search.distributed_optimizer, on)]
    found = list(_layouts(job, shape))
    bases = np.array([base for base, _ in found], dtype=np.int64).reshape(-1, 5)
    counts = [len(rest) for _, rest in found]
    rest = np.array([one for _, several in found for one in several], dtype=np.int64).reshape(-1, 3)
    rows = np.column_stack([np.repeat(bases, counts, axis=0), rest])
    options = np.array([(mode, on) for mode in modes for on in shards], dtype=np.int64).reshape(-1, 2)
    columns = np.hstack([np.repeat(rows, len(options), axis=0), np.tile(options, (len(rows), 1))])
    # One replica has nothing to share its optimizer with, unless nothing else was asked for.
    alone = (columns[:, CP] * columns[:, DP] == 1) & (columns[:, SHARDED] == 1)
    columns = columns[~alone] if 0 in shards else columns
    return LayoutCandidates(columns=columns[~is_forbidden(columns, search.forbid)])


def asked[T](choices: Sequence[T] | None, value: T) -> bool:
    """Whether the job allows `value`; None is `auto`."""
    return choices is None or value in choices


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def given_splits(job: PlanRequest) -> tuple[tuple[int, ...], ...]:
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


def _layouts(
    job: PlanRequest, shape: ModelShape
) -> Iterator[tuple[tuple[int, ...], list[tuple[int, int, int]]]]:
    """(tp, cp, pp, dp, micro-batch), and the (virtual stages, expert parallel, split) that go with them."""
    search = job.search
    for tp, cp, pp in degrees(job):
        dp = job.machines.num_devices // (tp * cp * pp)
        wanted = (
            asked(search.tensor_parallel, tp)
            and asked(search.context_parallel, cp)
            and asked(search.pipeline_parallel, pp)
            and asked(search.data_parallel, dp)
        )
        if wanted and fault_of_degrees(job, shape, tp, cp, pp) is None:
            yield from _rounds(job, shape, tp, cp, pp, dp)


def degrees(job: PlanRequest) -> Iterator[tuple[int, int, int]]:
    """(tp, cp, pp) whose product divides the devices."""
    world = job.machines.num_devices
    for tp in divisors(world):
        for cp in divisors(world // tp):
            for pp in divisors(world // tp // cp):
                yield tp, cp, pp


def _tensor_sizes(job: PlanRequest, shape: ModelShape) -> list[tuple[str, int]]:
    """What tensor parallelism cuts, by its name."""
    found = [
        ("heads", shape.num_attention_heads),
        ("query groups", shape.num_query_groups),
        ("of the FFN", shape.ffn_hidden_size),
        ("of the vocabulary", shape.vocab_size),
    ]
    if job.experts is not None:
        found.append(("of an expert's FFN", job.experts.ffn_hidden_size))
        found.append(("of the shared expert's FFN", job.experts.shared_ffn_hidden_size))
    return found


def _widths(job: PlanRequest, shape: ModelShape, tp: int) -> list[int]:
    """Sizes of a rank's products."""
    sizes = [shape.hidden_size, shape.attention_size // tp, shape.ffn_hidden_size // tp]
    return sizes if job.experts is None else [*sizes, job.experts.ffn_hidden_size // tp]


def _rounds(
    job: PlanRequest, shape: ModelShape, tp: int, cp: int, pp: int, dp: int
) -> Iterator[tuple[tuple[int, ...], list[tuple[int, int, int]]]]:
    share = job.global_batch_size // dp
    sizes = job.search.micro_batch_size or [n for n in divisors(share) if n <= MAX_MICRO_BATCH]
    experts = _expert_degrees(job, cp * dp)
    splits = {virtual: _splits(job, pp * virtual) for virtual in _virtual_stages(job, shape, pp)}
    every = [(virtual, ep, at) for virtual, found in splits.items() for ep in experts for at in found]
    plain = [one for one in every if one[0] == 1]
    for size in sizes:
        if share % size == 0:
            # Interleaving takes whole rounds of microbatches.
            yield (tp, cp, pp, dp, size), every if (share // size) % pp == 0 else plain


def _expert_degrees(job: PlanRequest, copies: int) -> list[int]:
    """Expert-parallel sizes: of the experts, and of the ranks that hold equal dense weights."""
    if job.experts is None:
        return [1]
    return [
        ep
        for ep in divisors(copies)
        if job.experts.num_experts % ep == 0 and asked(job.search.expert_parallel, ep)
    ]


def _splits(job: PlanRequest, num_stages: int) -> list[int]:
    """The splits of so many stages that the job allows, as the column `SPLIT` has them."""
    asked_for = job.search.split
    if asked_for is None:
        return [BALANCED]
    found = [EVEN] if any(not text[0].isdigit() for text in asked_for) else []
    for at, counts in enumerate(given_splits(job)):
        if len(counts) == num_stages and min(counts[1:-1], default=1) > 0:
            found.append(GIVEN + at)
    return found


def _virtual_stages(job: PlanRequest, shape: ModelShape, pp: int) -> list[int]:
    """Chunks a device that the job allows and the layers fill."""
    asked_for = None if "stock" in (job.search.schedule or ()) else job.search.schedule
    most = max(1, shape.num_layers // pp) if pp > 1 else 1
    return [
        virtual
        for virtual in job.search.virtual_stages or range(1, most + 1)
        if virtual <= most
        and asked(asked_for, "no-pipelining" if pp == 1 else ("1f1b" if virtual == 1 else "interleaved"))
    ]
