"""Features that our schedule does not go with, each by its flag.

Where one is on, Megatron's own schedule stays and the rest of the plan still applies.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from quartet_plugin.megatron.te_layers import obstacle


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A feature: the argument, when it counts as on, and why it does not go with our schedule.

    `is_flag_only`: a model's configuration has a value of the same name that says something else.
    """

    dest: str
    flag: str
    reason: str
    is_on: Callable[[Any], bool] = bool
    is_flag_only: bool = False


def _above_one(value: Any) -> bool:
    return value is not None and value > 1


_CAPTURED = "the captured order is Megatron's own"
_OWN_PATH = "it runs through a schedule of its own"
_BY_STAGE = "parameters are not held by stages"

REFUSED = (
    Refused(
        dest="cuda_graph_impl",
        flag="--cuda-graph-impl",
        reason=_CAPTURED,
        is_on=lambda value: value not in (None, "none"),
    ),
    Refused(dest="enable_cuda_graph", flag="--enable-cuda-graph", reason=_CAPTURED),
    Refused(dest="external_cuda_graph", flag="--external-cuda-graph", reason=_CAPTURED),
    Refused(
        dest="overlap_moe_expert_parallel_comm", flag="--overlap-moe-expert-parallel-comm", reason=_OWN_PATH
    ),
    Refused(dest="delay_wgrad_compute", flag="--delay-wgrad-compute", reason=_OWN_PATH),
    Refused(dest="use_megatron_fsdp", flag="--use-megatron-fsdp", reason=_BY_STAGE),
    Refused(dest="use_torch_fsdp2", flag="--use-torch-fsdp2", reason=_BY_STAGE),
    Refused(
        dest="mtp_num_layers", flag="--mtp-num-layers", reason="its layers are bound to Megatron's last stage"
    ),
    Refused(dest="hybrid_context_parallel", flag="--hybrid-context-parallel", reason=_OWN_PATH),
    Refused(dest="hybrid_layer_pattern", flag="--hybrid-layer-pattern", reason="it has a split of its own"),
    Refused(
        dest="hybrid_override_pattern", flag="--hybrid-override-pattern", reason="it has a split of its own"
    ),
    Refused(
        dest="variable_seq_lengths",
        flag="--variable-seq-lengths",
        reason="the shapes of boundary tensors are not known beforehand",
    ),
    Refused(
        dest="defer_embedding_wgrad_compute",
        flag="--defer-embedding-wgrad-compute",
        reason="it works off its queue at the end of Megatron's own order",
    ),
    Refused(
        dest="overlap_param_gather_with_optimizer_step",
        flag="--overlap-param-gather-with-optimizer-step",
        reason="it expects Megatron's own order of chunks",
    ),
    Refused(
        dest="fine_grained_activation_offloading",
        flag="--fine-grained-activation-offloading",
        reason="it expects Megatron's own order of chunks",
    ),
    Refused(
        dest="cpu_offloading_num_layers",
        flag="--cpu-offloading-num-layers",
        reason="it expects Megatron's own order of chunks",
    ),
    Refused(
        dest="gtp_weight_remat_size",
        flag="--tensor-parallel-num-weight-shards",
        reason="weights are gathered in Megatron's own order",
        is_on=_above_one,
    ),
    Refused(
        dest="expert_gtp_weight_remat_size",
        flag="--expert-tensor-parallel-num-weight-shards",
        reason="weights are gathered in Megatron's own order",
        is_on=_above_one,
    ),
    # What both are derived from when Megatron validates its arguments.
    Refused(
        dest="tensor_parallel_num_weight_shards",
        flag="--tensor-parallel-num-weight-shards",
        reason="weights are gathered in Megatron's own order",
        is_on=lambda value: value is not None,
        is_flag_only=True,
    ),
    Refused(
        dest="expert_tensor_parallel_num_weight_shards",
        flag="--expert-tensor-parallel-num-weight-shards",
        reason="weights are gathered in Megatron's own order",
        is_on=lambda value: value is not None,
        is_flag_only=True,
    ),
    Refused(
        dest="moe_expert_rank_capacity_factor",
        flag="--moe-expert-rank-capacity-factor",
        reason="it may run a step twice through a stash of its own",
        is_on=lambda value: value is not None,
    ),
    Refused(dest="moe_paged_stash", flag="--moe-paged-stash", reason="it has a stash of its own"),
    Refused(
        dest="num_distributed_optimizer_instances",
        flag="--num-distributed-optimizer-instances",
        reason="its reductions run in two rounds that this was not tried with",
        is_on=_above_one,
    ),
    Refused(
        dest="optimizer",
        flag="--optimizer",
        reason="layer-wise optimizers were not tried with it",
        is_on=lambda value: value is not None and "muon" in str(value),
    ),
    Refused(
        dest="num_microbatches_with_partial_activation_checkpoints",
        flag="--num-microbatches-with-partial-activation-checkpoints",
        reason="it counts the microbatches of Megatron's own order",
        is_on=lambda value: value is not None,
    ),
    Refused(
        dest="init_model_with_meta_device", flag="--init-model-with-meta-device", reason="weights come later"
    ),
    Refused(dest="perform_rl_step", flag="--perform-rl-step", reason=_OWN_PATH),
    Refused(
        dest="inprocess_restart",
        flag="--inprocess-restart",
        reason="process groups of the runtime would not be made again",
    ),
)


def refusal(args: Namespace) -> str | None:
    """Why our schedule cannot run with these arguments, in one line; None where it can."""
    return _first(REFUSED, args)


def refusal_of_model(config: Any) -> str | None:
    """The same of a model's configuration, which a script may have made by itself."""
    return _first((feature for feature in REFUSED if not feature.is_flag_only), config)


def _first(features: Iterable[Refused], args: Any) -> str | None:
    for feature in features:
        value = getattr(args, feature.dest, None)
        if value is not None and feature.is_on(value):
            return f"{feature.flag}: {feature.reason}"
    return None


def without_alignment(args: Namespace) -> dict[str, Any]:
    """What our order turns off, by destination; empty where it is not on.

    Megatron by default starts the reductions of all pipeline ranks together, counted in its own order; a
    weight gradient of ours may not be there yet. We start each chunk's when its last microbatch is through.
    Aligned parameter gathers stay: ours start together too, at the beginning of a step.
    """
    is_aligned = getattr(args, "overlap_grad_reduce", False) and getattr(args, "align_grad_reduce", False)
    return {"align_grad_reduce": False} if is_aligned else {}


def needs_whole_backwards(args: Namespace) -> str | None:
    """Why every stage's backward must stay in one piece, in one line; None where it may be split.

    Full recomputation would keep all recomputed inputs until W, which undoes it. Expert layers do not pass
    through the function that is split, and Transformer Engine's have a door of their own.
    """
    if getattr(args, "recompute_granularity", None) == "full":
        return "--recompute-granularity full: backwards are not split, or what is recomputed would be kept"
    if getattr(args, "num_experts", None):
        return "--num-experts: backwards are not split, because expert layers cannot be"
    layers = getattr(args, "transformer_impl", "local")
    if layers == "transformer_engine":
        return obstacle(args)
    if layers != "local":
        return "--transformer-impl: backwards are not split with such layers"
    return None
