"""How much time a run may still take, and whether another launch fits in."""

from collections.abc import Callable
from dataclasses import dataclass, field

# A launch is allowed this multiple of what launches took so far.
SAFETY = 1.5


@dataclass(slots=True, kw_only=True)
class TimeBudget:
    """Seconds left of `limit_s` (None: no limit) on a monotonic `clock`, and the time launches took."""

    limit_s: float | None
    clock: Callable[[], float]
    _began: float = field(init=False)
    _walls: list[float] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def add(self, wall_s: float) -> None:
        """A launch took `wall_s`."""
        self._walls.append(wall_s)

    @property
    def launch_s(self) -> float:
        """A typical launch: the mean of the latest ten."""
        latest = self._walls[-10:]
        return sum(latest) / len(latest) if latest else 0.0

    @property
    def left_s(self) -> float:
        """Seconds left; infinite without a limit."""
        if self.limit_s is None:
            return float("inf")
        return self.limit_s - (self.clock() - self._began)

    def fits(self, *, num_launches: int, then: int = 0) -> bool:
        """Whether `num_launches` more, and `then` others after them, are likely to end in time.

        What comes after may claim at most half of the whole limit.
        """
        if self.limit_s is None:
            return True
        afterwards_s = min(self.launch_s * then, self.limit_s / 2)
        return self.left_s >= self.launch_s * SAFETY * num_launches + afterwards_s

    def forecast_s(self, *, num_launches: int) -> float | None:
        """Seconds that `num_launches` more will take, no more than are left; None before the first one."""
        return min(self.launch_s * num_launches, self.left_s) if self._walls else None
