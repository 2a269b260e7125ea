"""The context of a tuning run: its folder and event log, observer and time budget, and how it is stopped."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quartet_plugin.errors import InterruptedByUserError, StorageError
from quartet_plugin.launchers.command import Command
from quartet_plugin.model.launch import Observer
from quartet_plugin.protocol.masking import collect_secrets, masked
from quartet_plugin.trial.request import Progress
from quartet_plugin.tuner.run_folder import TuningRun
from quartet_plugin.tuner.trial_backend import ShouldStop, TrialBackend

# A launch is allowed this multiple of what launches took so far.
SAFETY = 1.5


class EventLog:
    """Appends to events.jsonl, a line an event in one write: a crash tears the last line at most."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, kind: str, *, trial: int | None = None, **fields: object) -> None:
        """Append one event of plain data, its words without secrets.

        Raises StorageError when the disk fails.
        """
        event = {"time": round(time.time(), 3), "kind": kind, "trial": trial, **_masked_fields(fields)}
        line = json.dumps(event, ensure_ascii=False, allow_nan=False) + "\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self._path, flags, 0o600)
            try:
                os.write(descriptor, self._end_of_torn_line() + line.encode("utf-8", errors="replace"))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be written: {error.strerror}") from error

    def _end_of_torn_line(self) -> bytes:
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) is not None:
                return b"" if file.read(1) == b"\n" else b"\n"
        return b""


def _masked_fields(value: Any) -> Any:
    """Plain data with every text masked; names stay."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, Mapping):
        return {name: _masked_fields(part) for name, part in value.items()}
    return [_masked_fields(part) for part in value] if isinstance(value, list | tuple) else value


@dataclass(slots=True, kw_only=True)
class TimeBudget:
    """Seconds left of `limit_s` (None: no limit) on a monotonic `clock`, and the seconds launches took."""

    limit_s: float | None
    clock: Callable[[], float]
    was_short: bool = field(init=False, default=False)
    """Whether a trial or a final round was left out because too little time was left."""
    _began_s: float = field(init=False)
    _shared_s: float = field(init=False, default=float("inf"))
    _walls_s: list[float] = field(init=False, default_factory=list)
    _launched_s: float = field(init=False, default=0.0)
    _measured_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    def add(self, wall_s: float) -> None:
        """Count a launch that took `wall_s`."""
        self._walls_s.append(wall_s)

    def add_measured(self, measured_s: float, *, wall_s: float) -> None:
        """Count the measured iterations of a launch of this session that took `wall_s`."""
        self._measured_s += measured_s
        self._launched_s += wall_s

    @property
    def measured_share(self) -> float | None:
        """The share of the session's time that went into measured iterations; None before a launch's end.

        Of launches beside each other every one's time counts.
        """
        if not self._launched_s:
            return None
        return self._measured_s / max(self._launched_s, self.clock() - self._began_s)

    def expect_shorter(self, by_s: float) -> None:
        """Expect later launches to be shorter by `by_s` than the launches so far."""
        self._walls_s = [max(0.0, wall_s - by_s) for wall_s in self._walls_s]

    def share(self) -> None:
        """From now on the search and what comes after it share the time that is left."""
        self._shared_s = self.left_s

    @property
    def launch_s(self) -> float:
        """The seconds of a typical launch: the mean of the latest ten."""
        latest = self._walls_s[-10:]
        return sum(latest) / len(latest) if latest else 0.0

    @property
    def left_s(self) -> float:
        """The seconds left; infinite without a limit."""
        if self.limit_s is None:
            return float("inf")
        return self.limit_s - (self.clock() - self._began_s)

    def fits(self, *, num_launches: int, then: int = 0) -> bool:
        """Whether `num_launches` more, and `then` others after them, are likely to end in time.

        The later ones may claim at most half of the time that they share with the search.
        """
        if self.limit_s is None:
            return True
        afterwards_s = min(self.launch_s * then, min(self.limit_s, self._shared_s) / 2)
        return self.left_s >= self.launch_s * SAFETY * num_launches + afterwards_s

    def remaining_s(self, *, num_launches: int) -> float | None:
        """The seconds that `num_launches` more will take, at most those left; None before the first one."""
        return min(self.launch_s * num_launches, self.left_s) if self._walls_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningContext:
    """The shared objects of one tuning run, which all its parts use.

    `command` is the user's, with its secrets. `fence` is called before every write and raises where another
    tuner has taken the run.
    """

    run: TuningRun
    command: Command
    backend: TrialBackend
    observer: Observer
    events: EventLog
    budget: TimeBudget
    should_stop: ShouldStop
    fence: Callable[[], None]

    @classmethod
    def create(
        cls,
        run: TuningRun,
        *,
        command: Command,
        backend: TrialBackend,
        observer: Observer,
        should_stop: ShouldStop = lambda: False,
        fence: Callable[[], None] = lambda: None,
        max_minutes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> "TuningContext":
        """The context of `run` with its event log and `max_minutes` (None: no limit) from now."""
        collect_secrets(command.words)
        return cls(
            run=run,
            command=command,
            backend=backend,
            observer=observer,
            events=EventLog(run.folder.events_file),
            budget=TimeBudget(limit_s=None if max_minutes is None else 60.0 * max_minutes, clock=clock),
            should_stop=should_stop,
            fence=fence,
        )

    def check_stop(self) -> None:
        """Raise InterruptedByUserError when asked to stop."""
        if self.should_stop():
            raise self.interruption()

    def interruption(self) -> InterruptedByUserError:
        """The error of a run that was asked to stop, which is logged."""
        self.events.add("interrupted")
        return InterruptedByUserError(
            "stopped; all measurements are kept: the same command with --resume continues"
        )

    def show_progress(self, progress: Progress) -> None:
        """Show where the running launch is."""
        self.fence()
        self.observer.progressed(
            progress.phase, iteration=progress.iteration, num_iterations=progress.num_iterations
        )
