"""Virtual stages: how many chunks of layers each device holds."""

from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, LayoutKnob, Value, degree_of, never_kept
from quartet_plugin.space.knobs.pipeline_parallel import most_stages

# Counts that are always offered; others are offered where they divide the layers of a device evenly.
_USUAL = (1, 2, 4)


def _most(context: KnobContext) -> int:
    """The most chunks of a device: the first and the last stage may hold no layer, but in a hybrid model."""
    return most_stages(context.shape) // context.layout.pipeline_parallel


def _offers(context: KnobContext) -> list[int]:
    if context.layout.pipeline_parallel == 1:
        return [1]
    most = max(1, _most(context))
    if context.rules.is_planned:
        return list(range(1, most + 1))
    even = [
        count
        for count in range(1, most + 1)
        if context.shape.num_layers % (count * context.layout.pipeline_parallel) == 0
    ]
    counts = {*_USUAL, *even, context.rules.job.layout.virtual_stages}
    return [count for count in sorted(counts) if count <= most]


def _fault(value: Value, context: KnobContext) -> str | None:
    count, ranks = int(value), context.layout.pipeline_parallel
    if count == 1 and "step_param_gather" in context.rules.job.features:
        return "--overlap-param-gather-with-optimizer-step needs virtual stages in a pipeline"
    if count == 1 < ranks and "overlap_moe" in context.rules.job.features:
        return "overlap of expert communication needs virtual stages in a pipeline"
    if ranks == 1:
        return "virtual stages need pipeline_parallel > 1" if count > 1 else None
    most = _most(context)
    return (
        f"must be at most {most} for {context.shape.num_layers} layers on {ranks} ranks"
        if count > most
        else None
    )


VIRTUAL_STAGES = LayoutKnob(
    name="virtual_stages",
    label="VP",
    meaning="stages on each device",
    kind="degree",
    axis=Axis.SCHEDULE,
    change_class="A",
    rule="only the first and the last stage may be empty, and in a hybrid model no stage "
    "(megatron/core/transformer/pipeline_parallel_layer_layout.py); must be above 1 in a pipeline with "
    "overlap of expert communication (megatron/core/transformer/transformer_config.py), and with a gather of "
    "parameters in the optimizer's step (megatron/training/arguments.py)",
    flag="--num-virtual-stages-per-pipeline-rank",
    offers=_offers,
    fault=_fault,
    kept=never_kept,
    read_back=degree_of("virtual_stages"),
)
