"""Which axes a feature of the user's job keeps at stock. See docs/support.md for the whole table."""

from collections.abc import Iterable
from enum import StrEnum


class Axis(StrEnum):
    """What a plan can vary; the first four are the paper's, the others the parallel layout's."""

    SCALING = "scaling"
    SPLIT = "split"
    SCHEDULE = "schedule"
    MAPPING = "mapping"
    DEGREES = "degrees"
    MICRO_BATCH = "micro_batch"


_ALL = frozenset(Axis)
_DATA = frozenset({Axis.DEGREES, Axis.MICRO_BATCH})
_STAGES = frozenset({Axis.SPLIT, Axis.SCHEDULE, Axis.DEGREES})
_SCALING = frozenset({Axis.SCALING})
_MAPPING = frozenset({Axis.MAPPING})
_NONE: frozenset[Axis] = frozenset()

_LOCKS: dict[str, frozenset[Axis]] = {
    # Auxiliary losses and capacity are per microbatch and group (class C); experts bind ranks to nodes.
    "moe": _DATA | _SCALING | _MAPPING,
    "overlap_moe": _DATA | _STAGES | _SCALING | _MAPPING,
    # Layers that are not all alike, or not a list of layers at all.
    "mtp": _STAGES | _SCALING,
    "hybrid": _STAGES | _SCALING,
    "heterogeneous": _STAGES | _SCALING,
    "multi_latent_attention": _SCALING,
    "attention_variant": _SCALING | {Axis.SPLIT},
    # Token counts differ between microbatches: micro-batch and DP change the objective (class C).
    "packing": _DATA,
    # The number of microbatches changes while training; no plan can be applied.
    "rampup_batch_size": _ALL,
    # Parameters are sharded over devices instead of staged, or live elsewhere.
    "fsdp": _STAGES,
    "weight_shards": _STAGES | _MAPPING,
    "cpu_offload": _STAGES,
    # Ranks are taken for places, or in another order.
    "tp_comm_overlap": _MAPPING,
    "hierarchical_context_parallel": _MAPPING | {Axis.DEGREES},
    "distributed_optimizer_instances": _MAPPING | {Axis.DEGREES},
    "inprocess_restart": _MAPPING,
    "tp_pp_dp_order": _MAPPING,
    # Graphs are captured for one order of microbatches.
    "cuda_graphs": frozenset({Axis.SCHEDULE}),
    # DeepSpeed: the layers of the first device decide about clipping; the script batches its own data.
    "clips_by_first_stage": _STAGES,
    "own_data_iterator": _DATA,
    "tensor_parallel_topology": _ALL,
    "clips_in_fp32": _NONE,
    "dynamic_shape": _NONE,
    "per_token_loss": _NONE,
    "context_parallel": _NONE,
    "overlap_grad_reduce": _NONE,
    "overlap_param_gather": _NONE,
    "fp8": _NONE,
    "fp4": _NONE,
}

# With these on the plugin's own runtime steps aside and the framework's schedule runs: a plan of ours would
# measure something else than it says. Features that keep the whole axis are not repeated.
_WITHOUT_OWN_RUNTIME = frozenset(
    {"hierarchical_context_parallel", "distributed_optimizer_instances", "inprocess_restart"}
)


def no_own_schedules(features: Iterable[str]) -> str | None:
    """The feature that keeps schedules of ours out of this job; None where they can be tried."""
    found = sorted(_WITHOUT_OWN_RUNTIME & set(features))
    return found[0] if found else None


def locked_axes(features: Iterable[str]) -> dict[Axis, str]:
    """The axes that stay at stock, each with the feature that keeps it; an unknown feature keeps all."""
    locked: dict[Axis, str] = {}
    for feature in features:
        for axis in Axis:
            if axis in _LOCKS.get(feature, _ALL):
                locked.setdefault(axis, feature)
    return locked
