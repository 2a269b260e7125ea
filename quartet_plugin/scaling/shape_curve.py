"""The curve of throughput against shape, put together from what was measured and predicted."""

from collections.abc import Iterable, Mapping

from quartet_plugin.model.measurement import Objective
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.shape_curve import ShapeCurve, ShapePoint
from quartet_plugin.scaling.shapes import depth_width_ratio


def shape_curve(
    shapes: Iterable[ModelShape],
    *,
    objective: Objective,
    of_command: ModelShape,
    measured: Mapping[ModelShape, tuple[float, int]],
    predicted: Mapping[ModelShape, float],
) -> ShapeCurve:
    """The curve over `shapes`, the shallowest for its width first.

    `measured` are the objective over the user's command's with the trial's number, `predicted` the
    objective alone; shapes that are in neither are points without a value. `of_command` is the shape of the
    user's command.
    """
    points = []
    for shape in sorted(shapes, key=lambda shape: (-depth_width_ratio(shape), shape.label)):
        value, trial = measured.get(shape, (None, None))
        points.append(
            ShapePoint(
                label=shape.label_beside(of_command),
                num_layers=shape.num_layers,
                hidden_size=shape.hidden_size,
                measured=value,
                trial=trial,
                predicted=predicted.get(shape),
            )
        )
    return ShapeCurve(objective=objective, own_label=of_command.label, points=tuple(points))
