"""A search that has ended says what each axis of its winner gave."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from quartet_plugin.model.axis_gains import read_axis_gains
from quartet_plugin.model.plan import Plan
from quartet_plugin.report.status import status_lines, status_record
from quartet_plugin.tuner.history import read_history
from quartet_plugin.tuner.tune_result import write_best
from tests.tuner.fakes import FakeMachine, tune
from tests.tuner.fakes import begin_with_journal as begin

SEARCH: dict[str, Any] = {
    "pipeline_parallel": 2,
    "schedule": ["1f1b"],
    "mapping": ["stock", "1,0"],
}


def slow_head(plan: Plan) -> float:
    """Seconds of the busiest stage: the head weighs as much as three layers, whatever the order of ranks."""
    first, last = plan.split.transformer_layers_per_stage
    return 0.1 * max(first, last + 3)


def test_only_what_differs_and_helps_is_said_to_have_given_something(tmp_path: Path) -> None:
    run = begin(tmp_path / "r", search=SEARCH, study={"trials": 8, "rounds": 4, "top_k": 2})
    result = tune(run, FakeMachine(seconds=slow_head))
    assert result.winner is not None
    first, last = result.best.split.transformer_layers_per_stage
    assert first > last
    gains = result.axis_gains
    assert gains is not None
    by_axis = {gain.axis: gain for gain in gains.gains}
    measured = slow_head(result.baseline) / slow_head(result.best)
    assert math.isclose(by_axis.pop("split").gain, measured, rel_tol=0.15)
    # The machine does not know of any other axis.
    assert set(by_axis) <= {"mapping", "micro-batch"}
    assert all(gain.gain < 1.05 for gain in by_axis.values())
    write_best(result, run=run)
    assert read_axis_gains(run.folder.best_axes) == gains
    history = read_history(run.folder.path)
    assert any(line.startswith("axes") and "layers per stage" in line for line in status_lines(history))
    assert status_record(history)["axes"]["gains"][0]["axis"] == gains.gains[0].axis
    write_best(replace(result, axis_gains=None), run=run)
    assert not run.folder.best_axes.exists()


def test_without_a_winner_nothing_gave_anything(tmp_path: Path) -> None:
    run = begin(tmp_path / "r", search=SEARCH, study={"trials": 3, "rounds": 3, "top_k": 1})
    result = tune(run, FakeMachine(seconds=lambda plan: 1.0))
    assert result.winner is None
    assert result.axis_gains is None
