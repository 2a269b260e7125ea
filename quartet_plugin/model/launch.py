"""Launches of a tuning run: their phase, the record of one that ended, and who is told of both."""

from dataclasses import dataclass
from typing import Literal, Protocol

from quartet_plugin.model.plan import Plan

# The outcome of a plan that was measured with fewer layers only: its times are predicted from those.
DEPTH_PROXY = "CROPPED"
# The outcome of a plan that a rule of `search.forbid` excludes: it is not launched.
FORBIDDEN = "FORBIDDEN"

# The user's own command at first, a model with fewer layers, plans, the final rounds, and in between the
# user's own command again and the parity gate's runs.
Phase = Literal["baseline", "cropped", "search", "final", "control", "parity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """One launch that ended. `plan` is None for the user's own command.

    `iteration_s` (seconds) and `tokens_per_s` are None where nothing was measured; `versus_baseline` is the
    objective over the baseline's.
    """

    label: str
    plan: Plan | None
    outcome: str
    reason: str = ""
    iteration_s: float | None = None
    tokens_per_s: float | None = None
    versus_baseline: float | None = None


class Observer(Protocol):
    """Shows a run. Times are seconds; no call may raise or take long."""

    def message(self, text: str) -> None:
        """Show one line."""

    def plan_started(self, label: str, plan: Plan | None, *, phase: Phase, time_left_s: float | None) -> None:
        """A launch begins; `plan` is None for the user's own configuration."""

    def progressed(self, phase: str, *, iteration: int, num_iterations: int) -> None:
        """The running launch has reached `iteration` of a phase of its process."""

    def plan_finished(self, launch: LaunchRecord) -> None:
        """A launch has ended."""
