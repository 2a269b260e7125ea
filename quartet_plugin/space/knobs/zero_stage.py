"""DeepSpeed's ZeRO stage: with 0 every copy of the model has the optimizer's whole state, with 1 a shard."""

from dataclasses import replace

from quartet_plugin.model.frameworks import DEEPSPEED
from quartet_plugin.model.layout import Layout
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import (
    KnobContext,
    KnobRules,
    LayoutKnob,
    Value,
    has_copies,
    kept_fault,
    reason_among,
)

_CLIPS_OTHERWISE = "in fp32 DeepSpeed clips several stages by another norm with ZeRO 0 than with 1"
# Features with which a command's stage is kept, and why.
_KEPT = {
    "clips_by_first_stage": _CLIPS_OTHERWISE,
    "clips_in_fp32": _CLIPS_OTHERWISE,
    "zero_bound": "DeepSpeed refuses the other stage with this optimizer, or these settings of the ds_config",
}


class ZeroKnob(LayoutKnob):
    """The stage, which a layout has as a sharded optimizer or none."""

    def in_layout(self, layout: Layout) -> Value | None:
        """The stage of a layout: 1 where its optimizer is sharded, else 0."""
        return int(layout.distributed_optimizer)

    def put(self, layout: Layout, value: Value | None) -> Layout:
        """The layout with another stage."""
        return replace(layout, distributed_optimizer=bool(value))


def _offers(context: KnobContext) -> list[int]:
    stage = int(context.layout.distributed_optimizer)
    return [stage, 1 - stage]


def _fault(value: Value, context: KnobContext) -> str | None:
    if value not in (0, 1):
        return "must be 0 or 1: a PipelineModule's gradients stay whole until the step's end"
    command = int(context.rules.job.layout.distributed_optimizer)
    return kept_fault(value, command, _kept(context.rules))


def _kept(rules: KnobRules) -> str | None:
    return reason_among(_KEPT, rules)


ZERO_STAGE = ZeroKnob(
    name="zero_stage",
    label="ZeRO",
    meaning="0 or 1: the optimizer's state whole on each copy of the model, or sharded over them",
    kind="word",
    words=(0, 1),
    axis=Axis.DEGREES,
    change_class="B",
    rule="0 or 1 for a PipelineModule (deepspeed/runtime/pipe/engine.py)",
    ds_key="zero_optimization.stage",
    framework=DEEPSPEED.framework,
    offers=_offers,
    fault=_fault,
    kept=_kept,
    read_back=lambda live: int(live.optimizer.zero_optimization_stage()),
    applies=has_copies,
)
