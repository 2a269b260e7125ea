"""A trial's deadlines and its speed, by the heartbeats of its ranks.

No rank may stay in an iteration for longer than its phase allows; a first step may, as long as any rank
progresses inside of it (`Heartbeat.progress`), up to a cap. Only changes of a heartbeat count, and only
this process's monotonic clock: the clocks of ranks may jump.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quartet_plugin.protocol.rank_files import Heartbeat
from quartet_plugin.trial.request import PHASES, Phase, Timeouts

# A rank writes its heartbeat at most once a second, so the latest one may be that old.
_BEAT_LAG_S = 1.0
# Measured iterations that must have passed before an attempt is judged as slow.
MIN_ITERATIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiry:
    """A limit that was passed, in seconds, with its phase and its rank (None: the launcher, or all ranks)."""

    phase: Phase
    rank: int | None
    limit_s: float
    is_wall: bool = False

    def __str__(self) -> str:
        """The message for the user."""
        if self.is_wall:
            return f"the trial's deadline of {self.limit_s:g} s passed in phase {self.phase}"
        who = "no rank made" if self.rank is None else f"rank {self.rank} made no"
        return f"hang: {who} progress for {self.limit_s:g} s in phase {self.phase}"


@dataclass(slots=True)
class Watchdog:
    """The deadlines of one attempt from its launch on: `observe` its heartbeats, then ask `expired`."""

    timeouts: Timeouts
    deadline_s: float = field(kw_only=True)
    predicted_s: float | None = field(kw_only=True)
    clock: Callable[[], float] = field(kw_only=True)
    num_processes: int | None = field(kw_only=True)
    _start_s: float = field(init=False)
    _moved: dict[int, tuple[Phase, int, float]] = field(init=False, default_factory=dict)
    _longest_step_s: float = field(init=False, default=0.0)
    _counts: dict[int, int] = field(init=False, default_factory=dict)
    _progressed_s: float = field(init=False, default=float("-inf"))
    _extension_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._start_s = self.clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the launch."""
        return self.clock() - self._start_s

    def observe(self, beats: Iterable[Heartbeat]) -> None:
        """Record which ranks have moved to another phase or iteration."""
        now = self.clock()
        for beat in beats:
            before = self._moved.get(beat.rank)
            if before is None or before[:2] != (beat.phase, beat.iteration):
                self._moved[beat.rank] = (beat.phase, beat.iteration, now)
                self._learn(before, beat.iteration, now)
            if beat.progress is not None and beat.progress > self._counts.get(beat.rank, 0):
                self._counts[beat.rank], self._progressed_s = beat.progress, now
        self._extend(now)

    def hold(self) -> None:
        """Count nothing up to now: the attempt waits for its nodes."""
        self._start_s = self.clock()

    def forgive(self, seconds: float) -> None:
        """Extend every rank's limit by `seconds` without a view of the files. The trial's deadline stays."""
        for rank, (phase, iteration, since) in self._moved.items():
            self._moved[rank] = (phase, iteration, since + seconds)
        self._progressed_s += seconds

    def _extend(self, now: float) -> None:
        """Extend the deadline by the time that a first step takes while it makes progress."""
        limit_s = self.timeouts.first_step_limit_s(self._expected_s)
        for phase, iteration, since in self._moved.values():
            if _is_first_step(phase, iteration) and self._progressed_s >= since:
                self._extension_s = max(self._extension_s, now - since - limit_s)

    def _learn(self, before: tuple[Phase, int, float] | None, iteration: int, now: float) -> None:
        """Measure the longest step of this attempt if there was no prediction."""
        if before is not None and iteration > before[1] and self.predicted_s is None:
            self._longest_step_s = max(self._longest_step_s, (now - before[2]) / (iteration - before[1]))

    def expired(self) -> Expiry | None:
        """The first limit that is passed now, if any."""
        now = self.clock()
        if now - self._start_s > self.deadline_s + self._extension_s:
            return Expiry(phase=self._slowest, rank=None, limit_s=self.deadline_s, is_wall=True)
        limit = self.timeouts.init_s
        if (self.num_processes or 1) > len(self._moved) and now - self._start_s > limit:
            return Expiry(phase="launch", rank=self._missing_rank, limit_s=limit)
        for rank, (phase, iteration, since) in sorted(self._moved.items()):
            limit, start = self._limit(phase, iteration, since)
            if now - start > limit:
                return Expiry(phase=phase, rank=rank, limit_s=limit)
        return None

    @property
    def _expected_s(self) -> float:
        return self._longest_step_s if self.predicted_s is None else self.predicted_s

    @property
    def _slowest(self) -> Phase:
        return min((phase for phase, _, _ in self._moved.values()), key=PHASES.index, default="launch")

    @property
    def _missing_rank(self) -> int | None:
        if not self._moved or self.num_processes is None:
            return None
        return next(rank for rank in range(self.num_processes) if rank not in self._moved)

    def _limit(self, phase: Phase, iteration: int, since: float) -> tuple[float, float]:
        """The limit of a rank's phase in seconds, and the time from which it counts."""
        if phase in ("import", "init"):
            return self.timeouts.init_s, self._start_s
        expected_s = self._expected_s
        if phase == "done":
            return self.timeouts.step_limit_s(expected_s) + self.timeouts.shutdown_s, since
        if iteration == 0:
            limit_s = self.timeouts.first_step_limit_s(expected_s)
            latest = since + self.timeouts.first_step_most_s(expected_s) - limit_s
            return limit_s + _BEAT_LAG_S, min(max(since, self._progressed_s), latest)
        return self.timeouts.step_limit_s(expected_s) + _BEAT_LAG_S, since


def _is_first_step(phase: Phase, iteration: int) -> bool:
    return phase in ("warmup", "measure") and iteration == 0


@dataclass(slots=True, kw_only=True)
class SlowdownDetector:
    """Compares the seconds of a measured iteration on the slowest rank with a limit (None: never slow).

    The time of an iteration is when it is first seen here, which is up to `_BEAT_LAG_S` late.
    """

    warmup: int
    slow_above_s: float | None
    clock: Callable[[], float]
    _first: tuple[int, float] | None = None
    _latest: tuple[int, float] = (0, 0.0)

    def is_slow(self, beats: Iterable[Heartbeat]) -> bool:
        """Whether MIN_ITERATIONS or more measured iterations took longer than the limit on average."""
        if self.slow_above_s is None:
            return False
        last = min(beats, key=lambda beat: beat.iteration, default=None)
        if last is None or last.phase != "measure" or last.iteration < self.warmup:
            return False
        if self._first is None:
            self._first = self._latest = (last.iteration, self.clock())
        elif last.iteration > self._latest[0]:
            self._latest = (last.iteration, self.clock())
        num_done = self._latest[0] - self._first[0]
        seconds = self._latest[1] - self._first[1] - _BEAT_LAG_S
        return num_done >= MIN_ITERATIONS and seconds > self.slow_above_s * num_done
