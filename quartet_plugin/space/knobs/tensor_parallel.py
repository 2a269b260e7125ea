"""Tensor parallelism: the devices that share each layer."""

from quartet_plugin.model.frameworks import capabilities
from quartet_plugin.model.job_description import Experts
from quartet_plugin.model.megatron_arguments import LINEAR_ATTENTION_HEADS
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.space.features import PARTS_KEPT, TOKENS_KEPT, Axis
from quartet_plugin.space.knobs.divisors import divisors
from quartet_plugin.space.knobs.expert_tensor_parallel import BIASES_FAULT, shares_biased_experts
from quartet_plugin.space.knobs.knob import (
    KnobContext,
    KnobRules,
    LayoutKnob,
    Value,
    degree_of,
    kept_fault,
    reason_among,
)
from quartet_plugin.space.state_space import fault_of_shared_heads

# Features with which TP is kept, and why.
_KEPT = {**TOKENS_KEPT, **PARTS_KEPT}
# Sizes of FP8 products are multiples of it.
FP8_MULTIPLE = 16


def sizes_to_divide(shape: ModelShape, experts: Experts | None = None) -> dict[str, int]:
    """The sizes of a model that a tensor-parallel size must divide, by name; 0 for one that it lacks."""
    kinds = shape.layer_kinds
    return {
        "heads": shape.num_attention_heads,
        "heads of a state-space layer": 0 if kinds is None else kinds.state_space_heads,
        "groups of a state-space layer": 0 if kinds is None else kinds.state_space_groups,
        "of the FFN": shape.ffn_hidden_size,
        "of the vocabulary": shape.vocab_size,
        "of an expert's FFN": 0 if experts is None else experts.ffn_hidden_size,
        "of the shared expert's FFN": 0 if experts is None else experts.shared_ffn_hidden_size,
    }


def _processes(context: KnobContext) -> int:
    """The processes to share a layer: all, where CP is chosen after TP, else those that CP leaves."""
    job = context.rules.job
    return job.layout.world_size // (1 if job.shares_sequences else context.layout.context_parallel)


def _offers(context: KnobContext) -> list[int]:
    return divisors(_processes(context))


def _fault(value: Value, context: KnobContext) -> str | None:
    size, command = int(value), context.rules.job.layout.tensor_parallel
    processes = _processes(context)
    if kept := kept_fault(size, command, _kept(context.rules)):
        return kept
    if size == 1 and "tp_comm_overlap" in context.rules.job.features:
        return "--tp-comm-overlap needs it above 1"
    if size > 1 and shares_biased_experts(context.rules):
        return f"must be 1 without --expert-tensor-parallel-size 1: {BIASES_FAULT}"
    if size != command and context.rules.slots_per_node % size:
        return f"must divide the {context.rules.slots_per_node} devices of a node"
    if processes % size:
        return f"must divide the {processes} devices"
    groups = context.shape.num_query_groups
    if groups % size and size % groups:
        return f"must divide the {groups} query groups, or be a multiple of them"
    heads, shared = context.rules.job.setting(LINEAR_ATTENTION_HEADS), context.layout.context_parallel
    if size != command and isinstance(heads, int) and heads % (size * shared):
        return f"times CP {shared} must divide the {heads} heads of linear attention"
    if size != command and (fault := fault_of_shared_heads(context.shape, tensor=size, context=shared)):
        return fault
    sizes = sizes_to_divide(context.shape, context.rules.job.experts).items()
    undivided = next((f"must divide the {number} {words}" for words, number in sizes if number % size), None)
    if undivided is None and context.rules.is_planned:
        return _fault_of_plan(size, context)
    return undivided


def _fault_of_plan(size: int, context: KnobContext) -> str | None:
    """The rule that a size breaks in a layout with Transformer Engine's layers and sequence parallelism."""
    shape, job = context.shape, context.rules.job
    if shape.seq_length % size:
        return f"must divide sequences of {shape.seq_length}"
    if "fp8" in job.features and not fits_fp8(size, shape, job.experts):
        return f"leaves FP8 products of sizes that are no multiples of {FP8_MULTIPLE}"
    return None


def fits_fp8(size: int, shape: ModelShape, experts: Experts | None) -> bool:
    """Whether the products of a rank have sizes that FP8 takes."""
    widths = [shape.hidden_size, shape.attention_size // size, shape.ffn_hidden_size // size]
    widths += [] if experts is None else [experts.ffn_hidden_size // size]
    return all(width % FP8_MULTIPLE == 0 for width in widths)


def _kept(rules: KnobRules) -> str | None:
    if not capabilities(rules.job.framework).changes_tensor_parallel:
        return "the framework's pipelines keep the script's tensor parallelism"
    # A plan that nothing launches has the size to keep in its search (`planner.kept_axes`).
    kept = reason_among(_KEPT, rules)
    if kept is not None and not rules.is_planned:
        return kept
    # Experts that no plan describes may not divide.
    return "moe" if "moe" in rules.job.features and rules.job.experts is None else None


TENSOR_PARALLEL = LayoutKnob(
    name="tensor_parallel",
    label="TP",
    meaning="devices that share each layer",
    kind="degree",
    axis=Axis.DEGREES,
    change_class="B",
    rule="divides heads, FFNs, vocabulary and a node's devices, and query groups or is a multiple of them; "
    "1 with linear biases of experts, unless ETP is 1; times CP divides the heads of gated delta nets "
    "(megatron/core/transformer/transformer_config.py); kept with a sinkhorn router, blockwise Muon or SOAP "
    "(megatron/core/optimizer/emerging_optimizers.py)",
    flag="--tensor-model-parallel-size",
    offers=_offers,
    fault=_fault,
    kept=_kept,
    read_back=degree_of("tensor_parallel"),
)
