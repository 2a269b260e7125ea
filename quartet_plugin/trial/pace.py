"""How fast a running attempt is, by its ranks' heartbeats: enough to see that it is clearly slow."""

from collections.abc import Iterable
from dataclasses import dataclass

from quartet_plugin.protocol.attempt_files import Beat

# Measured iterations that must have passed before an attempt is judged.
MIN_ITERATIONS = 3


@dataclass(slots=True, kw_only=True)
class Pace:
    """Seconds a measured iteration of the slowest rank, against a limit (None: never slow)."""

    warmup: int
    slow_above_s: float | None
    _first: tuple[int, float] | None = None

    def is_slow(self, beats: Iterable[Beat]) -> bool:
        """Whether so many iterations took longer than the limit each."""
        if self.slow_above_s is None:
            return False
        last = min(beats, key=lambda beat: (beat.iteration, -beat.time), default=None)
        if last is None or last.phase != "measure" or last.iteration < self.warmup:
            return False
        if self._first is None:
            self._first = (last.iteration, last.time)
        iteration, began = self._first
        num_done = last.iteration - iteration
        return num_done >= MIN_ITERATIONS and last.time - began > self.slow_above_s * num_done
