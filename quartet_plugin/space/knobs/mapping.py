"""The mapping: the device that plays each rank."""

from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import PlanKnob

MAPPING = PlanKnob(
    name="mapping",
    label="ranks",
    meaning="ranks on devices: stock, an order's name, or slots like 1,0",
    kind="order",
    axis=Axis.MAPPING,
    change_class="A",
    rule="RANK 0 stays on the master's node, and TP groups inside a node; where a feature needs it, whole "
    "nodes move, or whole groups of ranks that share experts",
    part=lambda plan: plan.mapping.label,
)
