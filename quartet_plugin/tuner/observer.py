"""What a tuning run tells whoever watches it."""

from typing import Protocol

from quartet_plugin.model.launched import Launched, Stage
from quartet_plugin.model.plan import Plan


class Observer(Protocol):
    """Shows a run. Times are seconds; no call may raise or take long."""

    def message(self, text: str) -> None:
        """One line for the user."""

    def plan_started(self, label: str, plan: Plan | None, *, stage: Stage, time_left_s: float | None) -> None:
        """A launch begins; `plan` is None for the user's own configuration."""

    def progressed(self, phase: str, *, iteration: int, num_iterations: int) -> None:
        """Where the running launch is."""

    def plan_finished(self, launch: Launched) -> None:
        """A launch ended."""
