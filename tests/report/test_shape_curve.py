"""The curve of throughput against shape: its lines and its figure."""

from dataclasses import replace

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.plan import Split
from quartet_plugin.model.schema import dump, parse
from quartet_plugin.model.shape_curve import ShapeCurve, ShapePoint
from quartet_plugin.report.shape_curve import MAX_LINES, shape_figure, shape_lines
from quartet_plugin.report.status import status_lines
from tests.report.histories import WINNER, history


def point(layers: int, hidden: int, *, measured: float | None, predicted: float | None) -> ShapePoint:
    return ShapePoint(
        label=f"{layers}x{hidden}",
        num_layers=layers,
        hidden_size=hidden,
        measured=measured,
        trial=None if measured is None else layers,
        predicted=predicted,
    )


CURVE = ShapeCurve(
    objective="model_flops_per_s_per_device",
    own_label="12x512",
    points=(
        point(6, 704, measured=1.25, predicted=1.2),
        point(12, 512, measured=1.0, predicted=1.0),
        point(24, 384, measured=None, predicted=0.81),
        point(48, 256, measured=None, predicted=None),
    ),
)


def test_lines() -> None:
    assert shape_lines(CURVE) == [
        "shapes    6x704   1.25x measured (trial 6), 1.20x the best fitted",
        "          12x512  1.00x measured (trial 12), 1.00x the best fitted, your command",
        "          24x384  0.81x predicted",
        "          48x256  not measured",
    ]


def test_the_winners_shape_has_the_speedup_of_its_final_rounds() -> None:
    ffn_size = WINNER.made_for.shape.ffn_size_at(704)
    shape = replace(WINNER.shape, num_layers=6, hidden_size=704, ffn_hidden_size=ffn_size)
    winner = replace(WINNER, shape=shape, split=Split(transformer_layers_per_stage=(3, 3)))
    first, *others = shape_lines(CURVE, winner=winner)
    assert first.endswith("1.20x the best fitted; 1.25x in the final rounds (trial 2)")
    assert others == shape_lines(CURVE)[1:]
    assert first in status_lines(history(winner=winner, shape_curve=CURVE))
    assert shape_lines(CURVE, winner=replace(winner, measurement=None)) == shape_lines(CURVE)


def test_of_many_shapes_the_best_and_the_own_one_are_listed() -> None:
    many = [point(100 + i, 512, measured=None, predicted=2.0 + i) for i in range(MAX_LINES + 3)]
    lines = shape_lines(replace(CURVE, points=(*many, CURVE.points[1])))
    assert len(lines) == MAX_LINES + 2
    assert "12x512" in lines[-2]
    assert lines[-1].split() == ["3", "more", "shapes;", "the", "best", "13", "are", "shown"]


def test_figure_has_every_shape_and_needs_two_values() -> None:
    drawn = shape_figure(CURVE)
    assert drawn is not None
    assert drawn.count("<circle") == 5
    assert "24x384: 0.81x predicted" in drawn
    assert "your command" in drawn
    assert shape_figure(replace(CURVE, points=CURVE.points[2:])) is None


def test_a_measured_shape_has_a_trial() -> None:
    entry = dump(CURVE)
    assert parse(ShapeCurve, entry, where="shapes") == CURVE
    entry["points"][0]["trial"] = None
    with pytest.raises(ConfigError, match="trial"):
        parse(ShapeCurve, entry, where="shapes")
