"""Start, end and wait of every action, at the cost of two clock reads an action.

As in a simulation: seconds since the step's begin, one entry an action, in the device's order.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTime:
    """One action: start and end in seconds since the step began, and the wait for its input before start."""

    start_s: float
    end_s: float
    waiting_s: float


class Clock(Protocol):
    """Marks moments while a step runs, and tells the seconds between two marks afterwards."""

    def mark(self) -> Any:
        """A moment: now, or, on a GPU, when the current stream gets there."""

    def seconds(self, earlier: Any, later: Any) -> float:
        """Seconds from one mark to a later one. May wait for the device."""


class HostClock:
    """The host's monotonic clock; `now` can be injected."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.mark = now

    def seconds(self, earlier: float, later: float) -> float:
        """The difference of two readings."""
        return later - earlier


class CudaClock:
    """Events in the current CUDA stream: nothing waits until the times are asked for."""

    def mark(self) -> Any:
        """A recorded event."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, earlier: Any, later: Any) -> float:
        """The difference of two events, after waiting for the later one."""
        later.synchronize()
        return float(earlier.elapsed_time(later)) / 1e3


class Recorder:
    """Keeps the times of the last step. An executor calls `begin`, `waits`, `starts`, `ends`, `ends_beside`.

    On a GPU the host is ahead of its device, by up to a step: everything is told by the clock's marks.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or HostClock()
        self._mark = self._clock.mark
        # To be added to this host's wall clock, so that all ranks have one.
        self.clock_offset_s = 0.0
        self._begin: Any = None
        # Of every action: the mark of its wait or None, of its start, of its end.
        self._marks: list[Any] = []
        self._waited: Any = None

    def begin(self) -> None:
        """A step begins."""
        self._marks = []
        self._waited = None
        self._begin = self._mark()

    def waits(self) -> None:
        """The device starts to wait for the input of its next action."""
        if self._waited is None:
            self._waited = self._mark()

    def starts(self) -> None:
        """The next action starts."""
        self._marks.append(self._waited)
        self._waited = None
        self._marks.append(self._mark())

    def ends(self) -> None:
        """The action that started last has ended."""
        self._marks.append(self._mark())

    def ends_beside(self) -> None:
        """The next action ran beside the one that has ended, and has its times."""
        self._marks += [None, *self._marks[-2:]]

    def begin_at(self) -> float:
        """The wall-clock time of the last step's begin in seconds, to lay ranks beside each other.

        By this host's clock and `clock_offset_s`. May wait for the device. 0 where no step has begun.
        """
        if self._begin is None:
            return 0.0
        since_begin_s = self._clock.seconds(self._begin, self._mark())
        return time.time() + self.clock_offset_s - since_begin_s

    def times(self) -> list[ActionTime]:
        """The actions of the last step that have ended, in the device's order."""
        marks, seconds = self._marks, self._clock.seconds
        return [
            ActionTime(
                start_s=seconds(self._begin, marks[first + 1]),
                end_s=seconds(self._begin, marks[first + 2]),
                waiting_s=0.0 if marks[first] is None else seconds(marks[first], marks[first + 1]),
            )
            for first in range(0, len(marks) - len(marks) % 3, 3)
        ]


class NullRecorder(Recorder):
    """Records nothing."""

    def _skip(self) -> None:
        """Record nothing."""

    begin = waits = starts = ends = ends_beside = _skip
