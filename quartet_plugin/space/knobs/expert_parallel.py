"""Expert parallelism: the devices that share the experts. Planned; in trials the command's own is kept."""

from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, LayoutKnob, Value, degree_of, kept_fault


def _offers(context: KnobContext) -> list[int]:
    return [context.layout.expert_parallel]


def _fault(value: Value, context: KnobContext) -> str | None:
    return kept_fault(value, context.rules.job.layout.expert_parallel, _kept(context.rules))


def _kept(rules: KnobRules) -> str:
    return "trials keep it; `quartet plan` varies it"


EXPERT_PARALLEL = LayoutKnob(
    name="expert_parallel",
    label="EP",
    meaning="devices that share the experts; trials keep the command's",
    kind="degree",
    axis=Axis.DEGREES,
    change_class="B",
    rule="divides the experts, and DP x CP (megatron/core/parallel_state.py)",
    flag="--expert-model-parallel-size",
    default="stock",
    offers=_offers,
    fault=_fault,
    kept=_kept,
    read_back=degree_of("expert_parallel"),
)
