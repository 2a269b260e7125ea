"""Shows throughput against shape at an equal budget: lines for a terminal and a figure for the report."""

from collections.abc import Sequence

from quartet_plugin.model.plan import Plan
from quartet_plugin.model.shape_curve import ShapeCurve, ShapePoint
from quartet_plugin.report.formatting import clean, speedup_words
from quartet_plugin.report.svg import Scale, drawing, element, text, title, x_axis, y_axis

WIDTH, BOTTOM, LEFT, TOP = 520.0, 250.0, 64.0, 14.0
# Shapes that the terminal lists.
MAX_LINES = 12


def shape_lines(curve: ShapeCurve, *, winner: Plan | None = None) -> list[str]:
    """A line each shape, from shallow and wide to deep and narrow; of many shapes the best ones.

    The line of the winner's shape has the speedup of its final rounds as well.
    """
    points = _best_points(curve)
    width = max(len(point.label) for point in points)
    lines = []
    for index, point in enumerate(points):
        head = "shapes" if index == 0 else ""
        remark = ", your command" if point.label == curve.own_label else ""
        remark += _final_words(winner) if winner is not None and winner.shape_label == point.label else ""
        lines.append(f"{head:<10}{clean(point.label):<{width}}  {_words(point)}{remark}")
    left_out = len(curve.points) - len(points)
    if left_out:
        lines.append(f"{'':<10}{left_out} more shapes; the best {len(points)} are shown")
    return lines


def _best_points(curve: ShapeCurve) -> list[ShapePoint]:
    ranked = sorted(curve.points, key=lambda point: -(point.measured or point.predicted or 0.0))
    kept = ranked[:MAX_LINES]
    return [point for point in curve.points if point in kept or point.label == curve.own_label]


def _final_words(winner: Plan) -> str:
    if winner.measurement is None:
        return ""
    speedup = speedup_words(winner.measurement.speedup.median)
    return f"; {speedup} in the final rounds (trial {winner.provenance.trial})"


def _words(point: ShapePoint) -> str:
    """The single measurement, and the calibrated model's value: fitted to it, or predicted without one."""
    parts = []
    if point.measured is not None:
        parts.append(f"{speedup_words(point.measured)} measured (trial {point.trial})")
    if point.predicted is not None:
        # Of the best plan of the shape, which need not be the one that was measured.
        kind = "predicted" if point.measured is None else "the best fitted"
        parts.append(f"{speedup_words(point.predicted)} {kind}")
    return ", ".join(parts) or "not measured"


def shape_figure(curve: ShapeCurve) -> str | None:
    """Throughput over the user's own against hidden size over layers; None with fewer than two values."""
    values = [value for point in curve.points for value in (point.measured, point.predicted) if value]
    if len(values) < 2:
        return None
    ratios = [point.hidden_size / point.num_layers for point in curve.points]
    x = Scale.over(ratios, start=LEFT, end=WIDTH - 12, is_log=True)
    y = Scale.over(values, start=BOTTOM, end=TOP, include=(1.0,))
    parts = [
        x_axis(x, BOTTOM, top=TOP, words="hidden size over layers: deep to wide", count=5),
        y_axis(y, LEFT, right=WIDTH - 12, words="throughput over your command", unit="x"),
        element("line", x1=x.start, y1=y(1.0), x2=x.end, y2=y(1.0), cls="reference"),
        _line(curve.points, x, y),
    ]
    for point in curve.points:
        place = x(point.hidden_size / point.num_layers)
        words = f"{clean(point.label)}: {_words(point)}"
        if point.predicted is not None:
            style = "unstable"
            parts.append(element("circle", title(words), cx=place, cy=y(point.predicted), r=4.0, cls=style))
        if point.measured is not None:
            style = "measured"
            parts.append(element("circle", title(words), cx=place, cy=y(point.measured), r=4.0, cls=style))
        if point.label == curve.own_label:
            parts.append(text(place, TOP - 2, "your command", cls="tick", anchor="middle"))
    return drawing(WIDTH, BOTTOM + 44, *parts, label="Throughput of each shape at an equal budget")


def _line(points: Sequence[ShapePoint], x: Scale, y: Scale) -> str:
    """The line through the predictions, in the order of the shapes."""
    places = [
        f"{x(point.hidden_size / point.num_layers):.1f} {y(point.predicted):.1f}"
        for point in points
        if point.predicted is not None
    ]
    return element("path", d="M" + "L".join(places), cls="rug", fill="none") if len(places) > 1 else ""
