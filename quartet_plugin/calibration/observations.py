"""What a told trial says about times: its iterations, and its actions where the ranks recorded them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quartet_plugin.errors import QuartetError

# Which of forward, input and weight gradient an action is.
_DIRECTIONS: dict[str, tuple[int, ...]] = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}
_NORMAL_MAD = 1.4826


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAction:
    """The median seconds of a stage's actions of one kind; `directions`: 0 forward, 1 input, 2 weight."""

    stage: int
    directions: tuple[int, ...]
    seconds: float


def action_times(folder: Path, *, attempt_id: str) -> tuple[MeasuredAction, ...]:
    """What the attempt of a trial's folder recorded of its actions; nothing where it recorded none.

    Only a schedule of ours leaves records, and a file that breaks its format is worth nothing.
    """
    from quartet_plugin.protocol.rank_files import read_actions, seconds_by_stage

    if not attempt_id or not folder.is_dir():
        return ()
    for attempt in sorted(folder.glob("attempt-*")):
        try:
            sheets = read_actions(attempt)
        except QuartetError:
            continue
        if sheets[0].attempt_id != attempt_id:
            continue
        return tuple(
            MeasuredAction(stage=stage, directions=_DIRECTIONS[kind], seconds=middle)
            for (stage, kind), times in sorted(seconds_by_stage(sheets).items())
            if (middle := statistics.median(times)) > 0
        )
    return ()


def spread_of(iteration_s: Sequence[float]) -> float:
    """How uncertain the median of a launch's iterations is, relative: a robust standard error."""
    middle = statistics.median(iteration_s)
    off = statistics.median(abs(one - middle) for one in iteration_s) * _NORMAL_MAD
    return float(off / middle / len(iteration_s) ** 0.5)
