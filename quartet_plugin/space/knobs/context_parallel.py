"""Context parallelism: the devices that share each sequence. Planned; in trials the command's own is kept."""

from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.divisors import divisors
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, LayoutKnob, Value, degree_of, kept_fault


def _offers(context: KnobContext) -> list[int]:
    job = context.rules.job
    if not context.rules.is_planned:
        return [context.layout.context_parallel]
    return divisors(job.layout.world_size // context.layout.tensor_parallel)


def _fault(value: Value, context: KnobContext) -> str | None:
    size, tensor, length = int(value), context.layout.tensor_parallel, context.shape.seq_length
    if kept := kept_fault(size, context.rules.job.layout.context_parallel, _kept(context.rules)):
        return kept
    # Causal attention is balanced in two chunks a rank; sequence parallelism splits further. A
    # command's own size runs already.
    if context.rules.is_planned and size > 1 and length % (2 * size * tensor):
        return f"with TP {tensor} must cut sequences of {length} into {2 * size * tensor} equal chunks"
    return None


def _kept(rules: KnobRules) -> str | None:
    if rules.is_planned:
        return None
    return "trials keep it, since its attention needs Transformer Engine; `quartet plan` varies it"


CONTEXT_PARALLEL = LayoutKnob(
    name="context_parallel",
    label="CP",
    meaning="devices that share each sequence; trials keep the command's",
    kind="degree",
    axis=Axis.DEGREES,
    change_class="B",
    rule="2 x CP x TP cuts the sequence evenly (megatron/core/transformer/attention.py)",
    flag="--context-parallel-size",
    default="stock",
    offers=_offers,
    fault=_fault,
    kept=_kept,
    read_back=degree_of("context_parallel"),
)
