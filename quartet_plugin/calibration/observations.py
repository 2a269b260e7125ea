"""Measured times: observations of a run for calibration, a trial's actions, and the noise of launches.

Two launches of one plan lie about as far apart as the iterations inside each: in 25 searches on two shared
cores 8.9 against 7.8 % (`python -m benchmarks.launch_noise`), since what moves iterations there lasts longer
than a launch. So a launch of many iterations is less sure than their number suggests.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.errors import ConfigError, QuartetError
from quartet_plugin.model.trial_record import TrialRecord

# The directions of an action's kind: forward, input gradient, weight gradient.
_DIRECTIONS: dict[str, tuple[int, ...]] = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}
_NORMAL_MAD = 1.4826
# The least relative deviation of launches; it is also the prior, which weighs as many iterations.
LEAST_NOISE = 0.02
_PRIOR_ITERATIONS = 4


class Quantity(StrEnum):
    """A measured quantity: an iteration, a stage's action, or a part of the model for a microbatch or a step.

    `layer` is a dense one, `expert_layer` one with experts. `gradients` is their reduction at the end of a
    step, where nothing hides it; `overhead` the rest of a step beside forwards, backwards and the optimizer.
    """

    ITERATION = "iteration"
    STAGE = "stage"
    LAYER = "layer"
    EXPERT_LAYER = "expert_layer"
    EMBEDDING = "embedding"
    HEAD = "head"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    OVERHEAD = "overhead"

    @property
    def has_direction(self) -> bool:
        """Whether the quantity is a part of the model, computed forwards and backwards."""
        layers = (Quantity.LAYER, Quantity.EXPERT_LAYER)
        return self in (Quantity.STAGE, *layers, Quantity.EMBEDDING, Quantity.HEAD)


class Direction(StrEnum):
    """One of a part's computations."""

    FORWARD = "forward"
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Measured seconds of a run, or of one part of it; `spread` is their relative noise.

    `index` is the stage of a `stage`, the pipeline rank of an `optimizer` or an `overhead`. `is_single_rank`:
    a rank of a larger world was run by itself, without communication. Raises ConfigError for seconds,
    spreads and directions that cannot be.
    """

    run: TrainingRun
    seconds: float
    spread: float
    quantity: Quantity = Quantity.ITERATION
    direction: Direction | None = None
    index: int = 0
    is_single_rank: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ConfigError(f"measured {self.quantity}: {self.seconds} s; must be above 0")
        if not (math.isfinite(self.spread) and self.spread > 0):
            raise ConfigError(f"measured {self.quantity}: spread {self.spread}; must be above 0")
        if self.quantity.has_direction != (self.direction is not None):
            raise ConfigError(
                f"measured {self.quantity}: direction {self.direction}; parts have one, steps have none"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAction:
    """The median seconds of a stage's actions of one kind; `directions`: 0 forward, 1 input, 2 weight."""

    stage: int
    directions: tuple[int, ...]
    seconds: float


def action_times(folder: Path, *, attempt_id: str) -> tuple[MeasuredAction, ...]:
    """The action times that an attempt recorded in its trial's folder; none where it recorded none.

    Only custom schedules leave records; a file that breaks its format is left out.
    """
    from quartet_plugin.protocol.rank_files import read_actions, seconds_by_stage

    if not attempt_id or not folder.is_dir():
        return ()
    for attempt in sorted(folder.glob("attempt-*")):
        try:
            records = read_actions(attempt)
        except QuartetError:
            continue
        if records[0].attempt_id != attempt_id:
            continue
        return tuple(
            MeasuredAction(stage=stage, directions=_DIRECTIONS[kind], seconds=middle)
            for (stage, kind), times in sorted(seconds_by_stage(records).items())
            if (middle := statistics.median(times)) > 0
        )
    return ()


def spread_of(iteration_s: Sequence[float]) -> float:
    """The robust standard error of the median of a launch's iterations, relative."""
    middle = statistics.median(iteration_s)
    deviation = statistics.median(abs(seconds - middle) for seconds in iteration_s) * _NORMAL_MAD
    return float(deviation / middle / len(iteration_s) ** 0.5)


def launch_noise(trials: Iterable[TrialRecord]) -> float:
    """The relative deviation of a launch's median, pooled over measured trials; at least LEAST_NOISE.

    A trial's `spread` is the robust standard error of its iterations.
    """
    squares, num = _PRIOR_ITERATIONS * LEAST_NOISE**2, float(_PRIOR_ITERATIONS)
    for record in trials:
        if record.spread is not None and record.num_iterations:
            squares += record.num_iterations * (record.spread**2 * record.num_iterations)
            num += record.num_iterations
    return max(LEAST_NOISE, math.sqrt(squares / num))
