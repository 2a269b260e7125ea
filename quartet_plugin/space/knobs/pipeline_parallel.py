"""Pipeline parallelism: the devices that the layers are spread over."""

from dataclasses import replace

from quartet_plugin.model.layout import Layout
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.space.features import PIPELINE_KEPT, STAGES_KEPT, Axis
from quartet_plugin.space.knobs.divisors import divisors
from quartet_plugin.space.knobs.expert_tensor_parallel import expert_pipelines_fault
from quartet_plugin.space.knobs.knob import (
    KnobContext,
    KnobRules,
    LayoutKnob,
    Value,
    degree_of,
    kept_fault,
    never_kept,
    reason_among,
)

# Features with which a command's degree is kept, and why.
_KEPT = {**STAGES_KEPT, **PIPELINE_KEPT}


def most_stages(shape: ModelShape) -> int:
    """A stage for each layer and, but in a hybrid model, one for the embedding and one for the head alone."""
    return shape.num_layers + (2 if shape.layer_kinds is None else 0)


def _processes(layout: Layout, rules: KnobRules) -> int:
    """The processes that TP and CP leave."""
    return rules.job.layout.world_size // layout.context_parallel // layout.tensor_parallel


def _offers(context: KnobContext) -> list[int]:
    return divisors(_processes(context.layout, context.rules))


def _fault(value: Value, context: KnobContext) -> str | None:
    ranks, processes = int(value), _processes(context.layout, context.rules)
    if kept := kept_fault(ranks, context.rules.job.layout.pipeline_parallel, _keeps_stages(context.rules)):
        return kept
    if processes % ranks:
        return f"must divide the {processes} devices that TP leaves"
    experts = context.rules.job.logged_expert_layers
    if experts and ranks > len(experts):
        return f"must be at most {len(experts)}: each device needs a layer with experts of logged losses"
    if "bf16_end_layer" in context.rules.job.features and ranks > context.shape.num_layers:
        return f"must be at most the {context.shape.num_layers} layers with a bf16 layer at an end"
    layout = replace(context.layout, pipeline_parallel=ranks)
    # A model with experts may have another EP, which is chosen behind.
    if context.rules.job.experts is None and (fault := expert_pipelines_fault(layout, context.rules)):
        return f"must be 1: {fault}"
    most = most_stages(context.shape)
    return f"must be at most {most} for {context.shape.num_layers} layers" if ranks > most else None


def _keeps_stages(rules: KnobRules) -> str | None:
    return reason_among(_KEPT, rules)


PIPELINE_PARALLEL = LayoutKnob(
    name="pipeline_parallel",
    label="PP",
    meaning="devices that the layers are spread over",
    kind="degree",
    axis=Axis.DEGREES,
    change_class="A",
    rule="TP x CP x PP divides the processes; must be 1 in a dense model with CP above 1 and "
    "--use-tp-pp-dp-mapping (megatron/core/parallel_state.py); at most the layers with "
    "experts of a hybrid model that logs their losses (megatron/training/training.py); kept with several "
    "bf16 layers at an end of an FP8 model (megatron/core/transformer/transformer_config.py)",
    flag="--pipeline-model-parallel-size",
    offers=_offers,
    fault=_fault,
    kept=never_kept,
    read_back=degree_of("pipeline_parallel"),
)
