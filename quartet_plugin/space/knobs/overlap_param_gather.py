"""Overlap of the parameters' gathering with the forward."""

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import (
    KnobContext,
    KnobRules,
    SettingKnob,
    Value,
    has_copies,
    kept_fault,
    off_and_on,
    reason_among,
)

NAME = "overlap_param_gather"
# Features with which a plan keeps the command's, and why.
_KEPT = {
    "saved_params": "--save-params-interval needs it off",
    "step_param_gather": "--overlap-param-gather-with-optimizer-step needs it on",
}


def _fault(value: Value, context: KnobContext) -> str | None:
    command = context.rules.job.setting(NAME) is True
    if kept := kept_fault(value, command, _kept(context.rules)):
        return kept
    return "needs overlap_grad_reduce" if value and not context.setting("overlap_grad_reduce") else None


def _kept(rules: KnobRules) -> str | None:
    return reason_among(_KEPT, rules)


OVERLAP_PARAM_GATHER = SettingKnob(
    name=NAME,
    label=NAME,
    meaning="gather parameters while the forward uses those before them",
    kind="switch",
    axis=Axis.OPTIONS,
    change_class="B",
    rule="with distributed_optimizer and overlap_grad_reduce; kept with --save-params-interval and with a "
    "gather of parameters in the optimizer's step (megatron/training/arguments.py)",
    flag="--overlap-param-gather",
    destination=NAME,
    default="stock",
    offers=off_and_on,
    fault=_fault,
    kept=_kept,
    read_back=lambda live: bool(live.optimizer.overlap_param_gather),
    framework=MEGATRON.framework,
    applies=lambda layout: layout.distributed_optimizer and has_copies(layout),
)
