"""The parallel layouts a job can have: TP x PP x DP, virtual stages and micro-batch, legal for Megatron."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quartet_plugin.model.frameworks import capabilities
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import NodeInfo, ScheduleChoice, stock_schedule
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.space.config import CUSTOM_NAMES, SearchConfig
from quartet_plugin.space.features import Axis, batching_features
from quartet_plugin.space.forbidden import Prohibitions
from quartet_plugin.space.schedules import custom_schedules_of

MAX_VIRTUAL_STAGES = 4
MAX_MICRO_BATCH_FACTOR = 8
MAX_GROUPS = 8
# ZeRO's bucket sizes to try, in elements; DeepSpeed's default is 5e8.
BUCKET_SIZES = (5_000_000, 50_000_000, 500_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRules:
    """The job, the nodes and the search section that layouts must satisfy.

    `no_custom_schedules` is the feature that rules custom schedules out, None where they are allowed.
    """

    job: TrainingJob
    nodes: tuple[NodeInfo, ...]
    search: SearchConfig
    locked: frozenset[Axis]
    no_custom_schedules: str | None = None

    @property
    def slots_per_node(self) -> int:
        """The number that a TP group must divide: the greatest common divisor of the nodes' slots."""
        return math.gcd(*(node.num_slots for node in self.nodes))

    @property
    def prohibitions(self) -> Prohibitions:
        """The rules of `search.forbid`."""
        return Prohibitions(rules=self.search.forbid, job=self.job, nodes=self.nodes)

    def can_change_objective(self, layout: Layout) -> bool:
        """Whether the layout batches samples otherwise, in a job whose loss depends on it: class C."""
        return layout.batching != self.job.layout.batching and bool(batching_features(self.job.features))


def legal_layouts(shape: ModelShape, *, rules: LayoutRules) -> tuple[Layout, ...]:
    """Every layout for `shape`, in a fixed order; the baseline's is among them unless it was ruled out.

    Context and expert parallelism and recompute stay as in the baseline. So does the sharding of the
    optimizer, except under DeepSpeed, where ZeRO 0 and 1 are both tried.
    """
    layouts = [
        layout
        for degrees in _degrees(rules)
        for virtual in _virtual_stages(degrees, shape=shape, rules=rules)
        for sharded in _optimizers(virtual, rules=rules)
        for layout in _micro_batches(sharded, rules=rules)
        if _fits(layout, shape=shape, rules=rules)
    ]
    return tuple(dict.fromkeys(layouts))


def legal_groups(layout: Layout, *, num_microbatches: int) -> tuple[int, ...]:
    """Group sizes (microbatches a chunk before the next one) that Megatron's interleaved schedule accepts.

    At most eight are offered, from the pipeline's degree (stock) by doublings to all microbatches; leftover
    microbatches must be none or fill the pipeline.
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
    baseline, search = rules.job.layout, rules.search
    if Axis.DEGREES in rules.locked:
        return [baseline]
    processes = baseline.world_size // baseline.context_parallel
    layouts = []
    for tensor in divisors(processes):
        if tensor != baseline.tensor_parallel and (
            rules.slots_per_node % tensor or not capabilities(rules.job.framework).changes_tensor_parallel
        ):
            continue
        for pipeline in divisors(processes // tensor):
            data = processes // tensor // pipeline
            allowed = (
                is_requested(search.tensor_parallel, tensor)
                and is_requested(search.pipeline_parallel, pipeline)
                and is_requested(search.data_parallel, data)
            )
            if allowed and _holds_experts(baseline, tensor=tensor, data=data, rules=rules):
                layouts.append(
                    replace(
                        baseline,
                        tensor_parallel=tensor,
                        pipeline_parallel=pipeline,
                        data_parallel=data,
                        virtual_stages=1,
                        # Stays as in the baseline; without tensor parallelism there is nothing to split.
                        sequence_parallel=baseline.sequence_parallel and tensor > 1,
                    )
                )
    return layouts


def _holds_experts(baseline: Layout, *, tensor: int, data: int, rules: LayoutRules) -> bool:
    """Whether the expert-parallel groups fit into the ranks of equal dense weights, at the baseline's TP."""
    if "moe" not in rules.job.features:
        return True
    return (
        tensor == baseline.tensor_parallel
        and baseline.context_parallel * data % baseline.expert_parallel == 0
    )


def _virtual_stages(layout: Layout, *, shape: ModelShape, rules: LayoutRules) -> list[Layout]:
    baseline, requested = rules.job.layout, rules.search.virtual_stages
    if Axis.SCHEDULE in rules.locked:
        same_degree = layout.pipeline_parallel == baseline.pipeline_parallel
        return [replace(layout, virtual_stages=baseline.virtual_stages if same_degree else 1)]
    if layout.pipeline_parallel == 1:
        return [layout] if is_requested(requested, 1) else []
    choices = requested or tuple(sorted({1, 2, MAX_VIRTUAL_STAGES, baseline.virtual_stages}))
    return [
        replace(layout, virtual_stages=choice)
        for choice in choices
        if choice * layout.pipeline_parallel <= shape.num_layers + 2
        and (requested or choice * layout.pipeline_parallel <= shape.num_layers)
    ]


def _optimizers(layout: Layout, *, rules: LayoutRules) -> list[Layout]:
    """The optimizer replicated or sharded, as in the baseline first: ZeRO 0 and 1.

    In fp32 with clipping DeepSpeed clips otherwise with ZeRO 0 on several stages, so the baseline's stays.
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
    """The sizes to choose from for each of ZeRO's buckets, by name; None keeps the size of the ds_config.

    By default only sizes below a device's share of the model are offered: all larger ones do the same.
    """
    is_kept = rules.search.change_class == "A" or set(rules.locked) == set(Axis)
    has_buckets = layout.distributed_optimizer and layout.data_parallel > 1
    if not capabilities(rules.job.framework).has_zero_buckets or is_kept or not has_buckets:
        return {}
    share = shape.num_parameters // layout.pipeline_parallel
    default: tuple[int | None, ...] = (None, *(size for size in BUCKET_SIZES if size < share))
    return {
        "reduce_bucket_size": rules.search.reduce_bucket_size or default,
        "allgather_bucket_size": rules.search.allgather_bucket_size or default,
    }


def _micro_batches(layout: Layout, *, rules: LayoutRules) -> list[Layout]:
    baseline, batch = rules.job.layout, rules.job.global_batch_size
    requested = rules.search.micro_batch_size
    if Axis.MICRO_BATCH in rules.locked:
        choices: Sequence[int] = (baseline.micro_batch_size,)
    elif requested:
        choices = requested
    else:
        most = baseline.micro_batch_size * MAX_MICRO_BATCH_FACTOR
        powers = [2**power for power in range(most.bit_length()) if 2**power <= most]
        choices = sorted({*powers, baseline.micro_batch_size})
    return [
        replace(layout, micro_batch_size=choice)
        for choice in choices
        if batch % (choice * layout.data_parallel) == 0
    ]


def _fits(layout: Layout, *, shape: ModelShape, rules: LayoutRules) -> bool:
    """Whether Megatron's divisibility rules hold, no rule forbids the layout and a schedule runs it."""
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

    The parity gate compares with the baseline, so a layout that may change the objective has no custom ones.
    """
    stock = stock_schedule(layout)
    is_kept = Axis.SCHEDULE in rules.locked
    names: list[str] = []
    if (is_kept or _is_stock_requested(stock, rules)) and (
        layout.virtual_stages == 1 or requested_groups(layout, rules=rules)
    ):
        names.append(stock)
    # A requested group requests the interleaved schedule.
    is_grouped = layout.virtual_stages > 1 and rules.search.group and not rules.search.schedule
    is_custom = not is_kept and not is_grouped and rules.no_custom_schedules is None
    if is_custom and not rules.can_change_objective(layout):
        features = rules.job.features
        names += custom_schedules_of(
            layout,
            num_microbatches=layout.num_microbatches(rules.job.global_batch_size),
            requested=rules.search.schedule,
            splits_backward=layout.recompute != "full" and "moe" not in features,
        )
    prohibitions = rules.prohibitions
    return tuple(name for name in names if prohibitions.of_schedule(layout, name) is None)


def stock_choice(layout: Layout, *, group: int | None = None) -> ScheduleChoice:
    """The stock schedule of a layout as plans hold it; without `group` an interleaved one has PP's."""
    name = stock_schedule(layout)
    return ScheduleChoice(
        name=name, group=(group or layout.pipeline_parallel) if name == "interleaved" else None
    )


def requested_groups(layout: Layout, *, rules: LayoutRules) -> tuple[int, ...]:
    """The groups to choose from for an interleaved layout; none where it cannot run as requested."""
    num_microbatches = layout.num_microbatches(rules.job.global_batch_size)
    if rules.search.group:
        return tuple(
            group
            for group in rules.search.group
            if is_legal_group(group, layout, num_microbatches=num_microbatches)
        )
    groups = legal_groups(layout, num_microbatches=num_microbatches)
    return groups[:1] if Axis.SCHEDULE in rules.locked else groups


def _is_stock_requested(name: str, rules: LayoutRules) -> bool:
    """Whether the stock schedule is requested, or left where the requested custom ones are ruled out."""
    requested = rules.search.schedule
    if not requested or name in requested or ("stock" in requested and name == rules.job.schedule.name):
        return True
    return rules.no_custom_schedules is not None and set(requested) <= set(CUSTOM_NAMES)


def is_requested[T](requested: Sequence[T] | None, value: T) -> bool:
    """Whether the search allows `value`; None is `auto`."""
    return not requested or value in requested


def undivided_request(search: SearchConfig, *, num_devices: int) -> str | None:
    """The first degree of which no requested value divides the devices, and the rule; None without one."""
    for name in ("tensor_parallel", "context_parallel", "pipeline_parallel", "data_parallel"):
        # Context parallelism is an axis of the planner alone.
        values: tuple[int, ...] | None = getattr(search, name, None)
        if values and all(num_devices % value for value in values):
            asked = values[0] if len(values) == 1 else list(values)
            return f"search.{name}: {asked}; must divide the {num_devices} devices"
    return None


def fault_of_tensor_parallel(shape: ModelShape, *, rules: LayoutRules) -> str | None:
    """Why no requested tensor-parallel size can be had; None where one can be, or none is requested."""
    faults = [_fault_of_tensor_size(size, shape, rules) for size in rules.search.tensor_parallel or ()]
    return None if not faults or None in faults else faults[0]


def _fault_of_tensor_size(size: int, shape: ModelShape, rules: LayoutRules) -> str | None:
    if size == rules.job.layout.tensor_parallel:
        return None
    divided = (
        ("devices of a node", rules.slots_per_node),
        ("heads", shape.num_attention_heads),
        ("query groups", shape.num_query_groups),
        ("of the FFN", shape.ffn_hidden_size),
        ("of the vocabulary", shape.vocab_size),
    )
    name = f"search.tensor_parallel: {size}"
    if Axis.DEGREES in rules.locked or not capabilities(rules.job.framework).changes_tensor_parallel:
        return f"{name}; must be the command's own {rules.job.layout.tensor_parallel} in this job"
    return next(
        (f"{name}; must divide the {number} {words}" for words, number in divided if number % size), None
    )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
