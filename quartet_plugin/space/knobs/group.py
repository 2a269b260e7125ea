"""The group of the interleaved schedule: how many microbatches pass a chunk before the next chunk's turn."""

from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import PlanKnob

GROUP = PlanKnob(
    name="group",
    label="group",
    meaning="microbatches in each group of the interleaved schedule",
    kind="degree",
    axis=Axis.SCHEDULE,
    change_class="A",
    rule="from PP to all microbatches; the rest is none or at least PP "
    "(megatron/core/pipeline_parallel/schedules.py)",
    flag="--microbatch-group-size-per-virtual-pipeline-stage",
    part=lambda plan: plan.schedule.group,
)
