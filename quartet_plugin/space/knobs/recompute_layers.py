"""Full recompute in parts: by which method the layers of a stage are divided, and by how many."""

from dataclasses import dataclass
from typing import Any

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.layout import Layout
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, SettingKnob, Value, kept_fault
from quartet_plugin.space.knobs.recompute import recompute_kept

UNIFORM, BLOCK = "uniform", "block"
# The shares of a stage's layers that `auto` recomputes by the block method.
_SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenSetting(SettingKnob):
    """A setting without a default of Megatron's: its flag is always written."""

    def write(self, value: Value) -> Any:
        """The value itself."""
        return value


def _is_full(layout: Layout) -> bool:
    return layout.recompute == "full"


def _methods(context: KnobContext) -> tuple[str, ...]:
    return (UNIFORM, BLOCK)


def _method_fault(value: Value, context: KnobContext) -> str | None:
    job = context.rules.job
    if kept := kept_fault(value, job.setting("recompute_method") or UNIFORM, recompute_kept(context.rules)):
        return kept
    layers = job.setting("recompute_num_layers") or 1
    if value == UNIFORM and layers != 1 and "mtp" in job.features:
        return f"not beside multi-token prediction with the command's --recompute-num-layers {layers}"
    return None


def _numbers(context: KnobContext) -> list[int]:
    if context.setting("recompute_method") != BLOCK:
        return [1]
    mean = context.shape.num_layers / context.layout.num_stages
    numbers = {round(mean * share) for share in _SHARES}
    return sorted({1, *(number for number in numbers if 1 < number < mean)})


def _number_fault(value: Value, context: KnobContext) -> str | None:
    job = context.rules.job
    if kept := kept_fault(value, job.setting("recompute_num_layers") or 1, recompute_kept(context.rules)):
        return kept
    is_uniform = context.setting("recompute_method") != BLOCK
    if is_uniform and value != 1 and "mtp" in job.features:
        return "must be 1 with the uniform method beside multi-token prediction"
    return None


RECOMPUTE_METHOD = _WrittenSetting(
    name="recompute_method",
    label="recompute_method",
    meaning="what full recompute repeats: uniform (all layers, by groups) or block (some layers of a stage)",
    kind="word",
    words=(UNIFORM, BLOCK),
    axis=Axis.RECOMPUTE,
    change_class="A",
    rule="with full recompute (megatron/core/transformer/transformer_config.py)",
    flag="--recompute-method",
    destination="recompute_method",
    unset=UNIFORM,
    default="stock",
    offers=_methods,
    fault=_method_fault,
    kept=recompute_kept,
    read_back=lambda live: live.model.recompute_method,
    framework=MEGATRON.framework,
    applies=_is_full,
)
RECOMPUTE_NUM_LAYERS = _WrittenSetting(
    name="recompute_num_layers",
    label="recompute_num_layers",
    meaning="layers of a stage that the block method repeats, or of a group that the uniform one does",
    kind="degree",
    axis=Axis.RECOMPUTE,
    change_class="A",
    rule="with full recompute; must be 1 with the uniform method and multi-token prediction "
    "(megatron/core/transformer/multi_token_prediction.py)",
    flag="--recompute-num-layers",
    destination="recompute_num_layers",
    unset=1,
    default="stock",
    offers=_numbers,
    fault=_number_fault,
    kept=recompute_kept,
    read_back=lambda live: live.model.recompute_num_layers,
    framework=MEGATRON.framework,
    applies=_is_full,
)
