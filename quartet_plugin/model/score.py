"""The score of a measured plan: tokens per second, or model FLOP/s per device when shapes differ."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quartet_plugin.model.measurement import Objective
from quartet_plugin.model.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One plan's speed; `iteration_s` is the median seconds an iteration. Recomputation is not counted."""

    iteration_s: float
    tokens_per_s: float
    model_flops_per_s_per_device: float

    def value(self, objective: Objective) -> float:
        """The quantity that the study maximizes, for its objective."""
        return self.tokens_per_s if objective == "tokens_per_s" else self.model_flops_per_s_per_device


def score(plan: Plan, *, iteration_s: Sequence[float]) -> Score:
    """The score of `plan` from its measured iterations, at least one, all above 0 seconds."""
    return score_of_median(plan, iteration_s=statistics.median(iteration_s))


def score_of_median(plan: Plan, *, iteration_s: float) -> Score:
    """The score of `plan` when an iteration takes `iteration_s`."""
    sequences_per_s = plan.made_for.global_batch_size / iteration_s
    return Score(
        iteration_s=iteration_s,
        tokens_per_s=sequences_per_s * plan.shape.seq_length,
        model_flops_per_s_per_device=(
            sequences_per_s * plan.shape.model_flops_per_sequence / plan.made_for.world_size
        ),
    )


def objective_of(
    asked: Literal["auto", "tokens_per_s", "model_flops_per_s_per_device"], *, num_shapes: int
) -> Objective:
    """`auto` is tokens per second, or model FLOP/s per device where different models are compared."""
    if asked != "auto":
        return asked
    return "model_flops_per_s_per_device" if num_shapes > 1 else "tokens_per_s"
