"""The winner of trials with fewer replicas as it is at full size: predicted, and measured where it was."""

from dataclasses import field
from typing import Annotated, Literal

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.measurement import Interval
from quartet_plugin.model.schema import Bounds, Length, record

_Count = Annotated[int, Bounds(ge=1, le=10**6)]
_Words = Annotated[str, Length(most=2_000)]
_Seconds = Annotated[float, Bounds(gt=0.0, lt=1e10)]


@record
class Confirmation:
    """The comparison at full size: seconds per iteration in each round, of the plan and of the baseline."""

    iteration_s: Annotated[tuple[_Seconds, ...], Length(least=1, most=1_000)]
    baseline_iteration_s: Annotated[tuple[_Seconds, ...], Length(least=1, most=1_000)]
    speedup: _Seconds


@record
class FullSize:
    """The predictions for `num_nodes` nodes from trials of `num_trial_nodes`, with their 95 % intervals.

    `iteration_s` and `baseline_iteration_s` are seconds per iteration, `speedup` is of the objective.
    `confirmation` is None where nothing was measured at full size, for the reason `unconfirmed`.
    """

    num_nodes: _Count
    num_trial_nodes: _Count
    iteration_s: Interval
    baseline_iteration_s: Interval
    speedup: Interval
    confirmation: Confirmation | None = None
    unconfirmed: _Words = field(default="")
    schema_version: Literal[1] = 1

    def __post_init__(self) -> None:
        if (self.confirmation is None) != bool(self.unconfirmed):
            raise ConfigError("unconfirmed: must be set if and only if `confirmation` is missing")
