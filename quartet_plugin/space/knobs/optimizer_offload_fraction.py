"""The part of the optimizer that is on the host, where it is offloaded at all."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, LiveJob, SettingKnob, Value, kept_fault
from quartet_plugin.space.knobs.optimizer_cpu_offload import (
    FRACTION,
    OPTIMIZER_CPU_OFFLOAD,
    offload_kept_reason,
)

WHOLE = "1"
WORDS = ("0.1", "0.2", "0.25", "0.3", "0.4", "0.5", "0.6", "0.7", "0.75", "0.8", "0.9", WHOLE)
_OFFERED = ("0.25", "0.5", "0.75", WHOLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FractionKnob(SettingKnob):
    """A number from 0 to 1, which plans have as a text. Its flag is always written: defaults differ."""

    def read(self, args: Namespace) -> Value | None:
        """The fraction in Megatron's arguments; None where this release does not have it."""
        return _text(getattr(args, self.destination, None))

    def write(self, value: Value) -> Any:
        """The fraction as a number."""
        return float(value)


def _text(fraction: Any) -> str | None:
    """A fraction as plans have it; None for none."""
    try:
        number = float(fraction)
    except (TypeError, ValueError):
        return None
    return f"{number:.6f}".rstrip("0").rstrip(".") if 0.0 <= number <= 1.0 else None


def _offers(context: KnobContext) -> tuple[str, ...]:
    return _OFFERED


def _fault(value: Value, context: KnobContext) -> str | None:
    command = context.rules.job.setting(FRACTION) or WHOLE
    if kept := kept_fault(value, command, offload_kept_reason(context.rules)):
        return kept
    if value == command or context.setting(OPTIMIZER_CPU_OFFLOAD.name) is True:
        return None
    return f"needs {OPTIMIZER_CPU_OFFLOAD.name}"


def _read_back(live: LiveJob) -> Value | None:
    return _text(live.optimizer_offload_fraction)


OPTIMIZER_OFFLOAD_FRACTION = _FractionKnob(
    name=FRACTION,
    label=FRACTION,
    meaning="the fraction of the optimizer's state and step that is on the host",
    kind="word",
    words=WORDS,
    axis=Axis.OPTIONS,
    change_class="B",
    rule="with optimizer_cpu_offload; kept where that is kept; needs a GPU "
    "(megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py)",
    flag="--optimizer-offload-fraction",
    destination=FRACTION,
    unset=WHOLE,
    needs_gpu=True,
    default="stock",
    offers=_offers,
    fault=_fault,
    kept=offload_kept_reason,
    read_back=_read_back,
    framework=MEGATRON.framework,
)
