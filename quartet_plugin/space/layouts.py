"""The parallel layouts a job can have: TP x PP x DP, virtual stages and micro-batch, legal for Megatron."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quartet_plugin.model.frameworks import capabilities
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import NodeInfo, ScheduleName
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.space.config import CUSTOM_NAMES, SearchConfig
from quartet_plugin.space.features import Axis, batching_features
from quartet_plugin.space.forbidden import Prohibitions
from quartet_plugin.space.schedules import custom_schedules_of

MAX_VIRTUAL_STAGES = 4
MAX_MICRO_BATCH_FACTOR = 8
MAX_GROUPS = 8
# ZeRO's, in elements. DeepSpeed's own are 5e8.
BUCKET_SIZES = (5_000_000, 50_000_000, 500_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRules:
    """What the job, the machine and the user's wishes allow.

    `no_custom_schedules` is why schedules of ours are left out, None where they are not.
    """

    job: TrainingJob
    nodes: tuple[NodeInfo, ...]
    search: SearchConfig
    locked: frozenset[Axis]
    no_custom_schedules: str | None = None

    @property
    def slots_per_node(self) -> int:
        """What a TP group must divide: the greatest common divisor over the nodes."""
        return math.gcd(*(node.num_slots for node in self.nodes))

    @property
    def prohibitions(self) -> Prohibitions:
        """What the user forbids."""
        return Prohibitions(rules=self.search.forbid, job=self.job, nodes=self.nodes)

    def can_change_objective(self, layout: Layout) -> bool:
        """Whether the layout deals the samples out otherwise, in a job that notices: class C."""
        return layout.batching != self.job.layout.batching and bool(batching_features(self.job.features))


def legal_layouts(shape: ModelShape, *, rules: LayoutRules) -> tuple[Layout, ...]:
    """Every layout for `shape`, in a fixed order; the user's own is among them unless it was ruled out.

    Context and expert parallelism and recompute stay as the user has them. The optimizer's form does too,
    except under DeepSpeed, where ZeRO 0 and 1 are both tried.
    """
    found = [
        layout
        for degrees in _degrees(rules)
        for virtual in _virtual_stages(degrees, shape=shape, rules=rules)
        for sharded in _optimizers(virtual, rules=rules)
        for layout in _micro_batches(sharded, rules=rules)
        if _fits(layout, shape=shape, rules=rules)
    ]
    return tuple(dict.fromkeys(found))


def legal_groups(layout: Layout, *, num_microbatches: int) -> tuple[int, ...]:
    """Microbatches a chunk before the next one, that Megatron's interleaved schedule accepts.

    From the pipeline's degree (stock) to all microbatches; what is left over must be none or fill the
    pipeline. At most eight are offered: the degree's doublings and all.
    """
    least = layout.pipeline_parallel
    doublings = [least * 2**power for power in range(MAX_GROUPS)]
    candidates = [group for group in doublings if group < num_microbatches] + [num_microbatches]
    return tuple(
        group for group in candidates if is_legal_group(group, layout, num_microbatches=num_microbatches)
    )


def is_legal_group(group: int, layout: Layout, *, num_microbatches: int) -> bool:
    """Whether Megatron's interleaved schedule accepts the group."""
    rest = num_microbatches % group
    return layout.pipeline_parallel <= group <= num_microbatches and (
        rest == 0 or rest >= layout.pipeline_parallel
    )


def _degrees(rules: LayoutRules) -> list[Layout]:
    """TP x PP x DP that fill the processes; TP groups divide the nodes."""
    own, search = rules.job.layout, rules.search
    if Axis.DEGREES in rules.locked:
        return [own]
    processes = own.world_size // own.context_parallel
    found = []
    for tensor in _divisors(processes):
        if tensor != own.tensor_parallel and (
            rules.slots_per_node % tensor or not capabilities(rules.job.framework).changes_tensor_parallel
        ):
            continue
        for pipeline in _divisors(processes // tensor):
            data = processes // tensor // pipeline
            wanted = (
                _is_asked(search.tensor_parallel, tensor)
                and _is_asked(search.pipeline_parallel, pipeline)
                and _is_asked(search.data_parallel, data)
            )
            if wanted and _holds_experts(own, tensor=tensor, data=data, rules=rules):
                found.append(
                    replace(
                        own,
                        tensor_parallel=tensor,
                        pipeline_parallel=pipeline,
                        data_parallel=data,
                        virtual_stages=1,
                        # Stays where the user has it; without tensor parallelism there is nothing to split.
                        sequence_parallel=own.sequence_parallel and tensor > 1,
                    )
                )
    return found


def _holds_experts(own: Layout, *, tensor: int, data: int, rules: LayoutRules) -> bool:
    """Whether the user's expert-parallel groups fit: into the ranks of equal dense weights, TP as it is."""
    if "moe" not in rules.job.features:
        return True
    return tensor == own.tensor_parallel and own.context_parallel * data % own.expert_parallel == 0


def _virtual_stages(layout: Layout, *, shape: ModelShape, rules: LayoutRules) -> list[Layout]:
    own, asked = rules.job.layout, rules.search.virtual_stages
    if Axis.SCHEDULE in rules.locked:
        same_degree = layout.pipeline_parallel == own.pipeline_parallel
        return [replace(layout, virtual_stages=own.virtual_stages if same_degree else 1)]
    if layout.pipeline_parallel == 1:
        return [layout] if _is_asked(asked, 1) else []
    choices = asked or tuple(sorted({1, 2, MAX_VIRTUAL_STAGES, own.virtual_stages}))
    return [
        replace(layout, virtual_stages=choice)
        for choice in choices
        if choice * layout.pipeline_parallel <= shape.num_layers + 2
        and (asked or choice * layout.pipeline_parallel <= shape.num_layers)
    ]


def _optimizers(layout: Layout, *, rules: LayoutRules) -> list[Layout]:
    """The optimizer whole or sharded, the user's own first: ZeRO 0 and 1.

    In fp32 with clipping DeepSpeed clips otherwise with ZeRO 0 on several stages, so the user's own stays.
    """
    job = rules.job
    can_change = capabilities(job.framework).changes_zero_stage
    is_free = can_change and layout.data_parallel > 1 and Axis.DEGREES not in rules.locked
    if not is_free or {"clips_in_fp32", "clips_by_first_stage"} & set(job.features):
        return [layout]
    return [layout, replace(layout, distributed_optimizer=not layout.distributed_optimizer)]


def bucket_sizes(
    layout: Layout, *, shape: ModelShape, rules: LayoutRules
) -> dict[str, tuple[int | None, ...]]:
    """The sizes to choose from for each of ZeRO's buckets, by its name; None is the ds_config's own.

    Unasked, only sizes that do not hold a device's whole share of the model: all larger ones do the same.
    """
    is_kept = rules.search.change_class == "A" or set(rules.locked) == set(Axis)
    has_buckets = layout.distributed_optimizer and layout.data_parallel > 1
    if not capabilities(rules.job.framework).has_zero_buckets or is_kept or not has_buckets:
        return {}
    share = shape.num_parameters // layout.pipeline_parallel
    unasked: tuple[int | None, ...] = (None, *(size for size in BUCKET_SIZES if size < share))
    return {
        "reduce_bucket_size": rules.search.reduce_bucket_size or unasked,
        "allgather_bucket_size": rules.search.allgather_bucket_size or unasked,
    }


def _micro_batches(layout: Layout, *, rules: LayoutRules) -> list[Layout]:
    own, batch = rules.job.layout, rules.job.global_batch_size
    asked = rules.search.micro_batch_size
    if Axis.MICRO_BATCH in rules.locked:
        choices: Sequence[int] = (own.micro_batch_size,)
    elif asked:
        choices = asked
    else:
        most = own.micro_batch_size * MAX_MICRO_BATCH_FACTOR
        powers = [2**power for power in range(most.bit_length()) if 2**power <= most]
        choices = sorted({*powers, own.micro_batch_size})
    return [
        replace(layout, micro_batch_size=choice)
        for choice in choices
        if batch % (choice * layout.data_parallel) == 0
    ]


def _fits(layout: Layout, *, shape: ModelShape, rules: LayoutRules) -> bool:
    """Megatron's own divisibility rules, and the group where the schedule is interleaved."""
    tensor = layout.tensor_parallel
    divided = (
        shape.num_attention_heads,
        shape.num_query_groups,
        shape.ffn_hidden_size,
        shape.vocab_size,
        *((shape.seq_length,) if layout.sequence_parallel else ()),
    )
    if any(size % tensor for size in divided) or rules.prohibitions.of_layout(layout) is not None:
        return False
    return layout.num_stages <= shape.num_layers + 2 and bool(schedules_of(layout, rules=rules))


def schedules_of(layout: Layout, *, rules: LayoutRules) -> tuple[str, ...]:
    """The names of the schedules to choose from for a layout, stock's first; none where it cannot be run.

    The parity gate compares with the command as it is, so what may change the objective has none of ours.
    """
    stock = stock_schedule(layout)
    is_kept = Axis.SCHEDULE in rules.locked
    names: list[str] = []
    if (is_kept or _is_stock_asked(stock, rules)) and (
        layout.virtual_stages == 1 or asked_groups(layout, rules=rules)
    ):
        names.append(stock)
    # Whoever asks for a group asks for the interleaved schedule.
    is_grouped = layout.virtual_stages > 1 and rules.search.group and not rules.search.schedule
    is_ours = not is_kept and not is_grouped and rules.no_custom_schedules is None
    if is_ours and not rules.can_change_objective(layout):
        features = rules.job.features
        names += custom_schedules_of(
            layout,
            num_microbatches=layout.num_microbatches(rules.job.global_batch_size),
            asked=rules.search.schedule,
            splits_backward=layout.recompute != "full" and "moe" not in features,
        )
    prohibitions = rules.prohibitions
    return tuple(name for name in names if prohibitions.of_schedule(layout, name) is None)


def stock_schedule(layout: Layout) -> ScheduleName:
    """The framework's own schedule for a layout."""
    if layout.pipeline_parallel == 1:
        return "no-pipelining"
    return "1f1b" if layout.virtual_stages == 1 else "interleaved"


def asked_groups(layout: Layout, *, rules: LayoutRules) -> tuple[int, ...]:
    """The groups to choose from for an interleaved layout; none where the layout cannot be run as asked."""
    num_microbatches = layout.num_microbatches(rules.job.global_batch_size)
    if rules.search.group:
        return tuple(
            group
            for group in rules.search.group
            if is_legal_group(group, layout, num_microbatches=num_microbatches)
        )
    found = legal_groups(layout, num_microbatches=num_microbatches)
    return found[:1] if Axis.SCHEDULE in rules.locked else found


def _is_stock_asked(name: str, rules: LayoutRules) -> bool:
    """Where ours cannot be had and nothing else was asked for, the framework's own are what is left."""
    asked = rules.search.schedule
    if not asked or name in asked or ("stock" in asked and name == rules.job.schedule.name):
        return True
    return rules.no_custom_schedules is not None and set(asked) <= set(CUSTOM_NAMES)


def _is_asked(asked: Sequence[int] | None, value: int) -> bool:
    return not asked or value in asked


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
