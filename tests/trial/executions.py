"""Records of ranks that did exactly what a plan says, for tests to change."""

from dataclasses import replace
from typing import Any

from quartet_plugin.model.frameworks import MEGATRON, capabilities
from quartet_plugin.model.plan import Plan
from quartet_plugin.protocol.execution import (
    BuiltStage,
    ExecutedActions,
    Execution,
    PipelineEnds,
    digest_of_actions,
)
from quartet_plugin.schedule.choice import generated, written_of
from quartet_plugin.schedule.files import order_texts
from quartet_plugin.schedule.placement import linear, loop, stages_of_device
from quartet_plugin.space.knobs.registry import LAYOUT_KNOBS

STEPS = 5


def executed(plan: Plan, rank: int, **changes: Any) -> Execution:
    """What the process of `rank` records where it did the plan; pipeline ranks are the slowest to change."""
    layout, framework = plan.layout, plan.made_for.framework
    devices = layout.pipeline_parallel
    device = rank // (layout.world_size // devices)
    custom, count = plan.schedule.custom, plan.num_microbatches
    placement = loop(devices, layout.virtual_stages) if layout.virtual_stages > 1 else linear(devices)
    actions = None
    if plan.schedule.name not in capabilities(framework).stock_schedules:
        schedule = None if custom is None else written_of(custom, num_microbatches=count)
        schedule = schedule or generated(plan.schedule, layout=layout, num_microbatches=count)
        placement = schedule.placement
        texts = order_texts(schedule.orders[device], num_microbatches=count)
        actions = ExecutedActions(
            digest=digest_of_actions(texts),
            num_steps=STEPS,
            num_full_backwards=STEPS * sum("B" in text for text in texts),
            num_split_backwards=STEPS * sum("W" in text for text in texts),
        )
    counts = plan.split.transformer_layers_per_stage
    stages = stages_of_device(placement, devices)[device]
    knobs = {
        knob.name: value
        for knob in LAYOUT_KNOBS
        if knob.is_of(framework) and (value := knob.in_layout(layout)) is not None
    }
    last = placement[-1]
    shared = sorted({0, placement[plan.split.mtp_stage_index]})
    done = Execution(
        schedule=plan.schedule.name if actions is None else "program",  # type: ignore[arg-type]
        position=rank,
        pipeline_rank=device,
        num_microbatches=count,
        stages=tuple(
            BuiltStage(
                first_layer=sum(counts[:stage]),
                num_layers=counts[stage],
                has_embedding=stage == 0,
                has_head=stage == len(placement) - 1,
                mtp_layers=plan.made_for.mtp_layers if stage == plan.split.mtp_stage_index else None,
            )
            for stage in stages
        ),
        knobs=knobs,
        actions=actions,
        ends=PipelineEnds(
            last_device=last,
            is_last=device == last,
            embedding_devices=tuple(shared) if device in shared else (),
            tied_copies_agree=None if last or device else True,
        )
        if framework == MEGATRON.framework
        else None,
        modules=None,
    )
    return replace(done, **changes)
