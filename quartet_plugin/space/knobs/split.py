"""The split: how many transformer layers each pipeline stage holds."""

from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import PlanKnob

SPLIT = PlanKnob(
    name="split",
    label="split",
    meaning="layers of each stage: even, stock, or counts like 6+2",
    kind="split",
    axis=Axis.SPLIT,
    change_class="A",
    rule="only the first and the last stage may be empty "
    "(megatron/core/transformer/pipeline_parallel_layer_layout.py)",
    flag="--pipeline-model-parallel-layout",
    part=lambda plan: plan.split.label,
)
