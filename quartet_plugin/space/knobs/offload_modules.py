"""Activations on the host between forward and backward, by the modules of a layer that save them."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.offload_modules import NONE, offload_modules_of, offload_modules_text
from quartet_plugin.model.recompute_modules import modules_of
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, LiveJob, SettingKnob, Value, kept_fault

NAME = "offload_modules"
_SWITCH = "fine_grained_activation_offloading"
# Megatron asks that it is 1 with Transformer Engine 2.10 and later, where other code would move weights, too.
OFFLOAD_VARIABLE = "NVTE_CPU_OFFLOAD_V1"
# The sets that plans have: each module alone, and those that people train with. The names are in order.
SETS = (
    *(NONE, "attn_norm", "core_attn", "expert_fc1", "mlp_norm", "moe_act", "qkv_linear"),
    *("attn_proj+core_attn", "core_attn+qkv_linear", "attn_proj+core_attn+qkv_linear"),
    *("attn_norm+mlp_norm", "core_attn+expert_fc1", "core_attn+moe_act", "expert_fc1+moe_act"),
    *("attn_proj+core_attn+expert_fc1", "attn_proj+core_attn+expert_fc1+moe_act"),
    "attn_norm+attn_proj+core_attn+expert_fc1+mlp_norm+moe_act+qkv_linear",
)
_OF_EXPERTS = frozenset({"expert_fc1", "moe_act"})
_NORMS = frozenset({"attn_norm", "mlp_norm"})
# Features that move activations or weights in a way of their own, or capture the layers, or whose layers
# have other modules.
_BOUND = (
    *("cpu_offload", "cuda_graphs", "fsdp", "torch_fsdp", "weight_shards"),
    *("hybrid", "heterogeneous", "attention_variant"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModulesKnob(SettingKnob):
    """A set of names, which Megatron's flag takes as words beside a switch."""

    def read(self, args: Namespace) -> Value | None:
        """The set in Megatron's arguments; None where this release does not have it, or other names."""
        return _text(args)

    def arguments(self, value: Value) -> dict[str, Any]:
        """Megatron's arguments for a set, by name: the switch and the names; neither for none."""
        modules = list(offload_modules_of(str(value)))
        return {_SWITCH: True if modules else None, self.destination: modules or None}


def _text(owner: Any) -> str | None:
    """The set in arguments, or in a model's configuration."""
    if not hasattr(owner, _SWITCH):
        return None
    return offload_modules_text(getattr(owner, NAME, None) or ()) if getattr(owner, _SWITCH) else NONE


def offloaded_modules(context: KnobContext) -> frozenset[str]:
    """The modules whose activations a plan, or the command, has on the host."""
    return frozenset(offload_modules_of(str(context.setting(NAME) or NONE)))


def _offers(context: KnobContext) -> tuple[str, ...]:
    # What is searched without a name is the command's own.
    return ()


def _fault(value: Value, context: KnobContext) -> str | None:
    command = context.rules.job.setting(NAME) or NONE
    if value == command:
        return None
    if kept := kept_fault(value, command, _kept(context.rules)):
        return kept
    return None if value == NONE else _fault_of_layout(context) or _fault_of_modules(str(value), context)


def _fault_of_layout(context: KnobContext) -> str | None:
    """The rule of every set that a plan breaks."""
    if context.is_custom:
        return "runs in the framework's own schedules alone"
    if context.layout.recompute == "full":
        return "not with full recompute, which saves nothing of a module"
    return "not with a tensor partition" if context.layout.tensor_partition is not None else None


def _fault_of_modules(text: str, context: KnobContext) -> str | None:
    """The rule that a set of modules breaks; None for a legal one."""
    features, modules = context.rules.job.features, frozenset(offload_modules_of(text))
    has_experts, is_latent = "moe" in features, "multi_latent_attention" in features
    of_experts = sorted(modules & _OF_EXPERTS)
    if of_experts:
        first = of_experts[0]
        if not has_experts:
            return f"{first}: the model has no experts"
        if not context.is_on("moe_grouped_gemm", feature="moe_grouped_gemm"):
            return f"{first}: needs --moe-grouped-gemm"
        if "moe_capacity" in features:
            return f"{first}: a stash of the tokens that experts take may hold it (moe_capacity)"
    again = _recomputed(context)
    if of_experts and "moe" in again:
        return f"{of_experts[0]}: not supported with recompute of moe"
    if "core_attn" in modules & again:
        return "core_attn: its recompute saves nothing of it"
    absent = {"attn_norm": is_latent, "mlp_norm": has_experts}
    plain = next((name for name in sorted(modules & _NORMS) if not absent[name]), None)
    return None if plain is None else f"{plain}: the norm is a part of the product behind it"


def _recomputed(context: KnobContext) -> frozenset[str]:
    """The modules that a plan, or the command, recomputes; Megatron's where neither names them."""
    if context.layout.recompute != "selective":
        return frozenset()
    return frozenset(modules_of(str(context.setting("recompute_modules") or "core_attn")))


def _kept(rules: KnobRules) -> str | None:
    job = rules.job
    if job.layer_impl == "local":
        return "it copies between a GPU and its host; needs --transformer-impl transformer_engine"
    return next((name for name in _BOUND if name in job.features), None)


def _read_back(live: LiveJob) -> Value | None:
    return _text(live.model)


OFFLOAD_MODULES = _ModulesKnob(
    name=NAME,
    label=NAME,
    meaning="modules whose saved inputs are on the host until the backward, joined by +; only if named",
    kind="word",
    words=SETS,
    axis=Axis.OPTIONS,
    change_class="A",
    rule="Transformer Engine's layers (megatron/training/arguments.py), the framework's schedules; "
    "expert_fc1 and moe_act with grouped products of experts (megatron/core/transformer/moe/experts.py), not "
    "with recompute of moe or a capacity, attn_proj with core_attn "
    "(megatron/core/transformer/transformer_config.py), which is not recomputed "
    "(megatron/core/transformer/attention.py); a norm that is a module of its own: attn_norm of latent "
    "attention, mlp_norm before experts (megatron/core/transformer/transformer_layer.py); not with full "
    "recompute; kept with CUDA graphs, FSDP, offloading of layers, or a hybrid model; needs a GPU, and "
    "NVTE_CPU_OFFLOAD_V1=1 from Transformer Engine 2.10 on (megatron/training/arguments.py)",
    flag="--offload-modules",
    destination=NAME,
    unset=NONE,
    needs_gpu=True,
    default="stock",
    offers=_offers,
    fault=_fault,
    kept=_kept,
    read_back=_read_back,
    framework=MEGATRON.framework,
)
