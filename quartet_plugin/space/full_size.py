"""Gives a trial's plan all of the training's replicas: the same stages and microbatches, more often."""

from collections.abc import Sequence
from dataclasses import replace

from quartet_plugin.mapping.orders import coordinates, rank_of, slots_of
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Mapping, NodeInfo, Plan, Slot


def full_nodes(nodes: Sequence[NodeInfo], *, factor: int) -> tuple[NodeInfo, ...]:
    """`factor` times the nodes: those of the trials first, then others like them, under placeholders."""
    more = (
        replace(node, host=f"node-{len(nodes) * block + index + 1}")
        for block in range(1, factor)
        for index, node in enumerate(nodes)
    )
    return (*nodes, *more)


def with_all_replicas(plan: Plan, *, factor: int, nodes: Sequence[NodeInfo]) -> Plan:
    """The plan with `factor` times the replicas and the global batch, on `nodes`.

    The stock order stays; any other is that of the trial in each block of as many nodes as the trial has.
    """
    made_for = plan.made_for
    baseline = replace(made_for.baseline, layout=_with_replicas(made_for.baseline.layout, factor=factor))
    layout = _with_replicas(plan.layout, factor=factor)
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
        mapping=Mapping(slots=slots_of(nodes)) if plan.mapping.is_stock else _in_blocks(plan, layout),
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
