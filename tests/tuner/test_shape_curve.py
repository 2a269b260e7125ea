"""A search over several shapes keeps what each reached and is predicted to reach."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from quartet_plugin.model.shape_curve import read_shape_curve
from quartet_plugin.report.status import status_lines, status_record
from quartet_plugin.tuner.history import read_history
from quartet_plugin.tuner.tune_result import write_best
from tests.tuner.fakes import FakeMachine, tune
from tests.tuner.fakes import begin_with_journal as begin

SEARCH: dict[str, Any] = {"mapping": "stock", "schedule": ["no-pipelining", "1f1b"]}


def test_a_search_over_shapes_keeps_its_curve(tmp_path: Path) -> None:
    study = {"trials": 8, "rounds": 3, "top_k": 1}
    run = begin(tmp_path / "r", search={**SEARCH, "scaling": {"tolerance": 0.2}}, study=study)
    result = tune(run, FakeMachine())
    curve = result.shape_curve
    assert curve is not None
    assert len(curve.points) > 1
    mine = next(point for point in curve.points if point.label == curve.own_label)
    assert mine.measured is not None
    assert mine.measured >= 1.0  # the baseline is one of its plans
    ratios = [point.hidden_size / point.num_layers for point in curve.points]
    assert ratios == sorted(ratios, reverse=True)
    assert all(point.predicted for point in curve.points)
    write_best(result, run=run)
    assert read_shape_curve(run.folder.best_shapes) == curve
    history = read_history(run.folder.path)
    assert any(line.startswith("shapes") for line in status_lines(history))
    assert status_record(history)["shapes"]["own_label"] == curve.own_label
    write_best(replace(result, shape_curve=None), run=run)
    assert not run.folder.best_shapes.exists()


def test_one_shape_is_no_curve(tmp_path: Path) -> None:
    run = begin(tmp_path / "r", search=SEARCH, study={"trials": 4, "rounds": 3, "top_k": 1})
    assert tune(run, FakeMachine()).shape_curve is None
