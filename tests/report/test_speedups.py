"""A winner's predicted speedup stands beside the measured one."""

from dataclasses import replace

import pytest

from quartet_plugin.model.measurement import Prediction
from quartet_plugin.model.plan import Plan
from quartet_plugin.report.page import Extras, page
from quartet_plugin.report.speedups import predicted_speedup, speedup_pair
from quartet_plugin.report.status import status_lines
from tests.report.histories import WINNER, history

PREDICTED = replace(
    WINNER, prediction=Prediction(iteration_s=0.38, relative_cost=0.8, peak_memory_bytes=None)
)


def test_both_are_shown() -> None:
    """Your command took 0.5 s per iteration."""
    assert predicted_speedup(PREDICTED) == pytest.approx(0.5 / 0.38)
    words = "1.25x (1.19x to 1.31x), measured in turns; predicted 1.32x"
    assert speedup_pair(PREDICTED) == words
    run = history(winner=PREDICTED)
    assert f"winner    trial 2: {words}" in status_lines(run)
    assert "Predicted before its launch: 1.32x." in page(run, Extras())


@pytest.mark.parametrize(
    "plan",
    [
        replace(WINNER, prediction=None),
        replace(WINNER, prediction=Prediction(iteration_s=None, relative_cost=0.8, peak_memory_bytes=None)),
    ],
)
def test_an_unpredicted_winner_has_its_measured_speedup_alone(plan: Plan) -> None:
    assert speedup_pair(plan) == "1.25x (1.19x to 1.31x), measured in turns"
    assert "Predicted before" not in page(history(winner=plan), Extras())


def test_equal_work_of_another_shape_counts_as_the_objective_counts_it() -> None:
    assert PREDICTED.measurement is not None
    shape = replace(PREDICTED.shape, num_layers=2 * PREDICTED.shape.num_layers)
    work = shape.model_flops_per_sequence / PREDICTED.shape.model_flops_per_sequence
    by_flops = replace(PREDICTED.measurement, objective="model_flops_per_s_per_device")
    larger = replace(
        PREDICTED,
        shape=shape,
        split=replace(PREDICTED.split, transformer_layers_per_stage=(8, 8)),
        measurement=by_flops,
    )
    assert predicted_speedup(larger) == pytest.approx(work * 0.5 / 0.38)
