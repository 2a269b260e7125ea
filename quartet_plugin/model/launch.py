"""Launches of a tuning run: their phase, the record of one that ended, and who is told of both."""

from dataclasses import dataclass
from typing import Literal, Protocol

from quartet_plugin.model.plan import Plan

# The outcome of a plan that was measured with fewer layers only: its times are predicted from those.
DEPTH_PROXY = "CROPPED"
# The outcome of a plan that a rule of `search.forbid` excludes: it is not launched.
FORBIDDEN = "FORBIDDEN"

# The user's command at first, a model with fewer layers, plans, the final rounds, and in between the
# user's command again and the parity gate's runs.
Phase = Literal["baseline", "cropped", "search", "final", "control", "parity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPosition:
    """The place of a launch in its run: trial or final round `index`, from 1, of `count`."""

    index: int
    count: int

    @classmethod
    def of_trial(cls, num_before: int, *, num_asked: int) -> "LaunchPosition":
        """The place of a trial after `num_before` others."""
        return cls(index=min(num_before + 1, num_asked), count=num_asked)

    @classmethod
    def of_round(cls, round_index: int, *, num_rounds: int) -> "LaunchPosition":
        """The place of a final round, counted from 0: a leader by little gets `num_rounds` more of them."""
        return cls(index=round_index + 1, count=num_rounds * (round_index // num_rounds + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """One launch that ended. `plan` is None for the user's command.

    `iteration_s` (seconds) and `tokens_per_s` are None where nothing was measured; `versus_baseline` is the
    speedup over the baseline, corrected by `drift`, the machine's speed over its speed when the baseline was
    measured.
    """

    label: str
    plan: Plan | None
    outcome: str
    reason: str = ""
    iteration_s: float | None = None
    tokens_per_s: float | None = None
    versus_baseline: float | None = None
    drift: float = 1.0


class Observer(Protocol):
    """Shows a run. Times are seconds; no call may raise or take long."""

    def message(self, text: str) -> None:
        """Show one line."""

    def plan_started(
        self,
        label: str,
        plan: Plan | None,
        *,
        phase: Phase,
        time_left_s: float | None,
        position: LaunchPosition | None = None,
        measured_share: float | None = None,
    ) -> None:
        """A launch begins, whose label begins with its trial's number; `plan` is None for the user's own.

        `measured_share` of the time so far went into measured iterations; None before a launch has ended.
        """

    def progressed(self, phase: str, *, iteration: int, num_iterations: int) -> None:
        """The running launch has reached `iteration` of a phase of its process."""

    def plan_finished(self, launch: LaunchRecord) -> None:
        """A launch has ended."""
