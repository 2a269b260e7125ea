"""What was measured and what was predicted, with their spread."""

from dataclasses import dataclass
from typing import ClassVar, Literal

_STRICT: dict[str, object] = {"extra": "forbid", "strict": True}

Objective = Literal["tokens_per_s", "model_flops_per_s_per_device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A median and its 95 % interval."""

    __pydantic_config__: ClassVar[dict[str, object]] = _STRICT

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Iterations of one plan. `iteration_s` is seconds an iteration, over all measured launches."""

    __pydantic_config__: ClassVar[dict[str, object]] = _STRICT

    iteration_s: Interval
    tokens_per_s: float
    model_flops_per_s_per_device: float
    peak_memory_bytes: int
    num_launches: int
    num_iterations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A plan against the user's own configuration, measured in turns; `speedup` is of the objective."""

    __pydantic_config__: ClassVar[dict[str, object]] = _STRICT

    objective: Objective
    plan: Measurement
    baseline: Measurement
    speedup: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model said before anything ran."""

    __pydantic_config__: ClassVar[dict[str, object]] = _STRICT

    iteration_s: float | None
    relative_cost: float | None
    peak_memory_bytes: int | None
