"""Descriptors that tests share: settings of Megatron's real flags that are no knobs of a release."""

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import SettingKnob, never_faulty, never_kept

# A switch that its flag turns off.
ROPE_FUSION = SettingKnob(
    name="rope_fusion",
    label="rope_fusion",
    meaning="rotary embeddings are applied by a fused function",
    kind="switch",
    axis=Axis.OPTIONS,
    change_class="B",
    rule="any",
    flag="--no-rope-fusion",
    destination="apply_rope_fusion",
    unset=True,
    default="stock",
    offers=lambda context: (False, True),
    fault=never_faulty,
    kept=never_kept,
    read_back=lambda live: bool(live.model.apply_rope_fusion),
    framework=MEGATRON.framework,
)
