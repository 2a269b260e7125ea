"""A search that has ended says what each axis of its winner gave."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quartet_plugin.model.axis_gains import read_axis_gains
from quartet_plugin.model.plan import Mapping, Plan
from quartet_plugin.report.status import status_lines, status_record
from quartet_plugin.tuner.axis_gains import axis_gains_of
from quartet_plugin.tuner.history import read_history
from quartet_plugin.tuner.tune_result import write_best
from tests.model.plans import PLAN, plan_with
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


def test_a_winner_of_a_search_without_the_cost_model_says_why_it_has_no_gains(tmp_path: Path) -> None:
    search = {"pipeline_parallel": 2, "schedule": ["1f1b"], "mapping": "stock", "split": ["6+2", "even"]}
    study = {"trials": 8, "rounds": 4, "top_k": 2, "starts": "none"}
    run = begin(tmp_path / "r", search=search, study=study)
    result = tune(run, FakeMachine(seconds=slow_head))
    assert result.winner is not None
    assert result.axis_gains is not None
    assert result.axis_gains.gains == ()
    assert "study.starts: none" in (result.axis_gains.why_none or "")
    write_best(result, run=run)
    history = read_history(run.folder.path)
    (line,) = [line for line in status_lines(history) if line.startswith("axes")]
    assert line.startswith("axes      no figures: study.starts: none")
    assert status_record(history)["axes"]["why_none"] == result.axis_gains.why_none


@dataclass(kw_only=True)
class Model:
    """A proposer and its predictor, which can predict the plans but for those that are `unknown`."""

    unknown: tuple[Plan, ...] = ()
    is_ready: bool = True

    @property
    def predictor(self) -> "Model":
        return self

    def learn(self, trials: Any) -> None: ...

    def knows(self, plan: Plan) -> bool:
        return plan not in self.unknown

    def final_plans(self) -> list[Any]:
        return []

    def predict(self, plans: list[Plan]) -> list[Plan]:
        return plans

    def log_speedup(self, plan: Plan, prediction: Any) -> float:
        return 0.0


class NoSpace:
    """A space that holds no plan."""

    def params_of(self, plan: Plan) -> None:
        return None


def result_of(winner: Plan) -> Any:
    """A search of which `winner` came out, without its trials."""
    return SimpleNamespace(winner=winner, best=winner, baseline=PLAN, trials=(), objective="tokens_per_s")


OTHER = plan_with(mapping=Mapping(slots=tuple(reversed(PLAN.mapping.slots))))


@pytest.mark.parametrize(
    ("winner", "model", "reason"),
    [
        (OTHER, Model(unknown=(OTHER,)), "the cost model cannot predict the best plan"),
        (OTHER, Model(unknown=(PLAN,)), "the cost model cannot predict the baseline"),
        (OTHER, Model(is_ready=False), "the cost model cannot predict the best plan"),
        (PLAN, Model(), "the best plan has each of these axes as the baseline has it"),
    ],
    ids=["best plan", "baseline", "nothing learned", "no axis differs"],
)
def test_a_winner_without_gains_says_why(winner: Plan, model: Any, reason: str) -> None:
    space: Any = NoSpace()
    gains = axis_gains_of(space, result_of(winner), proposer=model)
    assert gains is not None
    assert (gains.gains, gains.why_none) == ((), reason)


def test_without_a_winner_nothing_gave_anything(tmp_path: Path) -> None:
    run = begin(tmp_path / "r", search=SEARCH, study={"trials": 3, "rounds": 3, "top_k": 1})
    result = tune(run, FakeMachine(seconds=lambda plan: 1.0))
    assert result.winner is None
    assert result.axis_gains is None
