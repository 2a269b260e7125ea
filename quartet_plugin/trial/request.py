"""The records of a trial as the tuner keeps them: request, limits, progress and result."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import Command
from quartet_plugin.model.plan import Plan
from quartet_plugin.protocol.measured_window import EarlyEnd
from quartet_plugin.protocol.rank_files import Snapshot, reader_of

Device = Literal["auto", "cpu", "cuda"]
Phase = Literal["launch", "import", "init", "warmup", "measure", "done"]

PHASES: tuple[Phase, ...] = ("launch", "import", "init", "warmup", "measure", "done")
MIN_FREE_BYTES = 2 * 2**30 + 256 * 2**20

# The deadline of a trial to which the default limits of the phases belong.
DEADLINE_S = 600.0
# A start or first step may take this multiple of the longest start or first step of an earlier trial.
LEARNED_FACTOR = 3.0
# A first start on a GPU compiles kernels on every rank and indexes its data: limits until it was measured.
COLD_INIT_S = 900.0
COLD_FIRST_STEP_S = 600.0
# Computation on a cold GPU before the first step of a run's first trial, which later ones are compared with.
DEVICE_WARMUP_S = 25.0
# A first step that goes on is no hang until it has taken this long: 24 minutes have been reported for one.
FIRST_STEP_CAP_S = 3600.0
_FENCE = re.compile(r"[0-9a-f]{0,16}")


class Outcome(StrEnum):
    """The outcome of a trial; docs/faults.md says what each outcome leads to."""

    OK = "OK"
    INFEASIBLE = "INFEASIBLE"
    UNSTABLE = "UNSTABLE"
    WRONG = "WRONG"
    NOT_AS_PLANNED = "NOT_AS_PLANNED"
    INFRA = "INFRA"
    HARNESS = "HARNESS"
    CANCELLED = "CANCELLED"


# The seconds that ranks have to end; the deadline of a trial must be longer.
SHUTDOWN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Limits on the seconds that each phase may take without progress.

    The first step and every later one are also allowed a multiple of their predicted time. The whole
    trial has its own deadline. A first step in which some rank still progresses may take `first_step_cap_s`,
    by which the deadline is then later; 0: it has no more time than another one. Raises ConfigError for
    limits that are out of order: shutdown <= step <= first step <= start-up.
    """

    init_s: float = 300.0
    first_step_s: float = 120.0
    first_step_factor: float = 10.0
    step_s: float = 30.0
    step_factor: float = 5.0
    shutdown_s: float = SHUTDOWN_S
    first_step_cap_s: float = 0.0

    def __post_init__(self) -> None:
        order = (
            ("shutdown_s", self.shutdown_s),
            ("step_s", self.step_s),
            ("first_step_s", self.first_step_s),
            ("init_s", self.init_s),
        )
        for (lower, least), (upper, most) in pairwise(order):
            if not 0 < least <= most < float("inf"):
                raise ConfigError(
                    f"timeouts.{upper}: {most:g}; must be at least {lower} ({least:g}), which must be above 0"
                )
        if not 0 <= self.first_step_cap_s < float("inf"):
            raise ConfigError(f"timeouts.first_step_cap_s: {self.first_step_cap_s:g}; must be at least 0")
        for name in ("first_step_factor", "step_factor"):
            if not 1 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"timeouts.{name}: {getattr(self, name):g}; must be at least 1")

    @classmethod
    def within(cls, deadline_s: float) -> "Timeouts":
        """The defaults; the limits of the start grow in proportion to a deadline above DEADLINE_S.

        With a shorter deadline than that a first step that progresses has no more time than it.
        """
        factor = max(1.0, deadline_s / DEADLINE_S)
        return cls(
            init_s=factor * cls().init_s,
            first_step_s=factor * cls().first_step_s,
            first_step_cap_s=0.0 if deadline_s < DEADLINE_S else factor * FIRST_STEP_CAP_S,
        )

    @classmethod
    def cold(cls, deadline_s: float) -> "Timeouts":
        """The limits of a first start on GPUs with empty caches; a deadline below the default keeps its own.

        They grow in proportion to a deadline above the default, so that a user who raises it has a first step
        of many minutes measured. Later starts have those of `within`, learned from the first.
        """
        warm = cls.within(deadline_s)
        if deadline_s < DEADLINE_S:
            return warm
        factor = deadline_s / DEADLINE_S
        return replace(warm, init_s=factor * COLD_INIT_S, first_step_s=factor * COLD_FIRST_STEP_S)

    def longer_than(self, other: "Timeouts") -> float:
        """Seconds by which the start and the first step may together take longer than under `other`."""
        return self.init_s + self.first_step_s - other.init_s - other.first_step_s

    def learned(self, *, start_s: float, first_step_s: float) -> "Timeouts":
        """The limits, raised for a measured trial that took `start_s` and `first_step_s`."""
        first_limit_s = max(self.first_step_s, LEARNED_FACTOR * first_step_s)
        init_limit_s = max(self.init_s, LEARNED_FACTOR * start_s, first_limit_s)
        return replace(self, first_step_s=first_limit_s, init_s=init_limit_s)

    def first_step_most_s(self, predicted_s: float | None) -> float:
        """Seconds the first step may take where it progresses all the time."""
        return max(self.first_step_cap_s, self.first_step_limit_s(predicted_s))

    def first_step_limit_s(self, predicted_s: float | None) -> float:
        """Seconds the first step may take when an iteration is predicted to take `predicted_s`."""
        return max(self.first_step_s, self.first_step_factor * (predicted_s or 0.0))

    def step_limit_s(self, predicted_s: float | None) -> float:
        """Seconds every later step may take."""
        return max(self.step_s, self.step_factor * (predicted_s or 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """A plan (None: the baseline), to be run for a few iterations.

    `folder` belongs to this trial alone, such as `trials/000012`; attempts are made inside it, from number
    `attempt` on. `deadline_s` limits each attempt. `max_spread` is the median absolute deviation of the
    iteration times, relative to their median, above which they are measured once more. A trial whose
    iterations take longer than `slow_above_s` is cut short: it is not worth measuring well. `weights` (a
    weights-only checkpoint to start from) and `save_weights` (where to write such a checkpoint) make it a
    trial of the parity gate; with `num_compared` only the first of its warm-up are compared, and the
    trial goes on to be measured. `device_warmup_s` are seconds that a GPU computes before the first step, to
    be as warm as later trials find it. `max_warmup` and `early_end` let the iterations themselves decide
    which of them, and how many, are measured, and `modules` are compared with those that run: `TrialSpec`.
    `fence` (up to 16 hex digits) begins the ids of its attempts and tells apart the results of a plan that
    was handed out twice.
    """

    folder: Path
    command: Command
    plan: Plan | None = None
    attempt: int = 1
    warmup: int = 3
    measure: int = 10
    deadline_s: float = DEADLINE_S
    device: Device = "auto"
    predicted_iteration_s: float | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    max_attempts: int = 3
    max_spread: float = 0.25
    slow_above_s: float | None = None
    min_free_bytes: int = MIN_FREE_BYTES
    cwd: Path | None = None
    weights: Path | None = None
    save_weights: Path | None = None
    num_compared: int | None = None
    device_warmup_s: float = 0.0
    max_warmup: int | None = None
    early_end: EarlyEnd | None = None
    modules: tuple[str, ...] | None = None
    fence: str = ""

    def __post_init__(self) -> None:
        for name, least in (("attempt", 1), ("warmup", 0), ("measure", 1), ("max_attempts", 1)):
            value = getattr(self, name)
            if not least <= value <= 100_000:
                raise ConfigError(f"trial.{name}: {value}; must be from {least} to 100000")
        if not self.timeouts.shutdown_s < self.deadline_s < float("inf"):
            raise ConfigError(
                f"trial.deadline_s: {self.deadline_s:g}; must be above "
                f"timeouts.shutdown_s ({self.timeouts.shutdown_s:g})"
            )
        if not _FENCE.fullmatch(self.fence):
            raise ConfigError(f"trial.fence: {self.fence[:40]!r}; must be up to 16 hex digits")
        for name in ("predicted_iteration_s", "slow_above_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < float("inf"):
                raise ConfigError(f"trial.{name}: {seconds}; must be above 0")
        if not 0 <= self.device_warmup_s <= self.deadline_s:
            raise ConfigError(
                f"trial.device_warmup_s: {self.device_warmup_s:g}; must be from 0 to the deadline "
                f"({self.deadline_s:g})"
            )

    @property
    def plan_key(self) -> str | None:
        """The key that the ranks must report as their plan's; None for the baseline."""
        return None if self.plan is None else self.plan.key


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOutcome:
    """The outcome of an attempt and its measurements; `reason` is one line for the user.

    `iteration_s`, `loss` and `grad_norm` have an entry a measured iteration, warm-up left out; a time is
    the slowest rank's. `memory_excess_bytes` is above 0 where memory was the reason. `untracked_memory_bytes`
    lay on the fullest device outside of the allocator's pool; None where no rank has counted them.
    `is_cut`: it was ended early because the plan was clearly slower than the best so far.
    """

    outcome: Outcome
    reason: str
    phase: Phase
    memory_excess_bytes: int = 0
    iteration_s: tuple[float, ...] = ()
    loss: tuple[float, ...] = ()
    grad_norm: tuple[float, ...] = ()
    peak_memory_bytes: int = 0
    untracked_memory_bytes: int | None = None
    is_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult(AttemptOutcome):
    """The result of a trial: its last attempt's.

    `job` is the configuration that the framework resolved (rank 0's report), `last_lines` the end of the
    command's output, `start` how its processes started (None: not known) and `cold_reason` why not from a
    trial server where there was to be one. `start_s` (with a trial server's imports before it),
    `first_step_s` and `warmup_s` (all iterations that are not measured) are the seconds of the slowest rank.
    The parity gate compares the first `num_compared` iterations (0: none), which took `compared_s` of
    `warmup_s`.
    `is_superseded`: it does not count, since its final round, or its comparison at full size, was interrupted
    and then launched again.
    """

    attempt_id: str
    plan_key: str | None
    wall_s: float = 0.0
    job: Mapping[str, Any] | None = None
    folder: Path
    last_lines: tuple[str, ...] = ()
    start: Literal["warm", "cold"] | None = None
    cold_reason: str | None = None
    start_s: float = 0.0
    first_step_s: float = 0.0
    warmup_s: float = 0.0
    num_compared: int = 0
    compared_s: float = 0.0
    is_superseded: bool = False

    @property
    def is_measured(self) -> bool:
        """Whether the iteration times may be scored."""
        return self.outcome in (Outcome.OK, Outcome.UNSTABLE)

    def rank_files(self) -> Snapshot:
        """What its ranks have left in its folder. Raises StorageError where that cannot be read."""
        return reader_of(self.folder, attempt_id=self.attempt_id).scan()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a running attempt: the slowest rank's phase and iteration."""

    attempt: int
    phase: Phase
    iteration: int
    num_iterations: int
    elapsed_s: float
