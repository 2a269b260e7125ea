"""The shape: the depth and width that a model has at an equal budget."""

from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import PlanKnob

SHAPE = PlanKnob(
    name="shape",
    label="model",
    meaning="layers x hidden size, like 24x2048; asked for by the section `scaling`",
    kind="shape",
    axis=Axis.SCALING,
    change_class="D",
    default="stock",
    rule="parameters, or FLOPs a token, within the tolerance of the command's",
    flag="--num-layers",
    part=lambda plan: plan.shape_label,
)
