"""Overlap of the gradients' reduction with the backward, which hides its time."""

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import (
    KnobContext,
    SettingKnob,
    Value,
    has_copies,
    never_kept,
    off_and_on,
)


def _fault(value: Value, context: KnobContext) -> str | None:
    gathers = context.rules.job.setting("overlap_param_gather")
    return "overlap_param_gather needs it" if gathers and not value else None


OVERLAP_GRAD_REDUCE = SettingKnob(
    name="overlap_grad_reduce",
    label="overlap_grad_reduce",
    meaning="reduce gradients while the backward computes the next ones",
    kind="switch",
    axis=Axis.OPTIONS,
    change_class="B",
    rule="more than one copy; must be on with overlap_param_gather (megatron/training/arguments.py)",
    flag="--overlap-grad-reduce",
    destination="overlap_grad_reduce",
    default="stock",
    offers=off_and_on,
    fault=_fault,
    kept=never_kept,
    read_back=lambda live: bool(live.optimizer.overlap_grad_reduce),
    framework=MEGATRON.framework,
    applies=has_copies,
)
