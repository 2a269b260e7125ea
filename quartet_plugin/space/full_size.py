"""Gives a trial's plan the training's size: more replicas, or more stages of as many layers."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from quartet_plugin.errors import PlanError
from quartet_plugin.mapping.order_rules import NO_RULES, OrderRules
from quartet_plugin.mapping.orders import coordinates, rank_of, slots_of
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Mapping, NodeInfo, Plan, ScheduleChoice, Slot, Split
from quartet_plugin.schedule.search.limits import FREE, FamilyLimits
from quartet_plugin.space.config import SEARCHED
from quartet_plugin.space.layouts import is_legal_group, stock_choice
from quartet_plugin.space.schedules import custom_order
from quartet_plugin.space.written_schedules import WrittenSchedule, written_order
from quartet_plugin.split.layers import even_split


def full_nodes(nodes: Sequence[NodeInfo], *, factor: int) -> tuple[NodeInfo, ...]:
    """`factor` times the nodes: those of the trials first, then others like them, under placeholders."""
    more = (
        replace(node, host=f"node-{len(nodes) * block + index + 1}")
        for block in range(1, factor)
        for index, node in enumerate(nodes)
    )
    return (*nodes, *more)


def at_full_size(
    plan: Plan,
    *,
    factor: int,
    stage_factor: int = 1,
    nodes: Sequence[NodeInfo],
    rules: OrderRules = NO_RULES,
    limits: FamilyLimits = FREE,
    written: Collection[WrittenSchedule] = (),
) -> Plan:
    """The plan on `nodes`, which are `factor` times as many as those of its trial.

    It has `stage_factor` times the stages and, for the rest of the factor, more replicas. `rules` are those
    of the job's orders of ranks, `limits` those of its searched orders, `written` its schedules of files.
    Raises PlanError where the plan's schedule does not run that number of stages.
    """
    if stage_factor == 1:
        return with_all_replicas(plan, factor=factor, nodes=nodes, rules=rules)
    whole = with_all_stages(plan, factor=stage_factor, limits=limits, written=written)
    return with_all_replicas(whole, factor=factor // stage_factor, nodes=nodes, rules=rules)


def with_all_stages(
    plan: Plan,
    *,
    factor: int,
    limits: FamilyLimits = FREE,
    written: Collection[WrittenSchedule] = (),
) -> Plan:
    """The plan with `factor` times the stages and layers, on as many times the nodes.

    The first and the last stage keep their layers, and those between share the others evenly. The ranks are
    in the stock order. A searched order is searched again under the `limits`. Raises PlanError where the
    schedule of the plan's name does not run that number of stages, or is the order of a file in `written`.
    """
    made_for, baseline = plan.made_for, plan.made_for.baseline
    nodes = full_nodes(made_for.nodes, factor=factor)
    microbatches = baseline.layout.num_microbatches(made_for.global_batch_size)
    shape = replace(plan.shape, num_layers=plan.shape.num_layers * factor)
    layout, split = _with_stages(plan.layout, factor=factor), _with_stages_of(plan.split, factor=factor)
    of_baseline = _with_stages(baseline.layout, factor=factor)
    schedule = plan.schedule
    if schedule.custom is None:
        schedule = _with_group(schedule, layout, factor=factor, num_microbatches=plan.num_microbatches)
    else:
        _check_not_written(plan, written)
        order = custom_order(
            schedule.custom.named or SEARCHED,
            shape=shape,
            num_devices=layout.pipeline_parallel,
            num_chunks=layout.virtual_stages,
            num_microbatches=plan.num_microbatches,
            end_loads=None,
            split=split.transformer_layers_per_stage,
            mtp_layers=made_for.mtp_layers,
            limits=limits,
        )
        schedule = replace(schedule, custom=order.custom)
    return replace(
        plan,
        made_for=replace(
            made_for,
            shape=replace(made_for.shape, num_layers=made_for.shape.num_layers * factor),
            baseline=replace(
                baseline,
                layout=of_baseline,
                split=_with_stages_of(baseline.split, factor=factor),
                schedule=_with_group(
                    baseline.schedule, of_baseline, factor=factor, num_microbatches=microbatches
                ),
            ),
            world_size=made_for.world_size * factor,
            nodes=nodes,
        ),
        shape=shape,
        layout=layout,
        split=split,
        schedule=schedule,
        mapping=Mapping(slots=slots_of(nodes)),
        prediction=None,
        measurement=None,
    )


def _check_not_written(plan: Plan, written: Collection[WrittenSchedule]) -> None:
    """Raise PlanError for the order of a file, which has a number of stages; one with a name is made anew."""
    custom = plan.schedule.custom
    if custom is None or custom.named is not None:
        return
    for file in written:
        fits = file.split(plan.shape.num_layers) == plan.split.transformer_layers_per_stage
        order = written_order(file, shape=plan.shape, mtp_layers=plan.made_for.mtp_layers) if fits else None
        if order is not None and order.custom == custom:
            raise PlanError(f"schedule {plan.schedule.label}: the order of a file has no other stages")


def _with_stages(layout: Layout, *, factor: int) -> Layout:
    return replace(layout, pipeline_parallel=layout.pipeline_parallel * factor)


def _with_stages_of(split: Split, *, factor: int) -> Split:
    """The ends hold embedding and head, and keep their layers; the stages between share the rest evenly."""
    counts = split.transformer_layers_per_stage
    num_layers, num_stages = factor * sum(counts), factor * len(counts)
    if len(counts) == 1:
        return Split(transformer_layers_per_stage=even_split(num_layers, num_stages=num_stages))
    inner = even_split(num_layers - counts[0] - counts[-1], num_stages=num_stages - 2)
    return Split(transformer_layers_per_stage=(counts[0], *inner, counts[-1]))


def _with_group(
    schedule: ScheduleChoice, layout: Layout, *, factor: int, num_microbatches: int
) -> ScheduleChoice:
    """The framework's own schedule of a layout with `factor` times the stages of the plan's."""
    if schedule.group is None:
        return stock_choice(layout)
    groups = (schedule.group * factor, layout.pipeline_parallel)
    for group in groups:
        if is_legal_group(group, layout, num_microbatches=num_microbatches):
            return stock_choice(layout, group=group)
    raise PlanError(
        f"interleaved: {num_microbatches} microbatches; must fill {layout.pipeline_parallel} stages at full "
        "size"
    )


def with_all_replicas(
    plan: Plan, *, factor: int, nodes: Sequence[NodeInfo], rules: OrderRules = NO_RULES
) -> Plan:
    """The plan with `factor` times the replicas and the global batch, on `nodes`.

    The stock order stays; any other is that of the trial in each block of as many nodes as the trial has.
    Where that breaks one of the `rules`, it is the stock order.
    """
    made_for = plan.made_for
    baseline = replace(made_for.baseline, layout=_with_replicas(made_for.baseline.layout, factor=factor))
    layout = _with_replicas(plan.layout, factor=factor)
    mapping = Mapping(slots=slots_of(nodes))
    if not plan.mapping.is_stock:
        blocks = _in_blocks(plan, layout)
        mapping = mapping if rules.fault(blocks.slots, layout=layout) else blocks
    return replace(
        plan,
        made_for=replace(
            made_for,
            global_batch_size=made_for.global_batch_size * factor,
            baseline=baseline,
            world_size=made_for.world_size * factor,
            nodes=tuple(nodes),
        ),
        layout=layout,
        mapping=mapping,
        prediction=None,
        measurement=None,
    )


def _with_replicas(layout: Layout, *, factor: int) -> Layout:
    return replace(layout, data_parallel=layout.data_parallel * factor)


def _in_blocks(plan: Plan, full: Layout) -> Mapping:
    """The mapping by which each block of replicas has the trial's order on its own nodes."""
    small, num_nodes = plan.layout, len(plan.made_for.nodes)
    slots = []
    for rank in range(full.world_size):
        tp, cp, dp, pp = coordinates(rank, layout=full)
        block, dp = divmod(dp, small.data_parallel)
        slot = plan.mapping.slots[rank_of(tp, cp=cp, dp=dp, pp=pp, layout=small)]
        slots.append(Slot(node=slot.node + block * num_nodes, local=slot.local))
    return Mapping(slots=tuple(slots))
