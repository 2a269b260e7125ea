"""The dispatcher that brings tokens to the devices of their experts."""

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.layout import Layout
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, SettingKnob, Value, kept_fault

ALLGATHER, ALLTOALL, FLEX = "allgather", "alltoall", "flex"
# Features that Megatron has with the other dispatchers alone, or of which a switch would undo a choice.
_BOUND = (
    "overlap_moe",
    "moe_shared_expert_overlap",
    "moe_capacity",
    "moe_flex_dispatcher",
    "cuda_graphs",
    "moe_router_padding",
)


def _offers(context: KnobContext) -> tuple[str, ...]:
    return (ALLGATHER, ALLTOALL)


def _fault(value: Value, context: KnobContext) -> str | None:
    command = context.rules.job.setting("moe_token_dispatcher")
    if kept := kept_fault(value, command or ALLGATHER, _kept(context.rules)):
        return kept
    return "must be the command's own: its kernels want flags of their own" if value == FLEX else None


def _kept(rules: KnobRules) -> str | None:
    features = rules.job.features
    if "moe" not in features:
        return "the model has no experts"
    return next((name for name in _BOUND if name in features), None)


def _exchanges(layout: Layout) -> bool:
    """Whether tokens leave their device: experts of one device are permuted in place."""
    return layout.expert_parallel * layout.tensor_parallel > 1


TOKEN_DISPATCHER = SettingKnob(
    name="moe_token_dispatcher",
    label="dispatcher",
    meaning="how tokens reach the devices of their experts",
    kind="word",
    words=(ALLGATHER, ALLTOALL, FLEX),
    axis=Axis.OPTIONS,
    change_class="B",
    rule="several devices with experts; kept with flex, overlap of expert communication or of the shared "
    "expert, capacity, a padded router or CUDA graphs (megatron/core/transformer/transformer_config.py)",
    flag="--moe-token-dispatcher-type",
    destination="moe_token_dispatcher_type",
    default="stock",
    offers=_offers,
    fault=_fault,
    kept=_kept,
    read_back=lambda live: getattr(live.model, "moe_token_dispatcher_type", None),
    framework=MEGATRON.framework,
    applies=_exchanges,
)
