"""Jobs for tests: what trial 0 would have reported."""

from dataclasses import replace
from typing import Any

from quartet_plugin.model.job_description import Experts
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import NodeInfo, ScheduleChoice, Split
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.split.layers import even_split
from tests.model.plans import LAYOUT, SHAPE


def make_shape(**changes: Any) -> ModelShape:
    """A GPT of 8 layers with some sizes replaced."""
    return replace(SHAPE, **changes)


def make_layout(**changes: Any) -> Layout:
    """PP2 with some degrees replaced."""
    return replace(LAYOUT, **changes)


def make_job(
    *,
    layout: Layout | None = None,
    shape: ModelShape | None = None,
    global_batch_size: int = 32,
    features: tuple[str, ...] = (),
    full_backward: str | None = None,
    no_custom_schedules: str | None = None,
    experts: Experts | None = None,
    shares_sequences: bool | None = None,
) -> TrainingJob:
    """A job with an even split and the stock schedule."""
    layout = layout or LAYOUT
    shape = shape or SHAPE
    schedule = ScheduleChoice(name="no-pipelining")
    if layout.pipeline_parallel > 1:
        schedule = ScheduleChoice(name="1f1b")
    if layout.virtual_stages > 1:
        schedule = ScheduleChoice(name="interleaved", group=layout.pipeline_parallel)
    return TrainingJob(
        framework="megatron-core",
        framework_version="0.19.2",
        torch_version="2.11.0",
        shape=shape,
        layout=layout,
        split=Split(transformer_layers_per_stage=even_split(shape.num_layers, num_stages=layout.num_stages)),
        schedule=schedule,
        global_batch_size=global_batch_size,
        train_iters=100,
        precision="fp32",
        features=features,
        neutralised=("--save",),
        full_backward=full_backward,
        no_custom_schedules=no_custom_schedules,
        experts=experts,
        shares_sequences=shares_sequences,
    )


def make_nodes(*num_slots: int) -> tuple[NodeInfo, ...]:
    """Nodes with these many slots."""
    return tuple(
        NodeInfo(host=f"node-{index}", node_class=f"cpu x{slots}", num_slots=slots)
        for index, slots in enumerate(num_slots)
    )
