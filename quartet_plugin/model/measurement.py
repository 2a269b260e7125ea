"""Measurements and predictions of plans, with their spread."""

from typing import Literal

from quartet_plugin.model.schema import record

Objective = Literal["tokens_per_s", "model_flops_per_s_per_device"]


@record
class Interval:
    """A median and its 95 % interval."""

    median: float
    low: float
    high: float


@record
class Measurement:
    """Iterations of one plan. `iteration_s` is seconds an iteration, over all measured launches."""

    iteration_s: Interval
    tokens_per_s: float
    model_flops_per_s_per_device: float
    peak_memory_bytes: int
    num_launches: int
    num_iterations: int


@record
class Comparison:
    """A plan against the user's own configuration, measured in turns; `speedup` is of the objective."""

    objective: Objective
    plan: Measurement
    baseline: Measurement
    speedup: Interval


@record
class Prediction:
    """The cost model's prediction before anything ran."""

    iteration_s: float | None
    relative_cost: float | None
    peak_memory_bytes: int | None
