"""The search and the final rounds share a time that is too short for all that was asked."""

import itertools
from pathlib import Path

import pytest

from quartet_plugin.model.plan import Plan
from quartet_plugin.trial.request import TrialRequest
from quartet_plugin.tuner.context import TimeBudget
from quartet_plugin.tuner.time_share import finalists_in_time, iterations_in_time
from tests.space.jobs import make_job, make_layout, make_nodes
from tests.tuner.fakes import FakeMachine, by_formula, tune
from tests.tuner.fakes import begin_with_journal as begin


def budget(limit_s: float | None, *, launch_s: float) -> TimeBudget:
    """A budget of which one launch is spent."""
    clock = itertools.chain([0.0], itertools.repeat(launch_s))
    made = TimeBudget(limit_s=limit_s, clock=lambda: next(clock))
    made.add(launch_s)
    return made


@pytest.mark.parametrize(
    ("limit_s", "expected"), [(None, 10), (6000.0, 10), (800.0, 5), (600.0, 4), (100.0, 4)]
)
def test_trials_measure_fewer_iterations_where_time_is_short(limit_s: float | None, expected: int) -> None:
    found = iterations_in_time(10, iteration_s=2.6, budget=budget(limit_s, launch_s=42.0))
    assert found == expected


def test_the_share_that_measures_is_of_the_session_or_of_launches_beside_each_other() -> None:
    now = [100.0]
    spent = TimeBudget(limit_s=None, clock=lambda: now[0])
    assert spent.measured_share is None
    now[0] = 140.0
    spent.add_measured(10.0, wall_s=30.0)
    assert spent.measured_share == pytest.approx(10 / 40), "10 s went into no launch"
    spent.add_measured(10.0, wall_s=30.0)
    assert spent.measured_share == pytest.approx(20 / 60), "two launches at once"
    now[0] = 200.0
    assert spent.measured_share == pytest.approx(20 / 100)


def test_what_was_asked_is_never_more() -> None:
    assert iterations_in_time(2, iteration_s=2.6, budget=budget(100.0, launch_s=42.0)) == 2


@pytest.mark.parametrize(("limit_s", "expected"), [(None, 3), (242.0, 3), (202.0, 2), (142.0, 1), (10.0, 1)])
def test_fewer_plans_go_to_the_final_rounds(limit_s: float | None, expected: int) -> None:
    given = budget(limit_s, launch_s=10.0)
    assert finalists_in_time(3, num_rounds=5, num_proofs=2, budget=given) == expected


@pytest.mark.parametrize("keeps_weights", [True, False], ids=["compared in trials", "compared apart"])
def test_ten_minutes_for_slow_iterations_are_enough_for_five_plans_and_a_proof(
    tmp_path: Path, keeps_weights: bool
) -> None:
    """3 processes, 12 layers and 2.6 s per iteration: once no plan at all was tried in this time."""
    now, iteration_s, start_s = [0.0], 2.6, 8.0
    job = make_job(layout=make_layout(pipeline_parallel=3, data_parallel=1))
    machine = FakeMachine(job=job, cluster=make_nodes(3), keeps_weights=keeps_weights)

    def took(request: TrialRequest) -> None:
        machine.wall_s = start_s + iteration_s * (request.warmup + request.measure)
        now[0] += machine.wall_s

    def gate(plan: Plan) -> bool:
        now[0] += start_s + 5 * iteration_s
        return True

    machine.on_launch, machine.gate = took, gate
    machine.seconds = lambda plan: by_formula(plan) * (0.7 if plan.schedule.custom is not None else 1.0)
    result = tune(begin(tmp_path / "r"), machine, max_minutes=10.0, clock=lambda: now[0])
    tried = [trial for trial in result.trials if trial.number and trial.record.verdict == "measured"]
    assert len(tried) >= 5
    assert result.winner is not None
    assert result.winner.is_win
    assert now[0] <= 600.0
