"""The pipeline schedule, which orders the forward and backward actions of every device."""

from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import PlanKnob

SCHEDULE = PlanKnob(
    name="schedule",
    label="schedule",
    meaning="a name of `quartet schedule list`, searched or SCHEDULE.json; custom ones need the parity gate",
    kind="schedule",
    axis=Axis.SCHEDULE,
    change_class="A",
    rule="1F1B with a chunk a device, interleaved with several; custom ones need a pipeline",
    part=lambda plan: plan.schedule.label,
)
