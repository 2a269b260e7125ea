"""Recompute: the activations that the backward computes again instead of keeping them."""

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.offload_modules import NONE, offload_modules_of
from quartet_plugin.model.recompute_modules import modules_of
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, LayoutKnob, Value, kept_fault

MODES = ("none", "selective", "full")
# Megatron's arguments by which a command states what is recomputed: a plan with another mode leaves them out.
# Not `recompute_modules`, which does nothing but under selective recompute.
RECOMPUTE_ARGUMENTS = (
    "recompute_granularity",
    "recompute_activations",
    "moe_layer_recompute",
    "recompute_method",
    "recompute_num_layers",
    "distribute_saved_activations",
)


def _offers(context: KnobContext) -> tuple[str, ...]:
    return MODES


def _fault(value: Value, context: KnobContext) -> str | None:
    job = context.rules.job
    if value == "full" and "overlap_moe" in job.features:
        return "overlap of expert communication refuses full recompute"
    if kept := kept_fault(value, job.layout.recompute, recompute_kept(context.rules)):
        return kept
    if value == "full" and "activation_offload" in job.features and job.layout.recompute != "full":
        return "full recompute saves nothing of a module that the command offloads"
    modules = job.setting("recompute_modules")
    if value == "selective" and job.layout.recompute != "selective" and modules is not None:
        fault = module_fault(str(modules), context)
        return None if fault is None else f"the command's --recompute-modules: {fault}"
    return None


def recompute_kept(rules: KnobRules) -> str | None:
    """The feature that keeps recompute and its settings at the command's; None where they are free.

    Megatron refuses recompute beside offloaded activations, and graphs are captured for one mode.
    """
    return next((name for name in ("cpu_offload", "cuda_graphs") if name in rules.job.features), None)


def module_fault(text: str, context: KnobContext) -> str | None:
    """The rule that a set of modules breaks; None for a legal one.

    What TransformerConfig.__post_init__ does not refuse, the training of 0.19 cannot do.
    """
    rules = context.rules
    features, experts = rules.job.features, rules.job.experts
    is_grouped = context.is_on("moe_grouped_gemm", feature="moe_grouped_gemm")
    with_fp8 = "not supported with the delayed scaling of fp8" if "fp8" in features else None
    # Where a checkpoint discards its output, 0.19 asks Transformer Engine for fp8 whatever the precision
    # (megatron/core/tensor_parallel/random.py).
    in_place = "needs --transformer-impl transformer_engine" if rules.job.layer_impl == "local" else with_fp8
    faults = {
        "gdn_norm_out": "for gated delta nets, which are as the command has them",
        "layernorm": in_place,
        # Its checkpoint returns the bias itself, whose backward then does not end (transformer_layer.py).
        "mlp": None if "no_linear_bias" in features else "needs --disable-bias-linear",
        "moe_act": with_fp8 if is_grouped else "needs --moe-grouped-gemm",
        "mla_up_proj": None if "multi_latent_attention" in features else "needs --multi-latent-attention",
        "moe": _moe_fault(context),
    }
    if "moe" not in features:
        faults["moe"] = faults["moe_act"] = faults["shared_experts"] = "the model has no experts"
    elif experts is not None and not experts.shared_ffn_hidden_size:
        faults["shared_experts"] = "the model has no shared expert"
    elif context.is_on("moe_shared_expert_overlap", feature="moe_shared_expert_overlap"):
        faults["shared_experts"] = "not supported with --moe-shared-expert-overlap"
    return next((f"{name}: {fault}" for name in modules_of(text) if (fault := faults.get(name))), None)


def _moe_fault(context: KnobContext) -> str | None:
    """Why the experts of a layer are not repeated whole; None where they can be."""
    if context.is_on("overlap_moe_expert_parallel_comm", feature="overlap_moe"):
        return "not supported with overlap of expert communication"
    offloaded = offload_modules_of(str(context.setting("offload_modules") or NONE))
    inside = next((name for name in ("expert_fc1", "fused_group_mlp", "moe_act") if name in offloaded), None)
    return None if inside is None else f"not supported with offloading of {inside}"


RECOMPUTE = LayoutKnob(
    name="recompute",
    label="recompute",
    meaning="activations computed again in the backward: none, selective (modules of a layer) or full",
    kind="word",
    words=MODES,
    axis=Axis.RECOMPUTE,
    change_class="A",
    rule="not with offloading of layers or CUDA graphs; not full with overlap of expert communication, or "
    "beside modules that the command offloads "
    "(megatron/core/transformer/transformer_config.py)",
    flag="--recompute-granularity",
    default="stock",
    offers=_offers,
    fault=_fault,
    kept=recompute_kept,
    read_back=lambda live: live.model.recompute_granularity or "none",
    framework=MEGATRON.framework,
)
