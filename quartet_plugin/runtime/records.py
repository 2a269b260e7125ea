"""Start, end and wait of every action, at the cost of two clock reads an action.

As in a simulation: seconds since the step's begin, one entry an action, in the device's order.
"""

import time
from collections import deque
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
        """From one mark to a later one. May wait for the device."""


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


@dataclass(slots=True)
class _Step:
    begin: Any
    begin_at: float
    marks: list[Any]  # waits or None, start, end of every action


class Recorder:
    """Keeps the times of the last `keep` steps. An executor calls `begin`, `waits`, `starts` and `ends`."""

    def __init__(self, clock: Clock | None = None, *, keep: int = 1) -> None:
        """`keep` bounds the memory: one step costs three marks an action."""
        self._clock: Clock = clock or HostClock()
        self._steps: deque[_Step] = deque(maxlen=keep)
        self._marks: list[Any] = []
        self._waited: Any = None
        self._mark = self._clock.mark

    def begin(self) -> None:
        """A step begins."""
        self._marks = []
        self._waited = None
        self._steps.append(_Step(begin=self._mark(), begin_at=time.time(), marks=self._marks))

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
        """The action that started last ends."""
        self._marks.append(self._mark())

    @property
    def num_steps(self) -> int:
        """How many steps are kept."""
        return len(self._steps)

    def begin_at(self, step: int = -1) -> float:
        """Wall-clock seconds of a kept step's begin, to lay ranks beside each other."""
        return self._steps[step].begin_at

    def times(self, step: int = -1) -> list[ActionTime]:
        """The actions of a kept step (the last by default), in the device's order."""
        kept, seconds = self._steps[step], self._clock.seconds
        marks = kept.marks
        return [
            ActionTime(
                start_s=seconds(kept.begin, marks[first + 1]),
                end_s=seconds(kept.begin, marks[first + 2]),
                waiting_s=0.0 if marks[first] is None else seconds(marks[first], marks[first + 1]),
            )
            for first in range(0, len(marks) - len(marks) % 3, 3)
        ]


class NullRecorder(Recorder):
    """Records nothing."""

    def _skip(self) -> None:
        """Nothing."""

    begin = waits = starts = ends = _skip
