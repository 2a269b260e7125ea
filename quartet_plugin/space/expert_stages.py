"""The rule of a hybrid model whose experts' losses are logged: every pipeline rank has a layer with experts.

Megatron sums a list of the losses over the pipeline ranks (megatron/core/transformer/moe/moe_logging.py). It
has a place for each layer where a router has recorded a loss (megatron/core/transformer/moe/router.py), but
one for each layer with experts on a rank without such a router (megatron/training/training.py): sums of
unequal lengths fail, or never end.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, product

from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan
from quartet_plugin.schedule.placement import Placement, loop, snake, stages_of_device
from quartet_plugin.space.knobs.divisors import divisors

# Layers with experts, from 0 and ascending; those of multi-token prediction are one behind the last layer.
type ExpertLayers = tuple[int, ...]
# Sets of stages up to which all are tried.
MAX_SETS = 64


def fault_of_split(split: Sequence[int], *, placement: Placement, expert_layers: ExpertLayers) -> str | None:
    """The rule that a split breaks on these devices; None where all have an expert layer, or need none."""
    if not expert_layers:
        return None
    with_experts = {placement[stage] for stage in _stages_with_experts(split, expert_layers)}
    bare = next((rank for rank in range(max(placement) + 1) if rank not in with_experts), None)
    if bare is None:
        return None
    return (
        f"leaves pipeline rank {bare} without a layer with experts (E), which every rank needs where their "
        "losses are logged (megatron/training/training.py)"
    )


def fault_of_plan(plan: Plan, expert_layers: ExpertLayers) -> str | None:
    """The rule that the split of a plan breaks on its devices, with the split; None where it breaks none."""
    split, placement = plan.split, plan.schedule.placement or stock_placement(plan.layout)
    fault = fault_of_split(
        split.transformer_layers_per_stage, placement=placement, expert_layers=expert_layers
    )
    return None if fault is None else f"split: {split.label} {fault}"


def stock_placement(layout: Layout) -> Placement:
    """The device of each stage as the framework places them."""
    return loop(layout.pipeline_parallel, layout.virtual_stages)


def fault_of_counts(counts: Sequence[int], expert_layers: ExpertLayers, *, num_ranks: int) -> str | None:
    """The rule that a split breaks whether its stages lie in a loop or a snake; None where it breaks none."""
    num_chunks = len(counts) // num_ranks
    faults = [
        fault_of_split(counts, placement=place(num_ranks, num_chunks), expert_layers=expert_layers)
        for place in (loop, snake)
    ]
    return None if None in faults else faults[0]


def fault_on_any_ranks(counts: Sequence[int], expert_layers: ExpertLayers) -> str | None:
    """The rule that a split breaks on every number of pipeline ranks; None where it breaks none on some."""
    faults = [fault_of_counts(counts, expert_layers, num_ranks=ranks) for ranks in divisors(len(counts))[1:]]
    return None if None in faults else next(iter(faults), None)


@lru_cache(maxsize=8192)
def split_with_experts(
    split: tuple[int, ...], *, placement: Placement, expert_layers: ExpertLayers
) -> tuple[int, ...]:
    """A split near to this one under which every device has an expert layer; the split itself without one."""
    if fault_of_split(split, placement=placement, expert_layers=expert_layers) is None:
        return split
    made = (
        _filled(split, stages, expert_layers) for stages in _stages_to_fill(split, placement, expert_layers)
    )
    return min(
        (counts for counts in made if counts is not None),
        key=lambda counts: sum(abs(count - before) for count, before in zip(counts, split, strict=True)),
        default=split,
    )


def _stages_with_experts(split: Sequence[int], expert_layers: ExpertLayers) -> list[int]:
    starts = [*accumulate(split, initial=0)][:-1]
    ends = [*starts[1:], sum(split) + 1]  # behind the last layer are those of multi-token prediction
    return [
        stage
        for stage, (start, end) in enumerate(zip(starts, ends, strict=True))
        if any(start <= layer < end for layer in expert_layers)
    ]


def _stages_to_fill(
    split: Sequence[int], placement: Placement, expert_layers: ExpertLayers
) -> Iterator[Collection[int]]:
    """Sets of stages, one of each device: those that have an expert layer already, then of equal chunks.

    Of few devices, every such set.
    """
    stages = stages_of_device(placement, max(placement) + 1)
    present = {placement[stage]: stage for stage in reversed(_stages_with_experts(split, expert_layers))}
    num_chunks = len(stages[0])
    for chunk in range(num_chunks):
        yield {present.get(rank, held[chunk]) for rank, held in enumerate(stages)}
        yield {held[chunk] for held in stages}
    if num_chunks ** len(stages) <= MAX_SETS:
        yield from map(set, product(*stages))


def _filled(
    split: Sequence[int], stages: Collection[int], expert_layers: ExpertLayers
) -> tuple[int, ...] | None:
    """The split with the least shifted ends by which these stages have an expert layer; None without one.

    Every stage has a layer.
    """
    num_stages, num_layers = len(split), sum(split)
    # The last layer at which a stage may begin, so that it and the later ones can be filled.
    latest = [0] * num_stages + [num_layers]
    for stage in reversed(range(num_stages)):
        latest[stage] = latest[stage + 1] - 1
        if stage in stages:
            behind = num_layers + 1 if stage == num_stages - 1 else latest[stage + 1]
            last = max((layer for layer in expert_layers if layer < behind), default=-1)
            latest[stage] = min(latest[stage], last)
    if latest[0] < 0:
        return None
    ends = [0]
    for stage, wanted in enumerate(list(accumulate(split))[:-1]):
        earliest = ends[-1] + 1
        if stage in stages:
            earliest = 1 + min(layer for layer in expert_layers if layer >= ends[-1])
        ends.append(min(max(wanted, earliest), latest[stage + 1]))
    return tuple(end - start for start, end in pairwise((*ends, num_layers)))
