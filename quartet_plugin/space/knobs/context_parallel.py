"""Context parallelism: the devices that share each sequence. Tried on processors, elsewhere planned alone."""

from quartet_plugin.space.features import TOKENS_KEPT, Axis, batching_features, objective_axes
from quartet_plugin.space.knobs.divisors import divisors
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

# Features with which trials keep it.
_KEPT = {
    "mtp": "the loss of further tokens is a mean over each device's tokens",
    "attention_variant": "the CPU device does not have its attention",
    "heterogeneous": "the CPU device does not have its attention",
}


def _processes(context: KnobContext) -> int:
    """The processes that TP leaves."""
    return context.rules.job.layout.world_size // context.layout.tensor_parallel


def _offers(context: KnobContext) -> list[int]:
    if _kept(context.rules) is not None:
        return [context.layout.context_parallel]
    return divisors(_processes(context))


def _fault(value: Value, context: KnobContext) -> str | None:
    size, tensor, length = int(value), context.layout.tensor_parallel, context.shape.seq_length
    command, reason = context.rules.job.layout.context_parallel, _kept(context.rules)
    if kept := kept_fault(size, command, reason):
        return kept
    if reason is None and _processes(context) % size:
        return f"must divide the {_processes(context)} devices that TP leaves"
    # Causal attention is balanced in two chunks a rank; sequence parallelism splits further. A
    # command's own size runs already.
    is_stated = size == command and not context.rules.is_planned
    if size > 1 and not is_stated and length % (2 * size * tensor):
        return f"with TP {tensor} must cut sequences of {length} into {2 * size * tensor} equal chunks"
    return fault_of_shared_heads(context.shape, tensor=tensor, context=size)


def _kept(rules: KnobRules) -> str | None:
    """Why trials keep the command's size; a plan that nothing launches has any."""
    if rules.is_planned:
        return None
    if reason := reason_among(TOKENS_KEPT, rules):
        return reason
    if not rules.job.shares_sequences:
        return "trials keep it, since its attention needs Transformer Engine; `quartet plan` varies it"
    kinds, features = rules.job.shape.layer_kinds, rules.job.features
    if kinds is not None and kinds.state_space:
        return "state-space layers share sequences in another way"
    if reason := next((f"{name}: {reason}" for name, reason in _KEPT.items() if name in features), None):
        return reason
    counting = (name for name in batching_features(features) if Axis.DEGREES in objective_axes((name,)))
    return next((f"{name}: the loss counts each device's tokens" for name in counting), None)


CONTEXT_PARALLEL = LayoutKnob(
    name="context_parallel",
    label="CP",
    meaning="devices that share each sequence; trials change it on the CPU device alone",
    kind="degree",
    axis=Axis.DEGREES,
    change_class="B",
    rule="2 x CP x TP cuts the sequence evenly (megatron/core/transformer/attention.py); TP x CP divides the "
    "heads of state-space layers (megatron/core/ssm/mamba_context_parallel.py)",
    flag="--context-parallel-size",
    default="stock",
    offers=_offers,
    fault=_fault,
    kept=_kept,
    read_back=degree_of("context_parallel"),
)
