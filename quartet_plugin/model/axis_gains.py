"""What each axis of a winner gave: its predicted speed over the best plan with the axis as in the command."""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from quartet_plugin.model.measurement import Objective
from quartet_plugin.model.schema import ADDED, Bounds, Length, read_record, record

FILE_NAME = "axes.json"
MAX_GAINS_BYTES = 1 << 16

AxisName = Literal["shape", "degrees", "micro-batch", "schedule", "split", "mapping", "options"]


@record
class AxisGain:
    """One axis in which the winner differs from the user's command.

    `gain` is the winner's objective over that of `best_without`, the best plan known that has the axis as the
    command has it, both predicted by the calibrated cost model; 1 or less where another plan needs no change
    of the axis to be as fast. The axes help one another, so that gains do not multiply to the speedup.
    """

    axis: AxisName
    gain: Annotated[float, Bounds(gt=0.0, lt=1e9)]
    best_without: Annotated[str, Length(most=400)]


@record
class AxisGains:
    """The axes in which a winner differs, in the order in which a plan is made.

    `why_none` says why there are no gains, in words that end a sentence; None where there are some.
    """

    objective: Objective
    gains: Annotated[tuple[AxisGain, ...], Length(most=7)]
    schema_version: Literal[1] = 1
    why_none: Annotated[str, Length(least=1, most=200)] | None = field(default=None, metadata=ADDED)


def read_axis_gains(path: Path) -> AxisGains:
    """Read gains. Raises ConfigError in one line: the field, the value and the rule."""
    return read_record(AxisGains, path, max_bytes=MAX_GAINS_BYTES)
