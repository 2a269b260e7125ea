"""Features that our schedule does not go with, each by its flag.

Where one is on, Megatron's own schedule stays and the rest of the plan still applies.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A feature: the argument, when it counts as on, and why it does not go with our schedule."""

    dest: str
    flag: str
    reason: str
    is_on: Callable[[Any], bool] = bool


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
        flag="--gtp-weight-remat-size",
        reason="weights are gathered in Megatron's own order",
        is_on=_above_one,
    ),
    Refused(
        dest="expert_gtp_weight_remat_size",
        flag="--expert-gtp-weight-remat-size",
        reason="weights are gathered in Megatron's own order",
        is_on=_above_one,
    ),
    Refused(
        dest="moe_expert_rank_capacity_factor",
        flag="--moe-expert-rank-capacity-factor",
        reason="it may run a step twice through a stash of its own",
        is_on=lambda value: value is not None,
    ),
    Refused(dest="moe_paged_stash", flag="--moe-paged-stash", reason="it has a stash of its own"),
    Refused(dest="flextron", flag="--flextron", reason=_OWN_PATH),
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
    Refused(
        dest="modelopt_enabled", flag="--modelopt-enabled", reason="it adjusts the shapes of boundary tensors"
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
    for feature in REFUSED:
        value = getattr(args, feature.dest, None)
        if value is not None and feature.is_on(value):
            return f"{feature.flag}: {feature.reason}"
    return None


def needs_whole_backwards(args: Namespace) -> str | None:
    """Why every stage's backward must stay in one piece, in one line; None where it may be split.

    Full recomputation would keep all recomputed inputs until W, which undoes it. Expert layers and
    Transformer Engine's layers do not pass through the function that is split.
    """
    if getattr(args, "recompute_granularity", None) == "full":
        return "--recompute-granularity full: backwards are not split, or what is recomputed would be kept"
    if getattr(args, "num_experts", None):
        return "--num-experts: backwards are not split, because expert layers cannot be"
    if getattr(args, "transformer_impl", "local") != "local":
        return "--transformer-impl: backwards are not split with layers other than Megatron's local ones"
    return None
