"""Recompute: the activations that the backward computes again instead of keeping them."""

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, LayoutKnob, Value, kept_fault

MODES = ("none", "selective", "full")


def _offers(context: KnobContext) -> tuple[str, ...]:
    return MODES


def _fault(value: Value, context: KnobContext) -> str | None:
    if value == "full" and "overlap_moe" in context.rules.job.features:
        return "overlap of expert communication refuses full recompute"
    return kept_fault(value, context.rules.job.layout.recompute, _kept(context.rules))


def _kept(rules: KnobRules) -> str | None:
    # Megatron refuses recompute beside offloaded activations, and graphs are captured for one mode.
    return next((name for name in ("cpu_offload", "cuda_graphs") if name in rules.job.features), None)


RECOMPUTE = LayoutKnob(
    name="recompute",
    label="recompute",
    meaning="activations computed again in the backward: none, selective (attention) or full",
    kind="word",
    words=MODES,
    axis=Axis.RECOMPUTE,
    change_class="A",
    rule="not beside offloading or CUDA graphs; not full beside overlap of expert communication "
    "(megatron/core/transformer/transformer_config.py)",
    flag="--recompute-granularity",
    default="stock",
    offers=_offers,
    fault=_fault,
    kept=_kept,
    read_back=lambda live: live.model.recompute_granularity or "none",
    framework=MEGATRON.framework,
)
