"""Grouped products: a device's experts in one call, or one expert after the other."""

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, SettingKnob, Value, kept_fault, off_and_on
from quartet_plugin.space.knobs.token_dispatcher import TOKEN_DISPATCHER, has_only_flex, is_flex

# Features that want grouped products in some of their forms, of which no rule here can tell.
_BOUND = ("cuda_graphs", "cpu_offload", "activation_offload")
_FLEX = "moe_flex_dispatcher"
# Features of which Transformer Engine's grouped products ask for one.
_BIASES_TAKEN = frozenset({"no_linear_bias", "moe_unfused_bias"})


def _fault(value: Value, context: KnobContext) -> str | None:
    rules = context.rules
    command = rules.job.setting("moe_grouped_gemm") is True
    is_bound = is_flex(context.setting(TOKEN_DISPATCHER.name), rules)
    if kept := kept_fault(value, command, _kept(rules) or (_FLEX if is_bound else None)):
        return kept
    if value:
        # A command that runs shows that its framework takes its own value.
        is_accepted = command and not rules.is_planned
        if is_accepted or not _BIASES_TAKEN.isdisjoint(rules.job.features):
            return None
        return "needs --disable-bias-linear, or --no-bias-dropout-fusion"
    is_recomputed = context.layout.recompute == "selective" and "moe_act" in context.recomputed_modules
    return "recompute of moe_act needs it" if is_recomputed else None


def _kept(rules: KnobRules) -> str | None:
    features = rules.job.features
    if "moe" not in features:
        return "the model has no experts"
    if rules.job.layer_impl == "local":
        return "local layers, as a CPU has them, compute one expert after the other either way"
    return next((name for name in _BOUND if name in features), _FLEX if has_only_flex(rules) else None)


MOE_GROUPED_GEMM = SettingKnob(
    name="moe_grouped_gemm",
    label="moe_grouped_gemm",
    meaning="the products of a device's experts in one call, not one expert after the other",
    kind="switch",
    axis=Axis.OPTIONS,
    change_class="B",
    rule="Transformer Engine's layers (megatron/core/models/backends.py), without linear biases or with "
    "--no-bias-dropout-fusion (megatron/core/transformer/moe/experts.py); must be on with recompute of "
    "moe_act (megatron/core/transformer/transformer_config.py); kept with flex, CUDA graphs or offloading of "
    "activations; needs a GPU",
    flag="--moe-grouped-gemm",
    destination="moe_grouped_gemm",
    needs_gpu=True,
    default="stock",
    offers=off_and_on,
    fault=_fault,
    kept=_kept,
    read_back=lambda live: getattr(live.model, "moe_grouped_gemm", None),
    framework=MEGATRON.framework,
)
