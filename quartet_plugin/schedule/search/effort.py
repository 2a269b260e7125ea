"""The part of a search's time or evaluations that is spent, and the steps that fit into the rest."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(slots=True, kw_only=True)
class Effort:
    """A search's budget, in seconds or in evaluations, and the part that is spent.

    `goal_s` is a proven lower bound of the score, 0 for none: once it is reached everything is spent.
    """

    clock: Callable[[], float]
    started_s: float
    time_limit_s: float | None
    evaluations: int | None
    goal_s: float = 0.0
    used: int = 0
    is_met: bool = False

    @property
    def spent(self) -> float:
        """Fraction of the budget; inf once the goal is reached."""
        if self.is_met:
            return math.inf
        if self.evaluations is not None:
            return self.used / self.evaluations
        assert self.time_limit_s is not None
        return (self.clock() - self.started_s) / self.time_limit_s if self.time_limit_s > 0 else math.inf

    def reached(self, score: float) -> None:
        """Tell that `score` is reached; nothing is left to do if that is the bound."""
        self.is_met = self.is_met or score <= self.goal_s * (1 + 1e-9)

    def evaluations_until(self, until: float) -> int | None:
        """Evaluations before `until` is spent; None where seconds count."""
        return None if self.evaluations is None else max(0, int((until - self.spent) * self.evaluations))

    def seconds_until(self, until: float) -> float:
        """Seconds before `until` is spent; inf where evaluations count."""
        return math.inf if self.time_limit_s is None else max(0.0, until - self.spent) * self.time_limit_s

    def steps(self, until: float, seconds_each: Sequence[float]) -> list[int]:
        """Steps for a round of tasks whose steps take `seconds_each`, some rounds before `until` is spent."""
        left, width = until - self.spent, len(seconds_each)
        if left <= 0:
            return [0] * width
        if self.evaluations is not None:
            return [max(1, min(200, int(left * self.evaluations / width)))] * width
        assert self.time_limit_s is not None
        task_s = min(0.08, left * self.time_limit_s * num_cores() / width)
        return [int(min(2000, task_s / max(each, 1e-7))) for each in seconds_each]


@dataclass(slots=True)
class Rate:
    """Seconds a step takes an action, learned from round to round."""

    seconds: float
