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

# Features that are known to limit nothing here are listed with an empty set.
_LOCKS: dict[str, frozenset[Axis]] = {
    # Number of microbatches changes while training: only what does not depend on it.
    "rampup_batch_size": frozenset({Axis.SCHEDULE, Axis.DEGREES, Axis.MICRO_BATCH}),
    # Auxiliary losses and capacity are per microbatch and group (class C), experts bind ranks to nodes.
    "moe": frozenset({Axis.SCALING, Axis.DEGREES, Axis.MICRO_BATCH, Axis.MAPPING}),
    "expert_parallel": frozenset({Axis.SCALING, Axis.DEGREES, Axis.MICRO_BATCH, Axis.MAPPING}),
    # Extra layers after the last one follow rules of their own.
    "mtp": frozenset({Axis.SCALING, Axis.SPLIT, Axis.DEGREES, Axis.SCHEDULE}),
    # The split is a pattern of its own.
    "hybrid": frozenset({Axis.SCALING, Axis.SPLIT, Axis.DEGREES, Axis.SCHEDULE}),
    # Token counts differ between microbatches: micro-batch and DP change the objective (class C).
    "packing": frozenset({Axis.DEGREES, Axis.MICRO_BATCH}),
    "variable_tokens": frozenset({Axis.DEGREES, Axis.MICRO_BATCH}),
    "cyclic_dataloader": frozenset({Axis.DEGREES, Axis.MICRO_BATCH}),
    # Parameters are sharded instead of staged.
    "fsdp": frozenset({Axis.SPLIT, Axis.SCHEDULE, Axis.DEGREES}),
    "context_parallel": frozenset(),
    "sequence_parallel": frozenset(),
    "distributed_optimizer": frozenset(),
    "recompute": frozenset(),
    "fp8": frozenset(),
}


def locked_axes(features: Iterable[str]) -> dict[Axis, str]:
    """The axes that stay at stock, each with the feature that keeps it; an unknown feature keeps all."""
    locked: dict[Axis, str] = {}
    for feature in features:
        for axis in Axis:
            if axis in _LOCKS.get(feature, _ALL):
                locked.setdefault(axis, feature)
    return locked
