"""The split: how many transformer layers each pipeline stage holds."""

from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import PlanKnob

# Arguments that divide the layers without `--pipeline-model-parallel-layout`; Megatron refuses both together.
SPLIT_ARGUMENTS = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)

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
