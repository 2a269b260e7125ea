"""What the ranks' records say that ran, compared with the plan: only what ran as planned is a measurement."""

from collections.abc import Iterable, Iterator, Sequence

from quartet_plugin.model.frameworks import capabilities
from quartet_plugin.model.plan import Plan
from quartet_plugin.protocol.execution import PROGRAM, Execution, PipelineEnds, digest_of_actions
from quartet_plugin.protocol.rank_files import RankReport
from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.choice import generated, written_of
from quartet_plugin.schedule.files import order_texts
from quartet_plugin.schedule.placement import linear, loop, stages_of_device
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.space.knobs.knob import SettingKnob
from quartet_plugin.space.knobs.registry import LAYOUT_KNOBS
from quartet_plugin.space.knobs.use_megatron_fsdp import USE_MEGATRON_FSDP

# The implementations of attention among which the framework chooses by the sizes of its inputs, which a plan
# may change: Megatron's softmax with and without a fused kernel, those of Transformer Engine.
CHOSEN_BY_SIZE = frozenset({"Softmax", "FlashAttention", "FusedAttention", "UnfusedDotProductAttention"})
# The layers that a tensor partition puts into a model, and those whose places they take. Which of them run is
# read back as the knob's value.
OF_PARTITIONS = frozenset({"GridLinear", "GridMlp", "RingColumnLinear", "RingRowLinear"})
REPLACED_BY_PARTITIONS = frozenset(
    {
        "MLP",
        "ColumnParallelLinear",
        "RowParallelLinear",
        "TELayerNormColumnParallelLinear",
        "TEColumnParallelLinear",
        "TERowParallelLinear",
    }
)

# Wrapper classes of a model, with and without Megatron-FSDP. The knob's value that is read back says which
# ran.
WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "MegatronFSDP"})


def difference_from(
    plan: Plan, reports: Sequence[RankReport], *, modules: Sequence[str] | None = None
) -> str | None:
    """The first difference between a plan and what its ranks did, in one line; None where there is none.

    `modules` are the classes whose forward ran in the user's command, None where that is not known. A
    plan of the same shape runs the same ones, its tensor partition's layers and its wrapper apart.
    """
    ran: list[tuple[RankReport, Execution]] = []
    for report in reports:
        if report.execution is None:
            return f"rank {report.rank} recorded no plan that it ran"
        ran.append((report, report.execution))
    ran.sort(key=lambda pair: pair[1].position)
    order = _order_of_ranks(plan, ran)
    if order is not None:
        return order
    schedules = {
        count: _planned_program(plan, num_microbatches=count)
        for count in {_num_microbatches(plan, done) for _, done in ran}
    }
    for _, done in ran:
        words = next(_differences(plan, schedules[_num_microbatches(plan, done)], done), None)
        if words is not None:
            return f"rank {done.position}: {words}"
    if modules is None or plan.shape != plan.made_for.shape:
        return None
    has_partition = plan.layout.tensor_partition is not None
    is_rewrapped = plan.layout.setting(USE_MEGATRON_FSDP.name) is not None
    return _modules(reports, modules, has_partition=has_partition, is_rewrapped=is_rewrapped)


def ran_modules(reports: Iterable[RankReport]) -> tuple[str, ...] | None:
    """The classes of the modules whose forward ran on any rank; None where a rank does not say."""
    names: set[str] = set()
    for report in reports:
        if report.execution is None or report.execution.modules is None:
            return None
        names.update(report.execution.modules)
    return tuple(sorted(names))


def _modules(
    reports: Sequence[RankReport], expected: Sequence[str], *, has_partition: bool, is_rewrapped: bool
) -> str | None:
    """The modules that ran only in the plan, or only in the command."""
    ran = ran_modules(reports)
    if ran is None:
        return None
    more = set(ran) - set(expected) - CHOSEN_BY_SIZE
    fewer = set(expected) - set(ran) - CHOSEN_BY_SIZE
    if has_partition:
        more, fewer = more - OF_PARTITIONS, fewer - REPLACED_BY_PARTITIONS
    if is_rewrapped:
        more, fewer = more - WRAPPERS, fewer - WRAPPERS
    if not more and not fewer:
        return None
    parts = []
    if more:
        parts.append(f"{', '.join(sorted(more)[:5])} ran")
    if fewer:
        parts.append(f"{', '.join(sorted(fewer)[:5])} did not run")
    return f"modules differ from your command: {', '.join(parts)}"


def _order_of_ranks(plan: Plan, ran: Sequence[tuple[RankReport, Execution]]) -> str | None:
    """The first rank that is not on its slot. Which host plays which node is free, as at a launch."""
    slots = plan.mapping.slots
    if [done.position for _, done in ran] != list(range(len(slots))):
        return f"{len(ran)} ranks ran, the plan has {len(slots)}, each once"
    hosts: dict[int, str] = {}
    nodes: dict[str, int] = {}
    for (report, done), slot in zip(ran, slots, strict=True):
        host = hosts.setdefault(slot.node, report.host)
        node = nodes.setdefault(report.host, slot.node)
        if (host, node, slot.local) != (report.host, slot.node, report.local_rank):
            return (
                f"mapping: rank {done.position} ran on {report.host}:{report.local_rank}, "
                f"the plan has it on slot {slot.local} of node {slot.node}"
            )
    return None


def _planned_program(plan: Plan, *, num_microbatches: int) -> Schedule | None:
    """The schedule that the plugin's runtime has to execute; None where the framework's own runs.

    The plan's own words decide, not what a rank made of them: an order that cannot be made is a difference.
    """
    custom = plan.schedule.custom
    if plan.schedule.name in capabilities(plan.made_for.framework).stock_schedules:
        return None
    is_whole = num_microbatches == plan.num_microbatches
    written = written_of(custom, num_microbatches=num_microbatches) if custom and is_whole else None
    return written or generated(plan.schedule, layout=plan.layout, num_microbatches=num_microbatches)


def _num_microbatches(plan: Plan, done: Execution) -> int:
    """The planned number of microbatches; in a job whose batch grows any number on the way is one."""
    is_on_the_way = done.ramps_batch and 0 < done.num_microbatches < plan.num_microbatches
    return done.num_microbatches if is_on_the_way else plan.num_microbatches


def _differences(plan: Plan, schedule: Schedule | None, done: Execution) -> Iterator[str]:
    """Every difference of one rank, the knobs first: the rest follows from them."""
    yield from _knobs(plan, done)
    count = _num_microbatches(plan, done)
    if done.num_microbatches != count:
        yield f"{done.num_microbatches} microbatches ran, the plan has {count}"
    devices = plan.layout.pipeline_parallel
    if schedule is None:
        if done.schedule != plan.schedule.name:
            yield f"executed schedule {done.schedule}, planned {plan.schedule.label}"
        placement = (
            loop(devices, plan.layout.virtual_stages) if plan.layout.virtual_stages > 1 else linear(devices)
        )
    else:
        placement = schedule.placement
        yield from _actions(plan, schedule, done)
    yield from _stages(plan, placement, done)
    if done.ends is not None:
        yield from _ends(plan, placement, done.ends, pipeline_rank=done.pipeline_rank)


def _knobs(plan: Plan, done: Execution) -> Iterator[str]:
    for knob in LAYOUT_KNOBS:
        planned = knob.in_layout(plan.layout)
        if planned is None or not knob.is_of(plan.made_for.framework):
            continue
        # A setting that does nothing in this layout is one that the framework may take back.
        if isinstance(knob, SettingKnob) and not knob.applies(plan.layout):
            continue
        # Without layers nothing is cut.
        if knob.kind == "partition" and not any(stage.num_layers for stage in done.stages):
            continue
        live = done.knobs.get(knob.name)
        # A hybrid model's stage need not have both blocks of a transformer layer.
        if knob.kind == "partition" and live is None and plan.shape.layer_kinds is not None:
            continue
        if live != planned:
            value = "was not read back" if live is None else f"{knob.text(live)} ran"
            yield f"{knob.title} {value}, the plan has {knob.text(planned)}"


def _actions(plan: Plan, schedule: Schedule, done: Execution) -> Iterator[str]:
    label = plan.schedule.label
    if done.schedule != PROGRAM or done.actions is None:
        yield f"executed schedule {done.schedule}, planned {label}"
        return
    order = schedule.orders[done.pipeline_rank]
    expected = digest_of_actions(order_texts(order, num_microbatches=schedule.num_microbatches))
    kinds = order & 3
    num_full = int((kinds == ActionKind.B).sum())
    if done.actions.num_full_backwards != num_full * done.actions.num_steps:
        yield (
            f"{done.actions.num_full_backwards} full backwards in {done.actions.num_steps} steps; "
            f"{label} plans {num_full} per step"
        )
    if done.actions.digest != expected:
        yield f"pipeline rank {done.pipeline_rank}: the executed actions differ from {label}"
    stages = (order >> 2) // schedule.num_microbatches
    counts = plan.split.transformer_layers_per_stage
    num_split = sum(int(((kinds == ActionKind.W) & (stages == s)).sum()) for s, n in enumerate(counts) if n)
    if done.actions.num_split_backwards < num_split * done.actions.num_steps:
        yield (
            f"{done.actions.num_split_backwards} split backwards in {done.actions.num_steps} steps; "
            f"{label} plans {num_split} per step"
        )


def _stages(plan: Plan, placement: Sequence[int], done: Execution) -> Iterator[str]:
    counts = plan.split.transformer_layers_per_stage
    stages = stages_of_device(tuple(placement), plan.layout.pipeline_parallel)[done.pipeline_rank]
    if len(done.stages) != len(stages):
        yield f"{len(done.stages)} stages were built, the plan has {len(stages)} on a device"
        return
    for stage, built in zip(stages, done.stages, strict=True):
        first, count = sum(counts[:stage]), counts[stage]
        if built.num_layers != count or (count and built.first_layer != first):
            yield (
                f"split: layers {built.first_layer} to {built.first_layer + built.num_layers} were built, "
                f"stage {stage} of the plan has {first} to {first + count}"
            )
        if built.has_embedding != (stage == 0) or built.has_head != (stage == len(placement) - 1):
            yield f"the embedding or the head is on another stage than the plan's (stage {stage})"
        mtp_layers = plan.made_for.mtp_layers if stage == plan.split.mtp_stage_index else None
        if built.mtp_layers != mtp_layers:
            yield (
                f"{built.mtp_layers or 'no'} layers of multi-token prediction were built on stage {stage}, "
                f"the plan has {mtp_layers or 'none'} there"
            )


def _ends(plan: Plan, placement: Sequence[int], ends: PipelineEnds, *, pipeline_rank: int) -> Iterator[str]:
    last = placement[-1]
    if ends.last_device != last or ends.is_last != (pipeline_rank == last):
        yield f"the framework takes pipeline rank {ends.last_device} for the last one, the plan has {last}"
    shared = tuple(sorted({0, last}))
    if plan.split.mtp_before_last:
        # A head of its own shares nothing: Megatron would sum its gradients with the embedding's.
        copies = {0, placement[plan.split.mtp_stage_index]}
        shared = tuple(sorted(copies | {last} if plan.shape.tied_embeddings else copies))
    elif plan.schedule.custom is None and not (plan.shape.tied_embeddings or plan.made_for.mtp_layers):
        shared = ()  # nothing is summed: Megatron's own script then names the first rank alone
    if pipeline_rank in shared and ends.embedding_devices != shared:
        sharing = list(ends.embedding_devices)
        yield f"pipeline ranks {sharing} share the embedding, the plan has {list(shared)}"
    if ends.tied_copies_agree is False:
        yield "the two copies of the tied embedding are not equal"
