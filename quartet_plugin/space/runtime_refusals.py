"""Megatron's arguments that a custom schedule cannot run with: what makes the runtime step aside.

The runtime asks it in every process, RANK 0 reports what it says of the user's own words, and the space, the
dry run and `train --schedule` keep Megatron's schedules by it. Where an argument is on, the rest of a plan
still applies.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


def _is_set(value: Any) -> bool:
    return value is not None


def _is_above_one(value: Any) -> bool:
    return value is not None and value > 1


@dataclass(frozen=True, slots=True)
class Refused:
    """A feature: its argument, why it does not go with a custom schedule, and whether a value turns it on.

    `alias` is the option's name where it is not the argument's. `is_flag_only`: a model's configuration has
    an attribute of the same name with another meaning.
    """

    dest: str
    reason: str
    is_on: Callable[[Any], bool] = bool
    alias: str | None = None
    is_flag_only: bool = False

    @property
    def flag(self) -> str:
        """The option that turns the feature on."""
        return f"--{(self.alias or self.dest).replace('_', '-')}"


_CAPTURED = "CUDA graphs are captured in the order of Megatron's schedule"
_SEPARATE_SCHEDULE = "it runs through a schedule of its own"
_NOT_BY_STAGE = "parameters are not held by stages"
_NO_STAGES = "the stages are not given; use --hybrid-layer-pattern"
_CHUNK_ORDER = "it expects Megatron's own order of chunks"
_GATHERED = "weights are gathered in Megatron's own order"
_SHARDS = "tensor_parallel_num_weight_shards"

# Why every backward of such a job is a full one.
GROUPED_EXPERTS = (
    "--num-experts: backwards are not split, because delayed gradients of Transformer Engine's grouped "
    "experts were not tried"
)

STATE_SPACE = (
    "--hybrid-layer-pattern: backwards are not split, because delayed gradients of Transformer Engine's "
    "state-space layers were not tried"
)

REFUSED = (
    Refused("cuda_graph_impl", _CAPTURED, lambda value: value not in (None, "none")),
    Refused("enable_cuda_graph", _CAPTURED),
    Refused("external_cuda_graph", _CAPTURED),
    Refused("overlap_moe_expert_parallel_comm", _SEPARATE_SCHEDULE),
    Refused("delay_wgrad_compute", _SEPARATE_SCHEDULE),
    Refused("use_megatron_fsdp", _NOT_BY_STAGE),
    Refused("use_torch_fsdp2", _NOT_BY_STAGE),
    Refused("hybrid_context_parallel", _SEPARATE_SCHEDULE),
    Refused("hybrid_override_pattern", _NO_STAGES),
    Refused("variable_seq_lengths", "the shapes of boundary tensors are not known beforehand"),
    Refused(
        "defer_embedding_wgrad_compute",
        "it computes the deferred embedding gradients at the end of Megatron's schedule",
    ),
    Refused("overlap_param_gather_with_optimizer_step", _CHUNK_ORDER),
    Refused("fine_grained_activation_offloading", _CHUNK_ORDER),
    Refused("cpu_offloading_num_layers", _CHUNK_ORDER),
    Refused("gtp_weight_remat_size", _GATHERED, _is_above_one, alias=_SHARDS),
    Refused("expert_gtp_weight_remat_size", _GATHERED, _is_above_one, alias=f"expert_{_SHARDS}"),
    # Megatron derives the two sizes above from these when it validates its arguments.
    Refused(_SHARDS, _GATHERED, _is_set, is_flag_only=True),
    Refused(f"expert_{_SHARDS}", _GATHERED, _is_set, is_flag_only=True),
    Refused(
        "moe_expert_rank_capacity_factor",
        "it may repeat a step from its stash, which custom schedules do not support",
        _is_set,
    ),
    Refused("moe_paged_stash", "its activation stash assumes Megatron's schedule"),
    Refused(
        "num_distributed_optimizer_instances",
        "its two-step gradient reduction is untested with custom schedules",
        _is_above_one,
    ),
    Refused("optimizer", "layer-wise optimizers were not tried with it", lambda value: "muon" in str(value)),
    Refused(
        "num_microbatches_with_partial_activation_checkpoints",
        "it counts the microbatches of Megatron's own order",
        _is_set,
    ),
    Refused(
        "init_model_with_meta_device",
        "weights are created after the model is built, which custom schedules do not support",
    ),
    Refused("perform_rl_step", _SEPARATE_SCHEDULE),
    Refused("inprocess_restart", "process groups for custom schedules are not recreated after a restart"),
)


def engine_layers_refusal(*, has_experts: bool, has_state_space: bool) -> str | None:
    """Why backwards of Transformer Engine's layers are full ones; None where they may be split."""
    if has_experts:
        return GROUPED_EXPERTS
    return STATE_SPACE if has_state_space else None


def refusal(args: Namespace) -> str | None:
    """Why a custom schedule cannot run with these arguments, in one line; None where it can."""
    return first_refused(REFUSED, args)


def refusal_to_compare(args: Namespace) -> str | None:
    """Why a trial with these arguments keeps no weights to compare; stages of its own do not matter there."""
    return first_refused((feature for feature in REFUSED if feature.reason != _NO_STAGES), args)


def refusal_of_model(config: Any) -> str | None:
    """Why a custom schedule cannot run with a model's configuration, which a script may have made itself."""
    return first_refused((feature for feature in REFUSED if not feature.is_flag_only), config)


def first_refused(features: Iterable[Refused], args: Any) -> str | None:
    """Why the first of these features that is on does not go; None where all are off."""
    for feature in features:
        value = getattr(args, feature.dest, None)
        if value is not None and feature.is_on(value):
            return f"{feature.flag}: {feature.reason}"
    return None
