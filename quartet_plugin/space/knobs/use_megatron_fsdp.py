"""Megatron-FSDP: parameters, gradients and optimizer state are sharded over data-parallel ranks."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import STOCK
from quartet_plugin.model.releases import release_of
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.cuda_graph_modules import CUDA_GRAPH_MODULES
from quartet_plugin.space.knobs.ddp_bucket_size import DDP_BUCKET_SIZE
from quartet_plugin.space.knobs.expert_overlap import DELAYED_WEIGHT_GRADIENTS, EXPERT_OVERLAP
from quartet_plugin.space.knobs.knob import (
    KnobContext,
    KnobRules,
    SettingKnob,
    Value,
    has_copies,
    kept_fault,
    off_and_on,
)
from quartet_plugin.space.knobs.offload_modules import OFFLOAD_MODULES
from quartet_plugin.space.knobs.optimizer_cpu_offload import OPTIMIZER_CPU_OFFLOAD
from quartet_plugin.space.knobs.optimizer_offload_fraction import OPTIMIZER_OFFLOAD_FRACTION
from quartet_plugin.space.knobs.overlap_grad_reduce import OVERLAP_GRAD_REDUCE
from quartet_plugin.space.knobs.overlap_param_gather import OVERLAP_PARAM_GATHER
from quartet_plugin.space.knobs.tensor_partition import TENSOR_PARTITION

NAME = "use_megatron_fsdp"
STRATEGY = "data_parallel_sharding_strategy"
# The strategy that shards the parameters, too; a plan has no other.
SHARDS_ALL = "optim_grads_params"
# The format of checkpoints that Megatron asserts with the switch, and refuses without it.
_CHECKPOINT_FORMAT = "fsdp_dtensor"
# The release whose rules were read; older ones were not tried.
_LEAST = Version("0.19")
# Features beside which the command's value is kept: Megatron refuses them together (training/arguments.py:
# PyTorch's FSDP, hybrid context parallelism, other optimizers), they hold parameters, state or buffers in a
# way of their own, or the two were not tried together. Each value loads only checkpoints of its formats.
BOUND = (
    *("torch_fsdp", "hybrid_context_parallel", "emerging_optimizer", "distributed_optimizer_instances"),
    *("weight_shards", "precision_aware_optimizer", "fp8_param_gather", "fp4", "cpu_offload"),
    *("activation_offload", "cuda_graphs", "overlap_moe", "tp_comm_overlap", "step_param_gather"),
    *("inprocess_restart", "local_checkpoint_replication", "heterogeneous", "meta_init", "fsdp_bound"),
)
# Settings of which a plan that turns it on or off keeps the command's value: sharded gradients and parameters
# are reduced and gathered beside the computation whatever the flags say.
_BESIDE = (
    EXPERT_OVERLAP,
    DELAYED_WEIGHT_GRADIENTS,
    CUDA_GRAPH_MODULES,
    OVERLAP_GRAD_REDUCE,
    OVERLAP_PARAM_GATHER,
    DDP_BUCKET_SIZE,
    OPTIMIZER_CPU_OFFLOAD,
    OPTIMIZER_OFFLOAD_FRACTION,
    OFFLOAD_MODULES,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardingKnob(SettingKnob):
    """A switch that is on with one strategy of sharding alone, and comes with a format of checkpoints."""

    def read(self, args: Namespace) -> Value | None:
        """The value in Megatron's arguments; None with another strategy, or in a release without it."""
        if not hasattr(args, NAME) or not hasattr(args, STRATEGY):
            return None
        return switch_value(is_on=bool(getattr(args, NAME)), strategy=getattr(args, STRATEGY))

    def arguments(self, value: Value) -> dict[str, Any]:
        """Megatron's arguments for a value, by name; None for one that is left out.

        Gradients are summed in fp32, as without the switch: its default is the precision of the weights
        (megatron/core/distributed/distributed_data_parallel_config.py).
        """
        if value:
            return {
                NAME: True,
                STRATEGY: SHARDS_ALL,
                "ckpt_format": _CHECKPOINT_FORMAT,
                "megatron_fsdp_main_grads_dtype": "fp32",
            }
        # Megatron takes the distributed optimizer for granted with the switch, and not without it.
        return {NAME: None, "ckpt_format": None, "use_distributed_optimizer": True}


def switch_value(*, is_on: bool, strategy: Any) -> bool | None:
    """Whether parameters are sharded; None where Megatron-FSDP shards by another strategy."""
    return (True if strategy == SHARDS_ALL else None) if is_on else False


def saved_weights_refusal(layout: Layout) -> str | None:
    """Why a plan cannot start from weights that the command's training saved; None where it can."""
    if layout.setting(NAME) is None:
        return None
    return (
        f"the plan turns Megatron-FSDP on or off, and {_CHECKPOINT_FORMAT} checkpoints load only with "
        "Megatron-FSDP on"
    )


def _kept(rules: KnobRules) -> str | None:
    job = rules.job
    if job.layer_impl == "local":
        return "it gathers on streams of a GPU; needs --transformer-impl transformer_engine, which no CPU has"
    if "fsdp" in job.features and job.setting(NAME) is not True:
        return f"the command did not report --data-parallel-sharding-strategy {SHARDS_ALL}"
    if job.precision != "bf16":
        return f"not tried in {job.precision}"
    if release_of(job.framework_version) < _LEAST:
        return f"needs Megatron {_LEAST}; older releases were not tried"
    return next((name for name in BOUND if name in job.features), None)


def _fault(value: Value, context: KnobContext) -> str | None:
    rules, layout = context.rules, context.layout
    command = rules.job.setting(NAME) is True
    if kept := kept_fault(value, command, _kept(rules)):
        return kept
    if value == command:
        return None
    if layout.pipeline_parallel > 1:
        return "needs PP 1"
    if not layout.distributed_optimizer:
        return "needs distributed_optimizer"
    if rules.search.requested(TENSOR_PARTITION.name) != (STOCK,):
        return f"not beside a search of {TENSOR_PARTITION.name}"
    names = (knob.name for knob in _BESIDE)
    other = next((name for name in names if context.setting(name) != rules.job.setting(name)), None)
    return None if other is None else f"needs the command's own {other}"


USE_MEGATRON_FSDP = _ShardingKnob(
    name=NAME,
    label=NAME,
    meaning="Megatron-FSDP: parameters, gradients and optimizer state are sharded over data-parallel ranks",
    kind="switch",
    axis=Axis.OPTIONS,
    change_class="B",
    rule="needs PP 1 (megatron/core/distributed/fsdp/mcore_fsdp_adapter.py), more than one data-parallel "
    "rank (DP x CP), distributed_optimizer, bf16, Transformer Engine's layers, Megatron 0.19 or later and a "
    "GPU (megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py); the plan writes --ckpt-format "
    "fsdp_dtensor (megatron/training/arguments.py); overlaps, buckets, graphs and offloading keep the "
    "command's values, and tensor_partition is not searched; the command's value is kept with PyTorch's "
    "FSDP, sharded weights, several optimizer instances, offloading, CUDA graphs, overlap of TP or of "
    "experts, the precision-aware optimizer, optimizers other than adam and sgd, and flags that either "
    "value refuses",
    flag="--use-megatron-fsdp",
    destination=NAME,
    needs_gpu=True,
    default="stock",
    offers=off_and_on,
    fault=_fault,
    kept=_kept,
    read_back=lambda live: live.shards_parameters,
    framework=MEGATRON.framework,
    applies=has_copies,
)
