"""The score of a measured plan, and the record of a trial as the study keeps it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quartet_plugin.model.launch import DEPTH_PROXY
from quartet_plugin.model.measurement import Objective
from quartet_plugin.model.plan import Plan

Verdict = Literal["measured", "infeasible", "wrong", "lost"]
# A refused configuration is worse than any excess of memory, in bytes.
REFUSED_EXCESS = 2.0**50


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One plan's speed; `iteration_s` is the median seconds per iteration. Recomputation is not counted."""

    iteration_s: float
    tokens_per_s: float
    model_flops_per_s_per_device: float

    def value(self, objective: Objective, *, drift: float = 1.0) -> float:
        """The quantity that the study maximizes, for its objective.

        `drift` is the machine's speed over its speed when the baseline was measured: the value is as it would
        have been then.
        """
        rate = self.tokens_per_s if objective == "tokens_per_s" else self.model_flops_per_s_per_device
        return rate / drift


def speedup(value: float, *, baseline_value: float) -> float:
    """A plan's objective over the baseline's, both as when the baseline was measured: see `Score.value`."""
    return value / baseline_value


def score(plan: Plan, *, iteration_s: Sequence[float]) -> Score:
    """The score of `plan` from its measured iterations, at least one, all above 0 seconds."""
    return score_of_median(plan, iteration_s=statistics.median(iteration_s))


def score_of_median(plan: Plan, *, iteration_s: float) -> Score:
    """The score of `plan` when an iteration takes `iteration_s`."""
    sequences_per_s = plan.made_for.global_batch_size / iteration_s
    return Score(
        iteration_s=iteration_s,
        tokens_per_s=sequences_per_s * plan.made_for.tokens_per_sequence(plan.shape),
        model_flops_per_s_per_device=(
            sequences_per_s * plan.made_for.model_flops_per_sequence(plan.shape) / plan.made_for.world_size
        ),
    )


def objective_of(
    asked: Literal["auto", "tokens_per_s", "model_flops_per_s_per_device"], *, num_shapes: int
) -> Objective:
    """`auto` is tokens per second, or model FLOP/s per device where different models are compared."""
    if asked != "auto":
        return asked
    return "model_flops_per_s_per_device" if num_shapes > 1 else "tokens_per_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """The outcome and the measurement of a plan, as the study keeps them.

    `value` is the objective and there is one for `measured` alone. `wrong` plans computed something else and
    are never scored; `lost` ones could not be measured for reasons outside of them and cost no budget.
    `peak_memory_bytes` are the fullest rank's tensors, `untracked_memory_bytes` what its device held beside
    the allocator's pool (0: not counted).
    `excess` is above 0 where the plan does not fit: bytes, or REFUSED_EXCESS. `attempt_id` fences off old
    attempts; `repeats` is the number of the trial that measured the same plan before, or that had a plan of
    its kind quarantined. `num_iterations` were measured, `spread` is the relative standard error of their
    median; `predicted_s` an iteration was predicted to take, with `predicted_spread`, one standard deviation
    of its logarithm. Of a `DEPTH_PROXY` plan the model with fewer layers alone was measured: its times are
    predictions, as uncertain as `spread` says, and it cannot win. `drift` is how fast the machine was then,
    over the baseline's own measurement: `value` is divided by it, times and rates are as they were measured.
    `is_cut`: the trial ended early, since the plan was clearly slower than the best; it cannot win.
    `node_slowdowns` are the nodes that computed slower than the others in it, by host; None for none.
    """

    verdict: Verdict
    outcome: str
    reason: str
    attempt_id: str
    value: float | None = None
    excess: float = 0.0
    iteration_s: float | None = None
    tokens_per_s: float | None = None
    model_flops_per_s_per_device: float | None = None
    peak_memory_bytes: int = 0
    untracked_memory_bytes: int = 0
    wall_s: float = 0.0
    repeats: int | None = None
    source: str | None = None
    num_iterations: int | None = None
    spread: float | None = None
    drift: float = 1.0
    predicted_s: float | None = None
    predicted_spread: float | None = None
    is_cut: bool = False
    node_slowdowns: dict[str, float] | None = None

    @property
    def is_depth_proxy(self) -> bool:
        """Whether its whole model was never launched."""
        return self.outcome == DEPTH_PROXY

    def scored(self, score: Score, *, objective: Objective) -> "TrialRecord":
        """The record with the plan's score; `value` is corrected by `drift`."""
        return replace(
            self,
            value=score.value(objective, drift=self.drift),
            iteration_s=score.iteration_s,
            tokens_per_s=score.tokens_per_s,
            model_flops_per_s_per_device=score.model_flops_per_s_per_device,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTrial:
    """A trial whose record the study holds."""

    number: int
    plan: Plan
    record: TrialRecord

    @property
    def is_spent(self) -> bool:
        """Whether it used up one of the study's trials; the baseline, number 0, did not."""
        is_first = self.record.repeats is None and self.record.source is None
        return self.number != 0 and is_first and self.record.verdict != "lost"
