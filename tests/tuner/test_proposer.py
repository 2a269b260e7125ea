"""Calibration in the loop: the study finds the best plan early although the constants are wrong."""

import random
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.model.plan import Plan
from quartet_plugin.planner import candidate_plans
from quartet_plugin.planner.plan_scorer import expected_improvement
from quartet_plugin.space.param_sources import RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.space.schedules import custom_order
from quartet_plugin.space.searched_orders import stored_order
from quartet_plugin.tuner.config import parse_config
from quartet_plugin.tuner.tune_result import TuneResult
from tests.calibration.truth import Truth
from tests.space.jobs import make_job, make_layout, make_nodes
from tests.tuner.fakes import FakeMachine, Killed, Watching, by_formula, resume, tune
from tests.tuner.fakes import begin_with_journal as begin

FULL_SEARCHES = True  # read by `short_searches`

WRONG = {"speed": 3.0, "head": 3.0, "transfer": 10.0, "network": 10.0, "embedding": 2.0, "launch": 0.5}
SEARCH = {"schedule": ["no-pipelining", "1f1b", "interleaved"]}
NEAR = 1.02


@given(st.floats(-2.0, 2.0), st.floats(0.01, 1.0))
@settings(max_examples=50, deadline=None)
def test_the_expected_gain_is_the_mean_of_what_is_above_zero(lead: float, spread: float) -> None:
    values = lead + spread * np.linspace(-8.0, 8.0, 20_001)
    weights = np.exp(-0.5 * ((values - lead) / spread) ** 2)
    mean = float((np.maximum(values, 0.0) * weights).sum() / weights.sum())
    assert expected_improvement(lead, spread) == pytest.approx(mean, abs=2e-4)


def machine_of(*nodes: int, noise: float = 0.005, **truth: Any) -> tuple[FakeMachine, Space]:
    layout = make_layout(pipeline_parallel=sum(nodes))
    job, cluster = make_job(layout=layout), make_nodes(*nodes)
    space = build_space(
        job, nodes=cluster, search=parse_config({"search": SEARCH}, where="t").search, run="r", seed=0
    )
    seconds = Truth(cluster, **truth)
    return FakeMachine(job=job, cluster=cluster, seconds=seconds, noise=noise), space


@cache
def best_of_draws(*nodes: int, **truth: Any) -> float:
    """Seconds of the fastest of many plans drawn by chance; a search may find a faster one."""
    machine, space = machine_of(*nodes, **truth)
    generator = random.Random(0)
    return min(machine.seconds(space.decode(RandomParams(generator), trial=0)) for _ in range(4000))


def seconds_of_trials(folder: Path, case: str, **study: Any) -> list[float]:
    """True seconds of a study's trials in turn, the baseline and repeated plans left out."""
    nodes, truth = CASES[case]
    machine, _ = machine_of(*nodes, **truth)
    settings = {"rounds": 3, "top_k": 1, "control": 0, **study}
    result = tune(begin(folder, search=SEARCH, study=settings), machine)
    return [machine.seconds(trial.plan) for trial in result.trials[1:] if trial.record.repeats is None]


def count_until_near(seconds: list[float], *, best: float) -> int:
    """Trials until a plan within 2 % of the best was measured; one more than there are where none was."""
    near = (count for count, value in enumerate(seconds, start=1) if value <= NEAR * best)
    return next(near, len(seconds) + 1)


CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "heavy head": ((2,), {**WRONG, "residual": 0.01}),
    "slow links": ((2, 2), {**WRONG, "network": 30.0, "residual": 0.01}),
    "unequal slots": ((3,), {"speed": 2.0, "slowdowns": (0.5, 1.0, 1.0), "residual": 0.01}),
}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name", ["heavy head", pytest.param("slow links", marks=pytest.mark.nightly), "unequal slots"]
)
def test_wrong_constants_do_not_keep_the_best_plan_from_being_found_early(tmp_path: Path, name: str) -> None:
    nodes, truth = CASES[name]
    searches = [
        seconds_of_trials(tmp_path / f"{seed}" / "r", name, trials=10, seed=seed) for seed in range(3)
    ]
    best = min(best_of_draws(*nodes, **truth), *map(min, searches))
    counts = [count_until_near(seconds, best=best) for seconds in searches]
    assert statistics.median(counts) <= 10, counts


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_sampler_alone_needs_five_times_as_many(tmp_path: Path) -> None:
    """On unequal slots, where few of the plans are near the best."""
    case = "unequal slots"
    nodes, truth = CASES[case]

    def searches(starts: str, *, trials: int) -> list[list[float]]:
        folders = [tmp_path / starts / f"{seed}" / "r" for seed in range(3)]
        return [
            seconds_of_trials(folder, case, trials=trials, seed=seed, starts=starts)
            for seed, folder in enumerate(folders)
        ]

    def median_count(searches: list[list[float]], *, best: float) -> int:
        return statistics.median_low(count_until_near(seconds, best=best) for seconds in searches)

    planned = searches("auto", trials=10)
    best = min(best_of_draws(*nodes, **truth), *map(min, planned))
    sampled = searches("none", trials=5 * median_count(planned, best=best))
    best = min(best, *map(min, sampled))
    assert median_count(sampled, best=best) >= 5 * median_count(planned, best=best)


def outcomes(result: TuneResult) -> list[tuple[Any, ...]]:
    return [
        (
            trial.number,
            trial.plan.key,
            trial.record.value,
            trial.record.predicted_s,
            trial.record.predicted_spread,
        )
        for trial in result.trials
    ]


@pytest.mark.usefixtures("brief_searches")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_written", [False, True])
def test_a_killed_study_proposes_as_if_it_had_not_been(tmp_path: Path, is_written: bool) -> None:
    config: dict[str, Any] = {"search": SEARCH, "study": {"trials": 7, "rounds": 3, "top_k": 1, "explore": 3}}
    expected = tune(begin(tmp_path / "whole" / "r", **config), machine_of(2, **WRONG)[0])
    for dies_at in (1, 3, 6):
        machine, _ = machine_of(2, **WRONG)
        machine.dies_at, machine.dies_before_result = dies_at, not is_written
        folder = tmp_path / f"{dies_at}" / "r"
        with pytest.raises(Killed):
            tune(begin(folder, **config), machine)
        assert outcomes(tune(resume(folder), machine)) == outcomes(expected)


@pytest.mark.timeout(240)
def test_a_killed_study_has_the_orders_that_were_searched_for_its_measurements(tmp_path: Path) -> None:
    """What an order was made for is not known any more: the trial after it has corrected the costs."""
    search = {
        "pipeline_parallel": 4,
        "virtual_stages": 2,
        "schedule": ["zb-v", "searched"],
        "mapping": "stock",
    }
    config = {"search": search, "study": {"trials": 5, "rounds": 3, "top_k": 1, "explore": 0}}
    expected = tune(begin(tmp_path / "whole" / "r", **config), machine_of(4, **WRONG)[0])
    ordered = [trial for trial in expected.trials if trial.plan.schedule.label in ("searched", "family")]
    assert ordered
    for dies_at in (2, 5):
        machine, _ = machine_of(4, **WRONG)
        machine.dies_at, machine.dies_before_result = dies_at, True
        folder = tmp_path / f"{dies_at}" / "r"
        with pytest.raises(Killed):
            tune(begin(folder, **config), machine)
        custom_order.cache_clear()
        stored_order.cache_clear()
        assert outcomes(tune(resume(folder), machine)) == outcomes(expected)


def test_no_plan_is_proposed_twice_and_the_sampler_has_its_turns(tmp_path: Path) -> None:
    machine, _ = machine_of(2, **WRONG)
    study = {"trials": 12, "explore": 3, "rounds": 3, "top_k": 1, "storage": "sqlite"}
    run = begin(tmp_path / "r", search=SEARCH, study=study)
    result = tune(run, machine)
    searched = [key for folder, key in machine.launched if "round" not in folder and key is not None]
    assert len(searched) == len(set(searched)) == 12
    import optuna

    made = optuna.load_study(study_name="r", storage=f"sqlite:///{run.storage.file}")
    enqueued = ["fixed_params" in trial.system_attrs for trial in made.trials[1:]]
    assert enqueued[:2] == [True, True]
    assert not enqueued[2]
    assert all(
        trial.record.repeats is None for trial, was in zip(result.trials[1:], enqueued, strict=True) if was
    )


def test_without_turns_for_the_sampler_every_trial_is_the_rankers(tmp_path: Path) -> None:
    machine, _ = machine_of(2, **WRONG)
    run = begin(tmp_path / "r", search=SEARCH, study={"trials": 6, "explore": 0, "rounds": 3, "top_k": 1})
    result = tune(run, machine)
    assert all(trial.record.predicted_s is not None for trial in result.trials[1:])
    assert all(trial.record.repeats is None for trial in result.trials)


def test_which_layouts_are_left_out_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate_plans, "MAX_LAYOUTS", 3)
    machine, watching = machine_of(2, **WRONG)[0], Watching()
    study = {"trials": 2, "explore": 0, "rounds": 3, "top_k": 1}
    tune(begin(tmp_path / "r", search={"schedule": "1f1b"}, study=study), machine, observer=watching)
    (line,) = [line for line in watching.messages if "too large" in line]
    assert "layouts: 3 of " in line


def test_what_was_predicted_stands_beside_what_was_measured(tmp_path: Path) -> None:
    machine, _ = machine_of(2, **WRONG)
    seen: list[Plan] = []
    machine.on_launch = lambda request: seen.append(request.plan) if request.plan is not None else None
    run = begin(tmp_path / "r", search=SEARCH, study={"trials": 8, "explore": 0, "rounds": 3, "top_k": 1})
    result = tune(run, machine)
    for trial, plan in zip(result.trials[1:], seen, strict=False):
        assert plan.prediction is not None
        assert plan.prediction.iteration_s == trial.record.predicted_s
    off = [
        abs(np.log(trial.record.predicted_s / trial.record.iteration_s))
        for trial in result.trials[1:]
        if trial.record.predicted_s and trial.record.iteration_s
    ]
    assert statistics.mean(off[-3:]) < statistics.mean(off[:3])


def test_a_machine_unlike_any_cost_model_is_tuned_too(tmp_path: Path) -> None:
    """Times by FLOPs alone, and one schedule that takes twice as long as anything explains."""

    def seconds(plan: Plan) -> float:
        return by_formula(plan) * (2.0 if plan.layout.virtual_stages > 1 else 1.0)

    machine = FakeMachine(seconds=seconds)
    result = tune(begin(tmp_path / "r", search=SEARCH, study={"trials": 10}), machine)
    assert result.winner is not None
    assert result.winner.comparison.speedup.low > 1.0
