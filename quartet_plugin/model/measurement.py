"""Measurements and predictions of plans with their spread, and how much a search may have missed."""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.schema import ADDED, Bounds, Length, read_record, record

MAX_REGRET_BYTES = 1 << 20
# A gain that another search would be made for.
NOTABLE = 0.02

_Share = Annotated[float, Bounds(ge=0.0, le=1.0)]
_Words = Annotated[str, Length(most=2_000)]

Objective = Literal["tokens_per_s", "model_flops_per_s_per_device"]


@record
class Interval:
    """A median and its interval: 95 %, of the seconds of five launches or fewer their whole range."""

    median: float
    low: float
    high: float


@record
class Measurement:
    """Iterations of one plan. `iteration_s` is seconds per iteration, over all measured launches."""

    iteration_s: Interval
    tokens_per_s: float
    model_flops_per_s_per_device: float
    peak_memory_bytes: int
    num_launches: int
    num_iterations: int


@record
class FinalChoice:
    """The choice of the winner among the finalists, and its certainty.

    `rule` is the rule in words. `runner_up` is the trial of the next finalist, None where there is no other.
    `gain` is the winner's objective over the runner-up's, the median over the `num_rounds` rounds that both
    were measured in, `chance_better` the probability that the winner is the faster; where they share too few
    rounds, `gain` compares their speedups and `chance_better` is None. `is_runner_up_win` is whether
    the runner-up could have won, `is_runner_up_other_model` whether it has another shape than the user's own,
    `is_only_runner_up_custom` whether the plugin's runtime executes it and the framework's own the winner.
    `proof_level` is the largest significance level at which the sequential test would have proven the
    runner-up then; None where it was proven, and in files of earlier releases. `selection` says which trials
    went to the final rounds, by what, and which came next; None in files of earlier releases.
    """

    rule: _Words
    runner_up: Annotated[int, Bounds(ge=0, le=10**9)] | None = None
    gain: Annotated[float, Bounds(gt=0.0)] | None = None
    chance_better: _Share | None = None
    num_rounds: Annotated[int, Bounds(ge=0, le=10**9)] = 0
    is_runner_up_win: bool = False
    is_runner_up_other_model: bool = False
    is_only_runner_up_custom: bool = field(default=False, metadata=ADDED)
    proof_level: _Share | None = field(default=None, metadata=ADDED)
    selection: _Words | None = field(default=None, metadata=ADDED)


@record
class Comparison:
    """A plan against the user's configuration, measured in turns; `speedup` is of the objective.

    `choice` goes with a winner: how it was chosen among the plans that were measured so. `confidence` is that
    of the speedup's interval; None in files of earlier releases, whose interval is a bootstrap's.
    `round_ratios` are the speedups of the rounds in their order; empty in files of earlier releases.
    """

    objective: Objective
    plan: Measurement
    baseline: Measurement
    speedup: Interval
    choice: FinalChoice | None = field(default=None, metadata=ADDED)
    confidence: _Share | None = field(default=None, metadata=ADDED)
    round_ratios: tuple[Annotated[float, Bounds(gt=0.0)], ...] = field(default=(), metadata=ADDED)


@record
class Prediction:
    """The cost model's prediction before anything ran."""

    iteration_s: float | None
    relative_cost: float | None
    peak_memory_bytes: int | None


@record
class Regret:
    """What the search may have missed, relative to the winner's objective (0.02: 2 % more of it).

    `gain` is the median of the estimate and its 95 % interval; where the search ended without a winner, over
    the user's configuration. `notable` is the probability of more than NOTABLE. `likely` is the untried
    plan that is most often the best, `likely_chance` how often; None where every plan was tried.
    `num_untried` plans were looked at, predicted from `num_measured`; `source` says by what.
    """

    gain: Interval
    notable: _Share
    likely: _Words | None
    likely_chance: _Share
    num_untried: Annotated[int, Bounds(ge=0, le=10**9)]
    num_measured: Annotated[int, Bounds(ge=0, le=10**9)]
    source: Literal["calibrated cost model", "measured trials", "every plan was tried"]
    schema_version: Literal[1] = 1

    def __post_init__(self) -> None:
        if not 0.0 <= self.gain.low <= self.gain.median <= self.gain.high < float("inf"):
            raise ConfigError(
                f"gain: {self.gain.median} ({self.gain.low} to {self.gain.high}); "
                "0 <= low <= median <= high is needed"
            )


def read_regret(path: Path) -> Regret:
    """Read an estimate. Raises ConfigError in one line: the field, the value and the rule."""
    return read_record(Regret, path, max_bytes=MAX_REGRET_BYTES)
