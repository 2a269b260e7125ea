"""Throughput against shape: what each shape of an equal budget reached, and is predicted to reach."""

from pathlib import Path
from typing import Annotated, Literal

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.measurement import Objective
from quartet_plugin.model.schema import Bounds, Length, read_record, record
from quartet_plugin.model.shape import MAX_HIDDEN, MAX_LAYERS

# Beside the plan of a run.
FILE_NAME = "shapes.json"
MAX_CURVE_BYTES = 1 << 20
MAX_POINTS = 4096

_Ratio = Annotated[float, Bounds(gt=0.0, lt=1e9)]


@record
class ShapePoint:
    """One shape: the objective of its best plan over the user's command's, `measured` and `predicted`.

    `trial` is the measured plan's. None where the shape was not measured, or the model predicts nothing.
    """

    label: Annotated[str, Length(most=200)]
    num_layers: Annotated[int, Bounds(ge=1, le=MAX_LAYERS)]
    hidden_size: Annotated[int, Bounds(ge=1, le=MAX_HIDDEN)]
    measured: _Ratio | None
    trial: Annotated[int, Bounds(ge=0, le=10**9)] | None
    predicted: _Ratio | None

    def __post_init__(self) -> None:
        if (self.measured is None) != (self.trial is None):
            raise ConfigError(f"trial: {self.trial}; must be set if and only if `measured` is set")


@record
class ShapeCurve:
    """The shapes of a search, the shallowest for its width first; `own_label` is that of the user's own."""

    objective: Objective
    own_label: Annotated[str, Length(most=200)]
    points: Annotated[tuple[ShapePoint, ...], Length(least=1, most=MAX_POINTS)]
    schema_version: Literal[1] = 1


def read_shape_curve(path: Path) -> ShapeCurve:
    """Read a curve. Raises ConfigError in one line: the field, the value and the rule."""
    return read_record(ShapeCurve, path, max_bytes=MAX_CURVE_BYTES)
