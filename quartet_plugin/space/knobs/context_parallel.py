"""Context parallelism: the devices that share each sequence. Planned; in trials the command's own is kept."""

from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, LayoutKnob, Value, degree_of, kept_fault


def _offers(context: KnobContext) -> list[int]:
    return [context.layout.context_parallel]


def _fault(value: Value, context: KnobContext) -> str | None:
    return kept_fault(value, context.rules.job.layout.context_parallel, _kept(context.rules))


def _kept(rules: KnobRules) -> str:
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
