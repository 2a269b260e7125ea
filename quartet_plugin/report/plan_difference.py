"""Says in words how a plan differs from the user's command."""

import re

from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.space.knobs.knob import LayoutKnob
from quartet_plugin.space.knobs.registry import LAYOUT_KNOBS

_SCHEDULES = {
    "no-pipelining": "no pipeline",
    "searched": "a searched order",
    "family": "an order of the schedule family",
}
# FLOPs that differ by less count as equal.
_EQUAL_FLOPS = 0.005


def difference_words(plan: Plan) -> tuple[str, ...]:
    """The differences: another model first, then layout, schedule, layers per stage and order of ranks."""
    baseline = plan.made_for.baseline
    parts = [] if plan.shape == plan.made_for.shape else [_model_words(plan.made_for.shape, plan.shape)]
    parts += [
        f"{knob.title} {_text(knob, baseline.layout)} becomes {_text(knob, plan.layout)}"
        for knob in LAYOUT_KNOBS
        if knob.is_of(plan.made_for.framework)
        and knob.in_layout(plan.layout) != knob.in_layout(baseline.layout)
    ]
    if plan.schedule != baseline.schedule:
        parts.append(f"{_schedule(baseline.schedule.label)} becomes {_schedule(plan.schedule.label)}")
    if plan.layout.num_stages > 1:
        if plan.split.label != baseline.split.label:
            parts.append(f"layers per stage {baseline.split.label} become {plan.split.label}")
        if plan.split.mtp_before_last != baseline.split.mtp_before_last:
            stage = "the stage before the last one" if plan.split.mtp_before_last else "the last stage"
            parts.append(f"multi-token prediction moves to {stage}")
    if not plan.mapping.is_stock:
        parts.append(f"ranks {plan.mapping.label}")
    return tuple(parts)


def difference_sentence(plan: Plan) -> str:
    """The differences from the user's command, joined by semicolons."""
    return "; ".join(difference_words(plan)) or "no setting differs from your command"


def difference_lines(plan: Plan) -> list[str]:
    """The differences for a terminal: another model in a line of its own, then the others."""
    words = difference_words(plan)
    num_first = int(plan.shape != plan.made_for.shape)
    rows = [row for row in (*words[:num_first], "; ".join(words[num_first:])) if row]
    return [f"{'differs' if row == 0 else '':<10}{text}" for row, text in enumerate(rows)]


def _model_words(before: ModelShape, after: ModelShape) -> str:
    flops = after.model_flops_per_sequence / before.model_flops_per_sequence - 1.0
    parameters = after.num_parameters / before.num_parameters - 1.0
    budget = "at equal FLOPs" if abs(flops) < _EQUAL_FLOPS else f"at {100 * flops:+.1f} % FLOPs"
    width, depth = after.hidden_size != before.hidden_size, after.num_layers != before.num_layers
    kind = "width and depth" if width and depth else "width" if width else "depth" if depth else "shape"
    return (
        f"ANOTHER MODEL of another {kind}: {_shape(before)} become {_shape(after)}, {budget} and "
        f"{100 * parameters:+.1f} % parameters"
    )


def _shape(shape: ModelShape) -> str:
    heads = f"{shape.num_attention_heads} head{'s' if shape.num_attention_heads > 1 else ''}"
    return f"{shape.num_layers} layers, hidden {shape.hidden_size}, {heads}, FFN {shape.ffn_hidden_size}"


def _schedule(label: str) -> str:
    return _SCHEDULES.get(label) or re.sub(r"^(1f1b|zb-\w+)", lambda name: name.group().upper(), label)


def _text(knob: LayoutKnob, layout: Layout) -> str:
    value = knob.in_layout(layout)
    return "the command's" if value is None else knob.text(value)
