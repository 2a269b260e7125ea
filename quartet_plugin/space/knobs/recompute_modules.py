"""Selective recompute: the modules of a layer that the backward computes again."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.recompute_modules import MODULES, modules_of, modules_text
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, SettingKnob, Value, kept_fault
from quartet_plugin.space.knobs.recompute import module_fault, recompute_kept

CORE_ATTENTION = "core_attn"
# The sets that plans have: each module alone, and those that people train with. The names are in order.
SETS = (
    *(module for module in MODULES if module != "gdn_norm_out"),
    *("core_attn+layernorm", "core_attn+mlp", "layernorm+mlp", "core_attn+layernorm+mlp"),
    *("core_attn+moe", "layernorm+moe", "layernorm+moe_act", "moe_act+shared_experts"),
    *("layernorm+mla_up_proj", "mla_up_proj+mlp", "mla_up_proj+moe", "mla_up_proj+moe_act"),
    *("layernorm+mla_up_proj+mlp", "layernorm+mla_up_proj+moe_act", "mla_up_proj+mlp+moe_act"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModulesKnob(SettingKnob):
    """A setting that is a set of names, which Megatron's flag takes as words."""

    def read(self, args: Namespace) -> Value | None:
        """The set in Megatron's arguments; None where this release does not have it, or other names.

        --moe-layer-recompute adds the module `moe` (megatron/core/transformer/transformer_config.py).
        """
        if not hasattr(args, self.destination):
            return None
        value = getattr(args, self.destination)
        modules = [CORE_ATTENTION] if value is None else [*value]
        return modules_text([*modules, *(["moe"] if getattr(args, "moe_layer_recompute", False) else [])])

    def write(self, value: Value) -> Any:
        """The names as a list."""
        return list(modules_of(str(value)))


def _useful(rules: KnobRules) -> set[str]:
    """The modules whose recompute saves memory in the job's layers.

    Transformer Engine's attention keeps no scores, and its products of a dense layer have the norms in them.
    """
    job = rules.job
    features, experts = set(job.features), job.experts
    is_local, has_experts = job.layer_impl == "local", "moe" in features
    useful = {"mla_up_proj"}
    if is_local:
        useful.add(CORE_ATTENTION)
    if is_local or has_experts or "multi_latent_attention" in features:
        useful.add("layernorm")
    if not has_experts or (experts is not None and experts.num_dense_layers):
        useful.add("mlp")
    if has_experts:
        useful |= {"moe", "moe_act", "shared_experts"}
    return useful


def _offers(context: KnobContext) -> list[str]:
    useful = _useful(context.rules)
    return [
        text
        for text in SETS
        if (text == CORE_ATTENTION or set(modules_of(text)) <= useful) and module_fault(text, context) is None
    ]


def _fault(value: Value, context: KnobContext) -> str | None:
    command = context.rules.job.setting("recompute_modules") or CORE_ATTENTION
    if value == command and context.rules.job.layout.recompute == "selective":
        return None
    return kept_fault(value, command, recompute_kept(context.rules)) or module_fault(str(value), context)


def _is_selective(layout: Layout) -> bool:
    return layout.recompute == "selective"


def _read_back(live: Any) -> Value | None:
    modules = getattr(live.model, "recompute_modules", None)
    return None if modules is None else modules_text(modules)


RECOMPUTE_MODULES = _ModulesKnob(
    name="recompute_modules",
    label="recompute_modules",
    meaning="modules of a layer that selective recompute repeats, joined by +",
    kind="word",
    words=SETS,
    axis=Axis.RECOMPUTE,
    change_class="A",
    rule="with selective recompute; mlp without linear biases, layernorm with Transformer Engine, moe_act "
    "with grouped products of experts, mla_up_proj with latent attention, moe_act and layernorm not with "
    "fp8, moe not with overlap of expert communication or offloading inside of it, shared_experts not with "
    "its overlap "
    "(megatron/core/transformer/transformer_config.py)",
    flag="--recompute-modules",
    destination="recompute_modules",
    unset=CORE_ATTENTION,
    default="stock",
    offers=_offers,
    fault=_fault,
    kept=recompute_kept,
    read_back=_read_back,
    framework=MEGATRON.framework,
    applies=_is_selective,
)
