"""What a tuning run tells whoever watches it."""

from typing import Literal, Protocol

from quartet_plugin.model.plan import Plan

Stage = Literal["baseline", "search", "final"]


class Observer(Protocol):
    """Shows a run. Times are seconds; no call may raise or take long."""

    def message(self, text: str) -> None:
        """One line for the user."""

    def plan_started(self, label: str, plan: Plan | None, *, stage: Stage, time_left_s: float | None) -> None:
        """A launch begins; `plan` is None for the user's own configuration."""

    def progressed(self, phase: str, *, iteration: int, num_iterations: int) -> None:
        """Where the running launch is."""

    def plan_finished(
        self,
        label: str,
        plan: Plan | None,
        *,
        outcome: str,
        reason: str,
        iteration_s: float | None,
        tokens_per_s: float | None,
        versus_baseline: float | None,
    ) -> None:
        """A launch ended; `versus_baseline` is its objective over the baseline's."""


class Silent:
    """Shows nothing."""

    def message(self, text: str) -> None:
        """Nothing."""

    def plan_started(self, label: str, plan: Plan | None, *, stage: Stage, time_left_s: float | None) -> None:
        """Nothing."""

    def progressed(self, phase: str, *, iteration: int, num_iterations: int) -> None:
        """Nothing."""

    def plan_finished(
        self,
        label: str,
        plan: Plan | None,
        *,
        outcome: str,
        reason: str,
        iteration_s: float | None,
        tokens_per_s: float | None,
        versus_baseline: float | None,
    ) -> None:
        """Nothing."""
