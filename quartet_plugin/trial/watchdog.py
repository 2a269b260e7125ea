"""Deadlines of a trial: none of its ranks may stay where it is for longer than its phase allows.

Only changes of a beat count, and only this process's own monotonic clock: the clocks of ranks may jump.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quartet_plugin.protocol.attempt_files import Beat
from quartet_plugin.trial.request import Phase, Timeouts

# A rank writes its beat at most once a second, so what we see is up to that old.
_BEAT_LAG_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiry:
    """A limit that was passed: the phase, the rank (None: the launcher, or all) and the seconds."""

    phase: Phase
    rank: int | None
    limit_s: float
    is_wall: bool = False

    def __str__(self) -> str:
        """What to tell the user."""
        if self.is_wall:
            return f"the trial's deadline of {self.limit_s:g} s passed in phase {self.phase}"
        who = "no rank has" if self.rank is None else f"rank {self.rank} has not"
        return f"hang: {who} moved for {self.limit_s:g} s in phase {self.phase}"


class Watchdog:
    """Watches one attempt from its launch on; `observe` the beats, then ask `expired`."""

    def __init__(
        self,
        timeouts: Timeouts,
        *,
        deadline_s: float,
        predicted_s: float | None,
        clock: Callable[[], float],
        num_processes: int | None,
    ) -> None:
        self._timeouts = timeouts
        self._deadline_s = deadline_s
        self._predicted_s = predicted_s
        self._clock = clock
        self._num_processes = num_processes
        self._start = clock()
        self._moved: dict[int, tuple[Phase, int, float]] = {}
        self._longest_step_s = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the launch."""
        return self._clock() - self._start

    def observe(self, beats: Iterable[Beat]) -> None:
        """Note which ranks have moved."""
        now = self._clock()
        for beat in beats:
            before = self._moved.get(beat.rank)
            if before is None or before[:2] != (beat.phase, beat.iteration):
                self._moved[beat.rank] = (beat.phase, beat.iteration, now)
                self._learn(before, beat.iteration, now)

    def forgive(self, seconds: float) -> None:
        """Nothing could be seen for `seconds`: no rank is held to them. The trial's own deadline stays."""
        for rank, (phase, iteration, since) in self._moved.items():
            self._moved[rank] = (phase, iteration, since + seconds)

    def _learn(self, before: tuple[Phase, int, float] | None, iteration: int, now: float) -> None:
        """How long this very attempt's steps take, where nobody has predicted it."""
        if before is not None and iteration > before[1] and self._predicted_s is None:
            self._longest_step_s = max(self._longest_step_s, (now - before[2]) / (iteration - before[1]))

    def expired(self) -> Expiry | None:
        """The first limit that is passed now, if any."""
        now = self._clock()
        if now - self._start > self._deadline_s:
            return Expiry(phase=self._slowest, rank=None, limit_s=self._deadline_s, is_wall=True)
        if not self._moved or (self._num_processes or 0) > len(self._moved):
            limit = self._timeouts.init_s
            missing = self._missing_rank
            if now - self._start > limit:
                return Expiry(phase="launch", rank=missing, limit_s=limit)
        for rank, (phase, iteration, since) in sorted(self._moved.items()):
            limit, start = self._limit(phase, iteration, since)
            if now - start > limit:
                return Expiry(phase=phase, rank=rank, limit_s=limit)
        return None

    @property
    def _slowest(self) -> Phase:
        order: tuple[Phase, ...] = ("import", "init", "warmup", "measure", "done")
        return min((phase for phase, _, _ in self._moved.values()), key=order.index, default="launch")

    @property
    def _missing_rank(self) -> int | None:
        if not self._moved or self._num_processes is None:
            return None
        return next(rank for rank in range(self._num_processes) if rank not in self._moved)

    def _limit(self, phase: Phase, iteration: int, since: float) -> tuple[float, float]:
        """The limit of a rank's phase, and from when on it counts."""
        if phase in ("import", "init"):
            return self._timeouts.init_s, self._start
        expected_s = self._longest_step_s if self._predicted_s is None else self._predicted_s
        if phase == "done":
            return self._timeouts.step_limit_s(expected_s) + self._timeouts.shutdown_s, since
        if iteration == 0:
            return self._timeouts.first_step_limit_s(expected_s) + _BEAT_LAG_S, since
        return self._timeouts.step_limit_s(expected_s) + _BEAT_LAG_S, since
