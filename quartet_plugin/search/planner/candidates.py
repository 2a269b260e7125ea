"""Every legal layout of a job, as columns, and the one split that goes with each."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quartet_plugin.model.costs import IntArray
from quartet_plugin.model.layout import Layout, Recompute
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.search.planner.job import PlanJob

MAX_MICRO_BATCH = 64
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """One row a layout: tp, cp, pp, dp, micro-batch, virtual stages, recompute, sharded optimizer."""

    columns: IntArray

    def __len__(self) -> int:
        return len(self.columns)

    def layout(self, row: int) -> Layout:
        """The layout of one row; sequence parallelism goes with tensor parallelism."""
        tp, cp, pp, dp, size, virtual, recompute, sharded = (int(x) for x in self.columns[row])
        return layout_of(tp, cp, pp, dp, size, virtual, recompute, sharded)


def layout_of(
    tp: int, cp: int, pp: int, dp: int, size: int, virtual: int, recompute: int, sharded: int
) -> Layout:
    """A layout from the columns of `Candidates`."""
    return Layout(
        tensor_parallel=tp,
        pipeline_parallel=pp,
        data_parallel=dp,
        virtual_stages=virtual,
        context_parallel=cp,
        expert_parallel=1,
        micro_batch_size=size,
        sequence_parallel=tp > 1,
        distributed_optimizer=bool(sharded),
        recompute=RECOMPUTE[recompute],
    )


def legal_candidates(job: PlanJob, shape: ModelShape) -> Candidates:
    """All layouts of `shape` that Megatron accepts and the job allows, in a fixed order."""
    search = job.search
    modes = [at for at, mode in enumerate(RECOMPUTE) if asked(search.recompute, mode)]
    shards = [int(on) for on in (False, True) if asked(search.distributed_optimizer, on)]
    found = list(_layouts(job, shape))
    bases = np.array([base for base, _ in found], dtype=np.int64).reshape(-1, 5)
    counts = [len(virtual) for _, virtual in found]
    virtual = np.array([stages for _, several in found for stages in several], dtype=np.int64)
    rows = np.column_stack([np.repeat(bases, counts, axis=0), virtual])
    options = np.array([(mode, on) for mode in modes for on in shards], dtype=np.int64).reshape(-1, 2)
    columns = np.hstack([np.repeat(rows, len(options), axis=0), np.tile(options, (len(rows), 1))])
    # One replica has nothing to share its optimizer with, unless nothing else was asked for.
    alone = (columns[:, 1] * columns[:, 3] == 1) & (columns[:, 7] == 1)
    return Candidates(columns=columns[~alone] if 0 in shards else columns)


def asked[T](choices: Sequence[T] | None, value: T) -> bool:
    """Whether the job allows `value`; None is `auto`."""
    return choices is None or value in choices


@functools.lru_cache(maxsize=4096)
def balanced_split(
    num_layers: int, pipeline_parallel: int, virtual_stages: int, first: int, last: int
) -> tuple[int, ...]:
    """Layers of each stage when the embedding weighs `first` layers and the head `last`.

    As even as whole layers allow; what is left over goes to the stages before the last one, which hold
    fewer microbatches than the first ones.
    """
    stages = pipeline_parallel * virtual_stages
    if stages == 1:
        return (num_layers,)
    base, rest = divmod(num_layers + first + last, stages)
    counts = [base] * stages
    for stage in [*range(stages - 2, -1, -1), stages - 1][:rest]:
        counts[stage] += 1
    counts[0], counts[-1] = counts[0] - first, counts[-1] - last
    for end in (0, -1):
        while counts[end] < 0:
            # More weight at an end than a stage's share: the others carry fewer layers.
            counts[counts.index(max(counts))] -= 1
            counts[end] += 1
    while min(counts[1:-1], default=1) == 0 and max(counts) > 1:
        counts[counts.index(max(counts))] -= 1
        counts[1 + counts[1:-1].index(0)] += 1
    return tuple(counts)


def even_split(num_layers: int, stages: int) -> tuple[int, ...]:
    """Stage s gets floor((s+1) L / S) - floor(s L / S) layers."""
    return tuple((s + 1) * num_layers // stages - s * num_layers // stages for s in range(stages))


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _layouts(job: PlanJob, shape: ModelShape) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """(tp, cp, pp, dp, micro-batch) and the virtual stages that go with them."""
    search, world = job.search, job.machines.num_devices
    for tp in divisors(job.machines.devices_per_node):
        if not asked(search.tensor_parallel, tp) or not divides(shape, tp):
            continue
        for cp in divisors(world // tp):
            # Megatron balances causal attention in two chunks a rank; sequence parallelism splits further.
            chunks = (2 * cp if cp > 1 else 1) * tp
            if not asked(search.context_parallel, cp) or shape.seq_length % chunks:
                continue
            for pp in divisors(world // tp // cp):
                dp = world // tp // cp // pp
                if (
                    pp <= shape.num_layers
                    and asked(search.pipeline_parallel, pp)
                    and asked(search.data_parallel, dp)
                ):
                    yield from _rounds(job, shape, tp, cp, pp, dp)


def divides(shape: ModelShape, tp: int) -> bool:
    """Whether tensor parallelism of degree `tp` divides heads, groups, FFN and vocabulary."""
    sizes = (shape.num_attention_heads, shape.num_query_groups, shape.ffn_hidden_size, shape.vocab_size)
    return not any(size % tp for size in sizes)


def _rounds(
    job: PlanJob, shape: ModelShape, tp: int, cp: int, pp: int, dp: int
) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    if job.global_batch_size % dp:
        return
    share = job.global_batch_size // dp
    stages = _virtual_stages(job, shape, pp)
    sizes = job.search.micro_batch_size or [n for n in divisors(share) if n <= MAX_MICRO_BATCH]
    for size in sizes:
        if share % size == 0:
            # Interleaving takes whole rounds of microbatches.
            whole = (share // size) % pp == 0
            yield (tp, cp, pp, dp, size), stages if whole else [v for v in stages if v == 1]


def _virtual_stages(job: PlanJob, shape: ModelShape, pp: int) -> list[int]:
    """Chunks a device that the job allows and the layers fill."""
    asked_for = None if "stock" in (job.search.schedule or ()) else job.search.schedule
    most = max(1, shape.num_layers // pp) if pp > 1 else 1
    return [
        virtual
        for virtual in job.search.virtual_stages or range(1, most + 1)
        if virtual <= most
        and asked(asked_for, "no-pipelining" if pp == 1 else ("1f1b" if virtual == 1 else "interleaved"))
    ]
