"""Options of `quartet schedule` that are more than a number: placement, chunks, split, and their limits."""

import math
import time
from dataclasses import dataclass

from quartet_plugin.errors import UsageError
from quartet_plugin.model.files import shown

AUTO = "auto"
EVEN = "even"
PLACEMENTS = ("linear", "loop", "v", "snake")

_RESERVE_S = 0.25  # of a core, to write the result and to end

Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CommandClock:
    """What is left of a limit on the whole command."""

    started_s: float
    limit_s: float | None

    @property
    def spent_s(self) -> float:
        """Seconds since the process started."""
        return time.monotonic() - self.started_s

    def left_s(self, *, compiled_s: float) -> float | None:
        """Seconds to search in, less a reserve that grows with how busy the machine was so far."""
        if self.limit_s is None:
            return None
        crowding = min(8.0, max(1.0, self.spent_s / max(0.1, time.process_time())))
        reserve = min(_RESERVE_S * crowding, 0.3 * self.limit_s)
        return max(0.0, self.limit_s - (self.spent_s - compiled_s) - reserve)


def parse_placement(text: str) -> str | Counts:
    """`auto`, a shape's name, or a list of devices like `0,1,1,0`; raises UsageError."""
    if text in (AUTO, *PLACEMENTS):
        return text
    rule = f"must be auto, {', '.join(PLACEMENTS)}, or a list like 0,1,1,0"
    return _numbers(text, option="--placement", rule=rule)


def parse_chunks(text: str) -> int | None:
    """A number of stages a device, None for `auto`; raises UsageError."""
    if text == AUTO:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and int(text) >= 1):
        raise UsageError(f"--chunks: {shown(text)}: must be auto or a number from 1")
    return int(text)


def parse_split(text: str) -> str | Counts:
    """`auto`, `even`, or counts like `3,2,2`; raises UsageError."""
    if text in (AUTO, EVEN):
        return text
    return _numbers(text, option="--split", rule="must be auto, even, or counts like 3,2,2, one a stage")


def check_effort(*, time_limit: float | None, evaluations: int | None, seed: int) -> None:
    """Raise UsageError for limits of a search that make no sense."""
    if time_limit is not None and evaluations is not None:
        raise UsageError("--time-limit and --evaluations: both are given; give only one")
    if time_limit is not None and not (math.isfinite(time_limit) and time_limit > 0):
        raise UsageError(f"--time-limit: {time_limit}: must be a number of seconds above 0")
    if evaluations is not None and evaluations < 1:
        raise UsageError(f"--evaluations: {evaluations}: must be at least 1")
    if seed < 0:
        raise UsageError(f"--seed: {seed}: must be at least 0")


def _numbers(text: str, *, option: str, rule: str) -> Counts:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) <= 6 for part in parts):
        raise UsageError(f"{option}: {shown(text)}: {rule}")
    return tuple(map(int, parts))
