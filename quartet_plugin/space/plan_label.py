"""Shows a plan in one line of labelled parts: `TP 2 · PP 4 · MB 1 · split 4+4+3+1 · zb-h1 · ranks 1,0`."""

from quartet_plugin.model.plan import STOCK, Plan
from quartet_plugin.space.knobs.knob import LayoutKnob, SettingKnob, Value
from quartet_plugin.space.knobs.mapping import MAPPING
from quartet_plugin.space.knobs.micro_batch_size import MICRO_BATCH_SIZE
from quartet_plugin.space.knobs.registry import LAYOUT_KNOBS
from quartet_plugin.space.knobs.shape import SHAPE
from quartet_plugin.space.knobs.split import SPLIT

SEPARATOR = " · "
# The counts of a split that a line shows at most.
_MAX_COUNTS = 16


def plan_label(plan: Plan) -> str:
    """The parts of a plan that do something, each with its label.

    Degrees of 1, settings that stay as the command has them and the launcher's order of ranks are left out,
    the model's shape where it is the command's.
    """
    layout = plan.layout
    parts = [f"{SHAPE.label} {plan.shape_label}"] if plan.is_other_model else []
    for knob in LAYOUT_KNOBS:
        value = knob.in_layout(layout)
        if knob.is_of(plan.made_for.framework) and _does_something(knob, value):
            parts.append(knob.label if value is True else f"{knob.label} {knob.text(value)}")
    if layout.num_stages > 1:
        counts = plan.split.transformer_layers_per_stage
        more = f"+... ({len(counts)} stages)" if len(counts) > _MAX_COUNTS else ""
        parts.append(f"{SPLIT.label} {'+'.join(map(str, counts[:_MAX_COUNTS]))}{more}")
        if plan.made_for.mtp_layers:
            stage = "the stage before the last one" if plan.split.mtp_before_last else "the last stage"
            parts.append(f"MTP {plan.made_for.mtp_layers} on {stage}")
        parts.append(plan.schedule.label)
    if not plan.mapping.is_stock:
        parts.append(f"{MAPPING.label} {plan.mapping.label}")
    return SEPARATOR.join(parts)


def split_words(plan: Plan) -> str:
    """The split with what lies beside its transformer layers, in words."""
    mtp_layers = plan.made_for.mtp_layers
    last = f"multi-token prediction ({mtp_layers}) and head" if mtp_layers else "head"
    if plan.split.mtp_before_last:
        last = f"multi-token prediction ({mtp_layers}) on the stage before the last one, head"
    return f"{plan.split.label} transformer layers, embedding first, {last} last"


def _does_something(knob: LayoutKnob, value: Value | None) -> bool:
    if value is None or knob is MICRO_BATCH_SIZE or isinstance(knob, SettingKnob):
        return value is not None
    match knob.kind:
        case "degree":
            return int(value) > 1
        case "word":
            return value not in ("none", 0)
        case "partition":
            return value != STOCK
    return value is not False
