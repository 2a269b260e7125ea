"""Overlap of the parameters' gathering with the forward."""

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
    return "needs overlap_grad_reduce" if value and not context.setting("overlap_grad_reduce") else None


OVERLAP_PARAM_GATHER = SettingKnob(
    name="overlap_param_gather",
    label="overlap_param_gather",
    meaning="gather parameters while the forward uses those before them",
    kind="switch",
    axis=Axis.OPTIONS,
    change_class="B",
    rule="with distributed_optimizer and overlap_grad_reduce (megatron/training/arguments.py)",
    flag="--overlap-param-gather",
    destination="overlap_param_gather",
    default="stock",
    offers=off_and_on,
    fault=_fault,
    kept=never_kept,
    read_back=lambda live: bool(live.optimizer.overlap_param_gather),
    framework=MEGATRON.framework,
    applies=lambda layout: layout.distributed_optimizer and has_copies(layout),
)
