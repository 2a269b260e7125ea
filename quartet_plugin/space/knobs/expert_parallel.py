"""Expert parallelism: the devices that share the experts. Planned; in trials the command's own is kept."""

from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.divisors import divisors
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, LayoutKnob, Value, degree_of, kept_fault


def _copies(context: KnobContext) -> int:
    """The ranks that hold equal dense weights."""
    return context.layout.context_parallel * context.layout.data_parallel


def _offers(context: KnobContext) -> list[int]:
    if not context.rules.is_planned:
        return [context.layout.expert_parallel]
    return [1] if context.rules.job.experts is None else divisors(_copies(context))


def _fault(value: Value, context: KnobContext) -> str | None:
    size, experts = int(value), context.rules.job.experts
    if kept := kept_fault(size, context.rules.job.layout.expert_parallel, _kept(context.rules)):
        return kept
    if experts is not None and experts.num_experts % size:
        return f"must divide the {experts.num_experts} experts"
    return f"must divide the {_copies(context)} copies" if _copies(context) % size else None


def _kept(rules: KnobRules) -> str | None:
    return None if rules.is_planned else "trials keep it; `quartet plan` varies it"


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
