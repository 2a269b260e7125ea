"""What a search may have missed: the estimate's arithmetic, and how often it holds what was missed."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.calibration.machine_prior import machine_model_of_space
from quartet_plugin.calibration.plan_gp import GpObservations, draw, features_of, joint
from quartet_plugin.calibration.predictor import PlanPredictor
from quartet_plugin.model.measurement import Comparison, Interval, Measurement, Regret, read_regret
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord
from quartet_plugin.space.param_sources import RandomParams
from quartet_plugin.space.plan_label import plan_label
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.tuner.config import parse_config
from quartet_plugin.tuner.finalists import bootstrap_median
from quartet_plugin.tuner.regret import estimate_regret, noise_of_rounds, untried_plans
from quartet_plugin.tuner.sequential_test import fit
from quartet_plugin.tuner.tune_result import TuneResult, write_best
from quartet_plugin.tuner.winner_choice import FinalistResult
from tests.space.jobs import make_job, make_layout, make_nodes
from tests.tuner.fakes import FakeMachine, resume, tune
from tests.tuner.fakes import begin_with_journal as begin

NOISE = 0.02


@cache
def a_space() -> Space:
    config = parse_config({"search": {"schedule": ["no-pipelining", "1f1b", "interleaved"]}}, where="x")
    job = make_job(layout=make_layout(data_parallel=2))
    return build_space(job, nodes=make_nodes(4), search=config.search, run="r", seed=0)


@cache
def plans_by_chance() -> tuple[Plan, ...]:
    space, generator = a_space(), random.Random(0)
    found: dict[str, Plan] = {}
    for _ in range(400):
        plan = space.decode(RandomParams(generator), trial=0)
        found.setdefault(plan.key, plan)
    found.pop(space.baseline.key, None)
    return tuple(found.values())


def some_plans() -> tuple[Plan, ...]:
    return plans_by_chance()[:60]


def trial(number: int, plan: Plan, value: float | None) -> FinishedTrial:
    is_measured = value is not None
    record = TrialRecord(
        verdict="measured" if is_measured else "infeasible",
        outcome="OK" if is_measured else "INFEASIBLE",
        reason="",
        attempt_id="",
        value=value,
    )
    return FinishedTrial(number=number, plan=plan, record=record)


def ranking(one: FinishedTrial, ratios: Sequence[float]) -> FinalistResult:
    flat = Interval(median=1.0, low=1.0, high=1.0)
    measured = Measurement(
        iteration_s=flat,
        tokens_per_s=1.0,
        model_flops_per_s_per_device=1.0,
        peak_memory_bytes=0,
        num_launches=len(ratios),
        num_iterations=len(ratios),
    )
    compared = Comparison(
        objective="tokens_per_s",
        plan=measured,
        baseline=measured,
        speedup=bootstrap_median(ratios, seed=0),
        round_ratios=tuple(ratios),
    )
    effects = fit({0: dict.fromkeys(range(3), 0.0), one.number: dict.fromkeys(range(3), 0.1)})
    assert effects is not None
    return FinalistResult(
        trial=one,
        comparison=compared,
        rounds=tuple(range(len(ratios))),
        proven_after=5,
        is_live=True,
        effects=effects,
    )


def ended(
    values: Mapping[Plan, float | None], *, winner: Plan | None = None, ratios: Sequence[float] = ()
) -> TuneResult:
    """A search that measured `values` (over the baseline's) and a winner with its final ratios."""
    space = a_space()
    trials = [trial(0, space.baseline, 1.0)]
    trials += [trial(at, plan, value) for at, (plan, value) in enumerate(values.items(), 1)]
    won = None
    if winner is not None:
        won = ranking(next(one for one in trials if one.plan.key == winner.key), ratios)
    return TuneResult(
        baseline=space.baseline,
        trials=tuple(trials),
        rankings=() if won is None else (won,),
        winner=won,
        objective="tokens_per_s",
        seed=0,
    )


def estimated(search: TuneResult, **options: Any) -> Regret:
    found = estimate_regret(a_space(), search, relative_cost=_cost, **options)
    assert found is not None
    return found


def four_tried(**changes: Any) -> TuneResult:
    plans = some_plans()
    return ended(dict.fromkeys(plans[:4], 0.9), **changes)


def test_too_few_trials_say_nothing() -> None:
    plans = some_plans()
    assert estimate_regret(a_space(), ended(dict.fromkeys(plans[:2], 0.9))) is None
    refused = ended({plans[0]: 0.9, plans[1]: 0.9, **dict.fromkeys(plans[2:9])})
    assert estimate_regret(a_space(), refused) is None


def test_where_every_plan_was_tried_nothing_is_left() -> None:
    search = four_tried()
    found = estimated(search, untried=[one.plan for one in search.trials])
    assert (found.gain.high, found.num_untried, found.source) == (0.0, 0, "every plan was tried")


def certain(ratio_of: dict[str, float], *, spread: float = 1e-4) -> Any:
    """Predictions that are sure; 1 second for the baseline."""

    def predict(plans: Sequence[Plan]) -> list[tuple[float, float]]:
        return [(1.0 / ratio_of.get(plan.key, 1.0), spread) for plan in plans]

    return predict


def test_sure_predictions_say_what_is_left() -> None:
    plans = some_plans()
    worse = estimated(
        four_tried(), untried=plans[4:14], predict=certain({one.key: 0.8 for one in plans[4:14]})
    )
    assert worse.gain.high < 0.01
    assert worse.notable == 0.0
    one = plans[9]
    better = estimated(four_tried(), untried=plans[4:14], predict=certain({one.key: 1.1}))
    assert better.gain.median == pytest.approx(0.1, abs=0.015)
    assert better.notable == 1.0
    assert better.likely is not None
    assert plan_label(one) == better.likely
    assert better.likely_chance == 1.0


def test_less_sure_predictions_leave_more() -> None:
    plans, spreads = some_plans(), (0.01, 0.05, 0.15)
    found = [
        estimated(
            four_tried(),
            untried=plans[4:24],
            predict=certain({one.key: 0.95 for one in plans[4:24]}, spread=spread),
        )
        for spread in spreads
    ]
    highs = [one.gain.high for one in found]
    assert highs == sorted(highs)
    assert highs[2] > highs[0] + 0.1


def test_what_the_winner_gained_is_not_left() -> None:
    plans = some_plans()
    predict = certain({one.key: 1.1 for one in plans[:14]})
    without = estimated(four_tried(), untried=plans[4:14], predict=predict)
    winner = four_tried(winner=plans[0], ratios=[1.1, 1.101, 1.099, 1.1, 1.1])
    assert estimated(winner, untried=plans[4:14], predict=predict).gain.median < without.gain.median - 0.08


def test_layouts_that_did_not_fit_count_for_less() -> None:
    """Every plan of one layout was refused: its untried ones, promising as they are, are hardly there."""
    plans = some_plans()
    labels = [plan.layout for plan in plans]
    layout = max(set(labels), key=labels.count)
    alike = [plan for plan in plans if plan.layout == layout]
    others = [plan for plan in plans if plan.layout != layout]
    left = alike[len(alike) // 2 :]
    predict = certain({one.key: 1.2 for one in left})
    open_ = estimated(ended(dict.fromkeys(others[:6], 0.9)), untried=left, predict=predict)
    refused = ended({**dict.fromkeys(others[:6], 0.9), **dict.fromkeys(alike[: len(alike) // 2])})
    closed = estimated(refused, untried=left, predict=predict)
    assert closed.notable < open_.notable - 0.3


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(3, 12), st.booleans())
def test_estimates_are_ordered_and_repeatable(seed: int, num_tried: int, has_winner: bool) -> None:
    generator, plans = random.Random(seed), some_plans()
    tried = generator.sample(plans, num_tried)
    values = {plan: math.exp(generator.gauss(0.0, 0.2)) for plan in tried}
    ratios = [math.exp(generator.gauss(0.1, 0.02)) for _ in range(5)]
    search = ended(values, winner=tried[0] if has_winner else None, ratios=ratios)
    untried = [plan for plan in plans if plan not in tried][:12]
    found = estimated(search, untried=untried)
    assert 0.0 <= found.gain.low <= found.gain.median <= found.gain.high < math.inf
    assert 0.0 <= found.likely_chance <= 1.0
    assert (found.num_untried, found.num_measured) == (12, num_tried + 1)
    assert found == estimated(search, untried=untried)


def test_the_interval_holds_what_was_missed() -> None:
    """Truth: the cost model with parts for degrees, sizes, schedules and each plan; noise on every launch."""
    held = said_nothing = 0
    for seed in range(40):
        generator, plans = random.Random(seed), some_plans()[:40]
        kinds = [kind for plan in plans for kind in kinds_of(plan)]
        parts = {kind: generator.gauss(0.0, 0.06) for kind in sorted(set(kinds))}
        truth = {plan: _truth(plan, parts) * math.exp(generator.gauss(0.0, 0.02)) for plan in plans}
        tried = generator.sample(plans, 9)
        own = math.exp(generator.gauss(0.0, NOISE))
        values = {plan: truth[plan] * math.exp(generator.gauss(0.0, NOISE)) / own for plan in tried}
        best = max(tried, key=lambda plan: values[plan])
        winner = best if truth[best] > 1.05 else None
        ratios = [truth[best] * math.exp(generator.gauss(0.0, 1.4 * NOISE)) for _ in range(5)]
        untried = [plan for plan in plans if plan not in tried]
        found = estimated(ended(values, winner=winner, ratios=ratios), untried=untried)
        missed = max(0.0, max(truth.values()) / (1.0 if winner is None else truth[best]) - 1.0)
        held += found.gain.low - 1e-9 <= missed <= found.gain.high + 1e-9
        said_nothing += found.gain.high - found.gain.low > 0.8
    assert held >= 35
    assert said_nothing <= 8


def kinds_of(plan: Plan) -> tuple[str, ...]:
    """What a machine may be better or worse at than a cost model knows."""
    degrees, _, size = plan.layout.label.rpartition("mb")
    return degrees, size, plan.schedule.label


def _truth(plan: Plan, parts: dict[str, float]) -> float:
    return math.exp(sum(parts[kind] for kind in kinds_of(plan))) / _cost(plan)


@cache
def a_predictor() -> PlanPredictor:
    return PlanPredictor(machine_model_of_space(a_space()), num_iterations=1)


def _cost(plan: Plan) -> float:
    cost = a_predictor().relative_cost(plan, baseline=a_space().baseline)
    assert cost is not None
    return cost


def test_the_noise_of_a_launch_is_read_off_the_final_rounds() -> None:
    generator = random.Random(1)
    one = trial(1, some_plans()[0], 1.0)
    ratios = [math.exp(generator.gauss(0.1, 0.05 * math.sqrt(2))) for _ in range(400)]
    found = noise_of_rounds([ranking(one, ratios)])
    assert found == pytest.approx(0.05, rel=0.15)
    assert noise_of_rounds([]) is None


def test_untried_plans_are_new_and_near_the_best_as_well() -> None:
    space, plans = a_space(), some_plans()
    for best in (plans[1], plans[5]):
        search = ended(dict.fromkeys(plans[:8], 0.9) | {best: 1.4})
        found = untried_plans(space, search)
        keys = [plan.key for plan in found]
        assert len(keys) == len(set(keys)) > 50
        assert not {one.plan.key for one in search.trials} & set(keys)
        assert found == untried_plans(space, search)
        drawn = plans_by_chance()
        by_chance = sum(plan.layout == best.layout for plan in drawn) / len(drawn)
        assert sum(plan.layout == best.layout for plan in found) > 2.0 * by_chance * len(found)


# What is believed of plans together


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 59), min_size=1, max_size=25))
def test_alike_is_a_covariance(at: list[int]) -> None:
    plans = [some_plans()[index] for index in at]
    features = features_of(plans)
    alike = features.similarity(features, reach=1.0)
    assert np.allclose(alike, alike.T)
    assert np.allclose(np.diag(alike), 1.0)
    assert np.linalg.eigvalsh(alike).min() > -1e-9


def test_what_was_measured_well_is_believed_and_carries_to_what_is_alike() -> None:
    plans = some_plans()[:20]
    generator = np.random.default_rng(0)
    value = np.linspace(-0.2, 0.3, 10)
    evidence = GpObservations(
        plan=range(10), value=value, variance=np.full(10, 1e-8), in_search=np.zeros(10), noise=0.01
    )
    draws = draw(features_of(plans), np.zeros(20), evidence, count=2000, generator=generator)
    assert np.allclose(draws[:, :10].mean(axis=0), value, atol=1e-3)
    assert draws[:, :10].std(axis=0).max() < 1e-2
    assert draws[:, 10:].std(axis=0).min() > 0.01


def test_a_noisy_baseline_is_no_news_of_every_plan() -> None:
    """All plans seem 10 % faster by one measurement of the baseline: that may be its noise."""
    plans = some_plans()[:6]
    common = {"plan": range(6), "value": np.full(6, 0.1), "variance": np.full(6, 1e-8), "noise": 0.05}
    means = []
    for in_search in (np.zeros(6), np.ones(6)):
        evidence = GpObservations(in_search=in_search, **common)  # type: ignore[arg-type]
        generator = np.random.default_rng(0)
        draws = draw(features_of(plans), np.zeros(6), evidence, count=4000, generator=generator)
        means.append(draws.mean())
    assert means[0] == pytest.approx(0.1, abs=0.002)
    assert means[1] < means[0]


def test_joint_draws_have_the_deviations_that_are_given() -> None:
    plans = some_plans()[:8]
    mean, spread = np.linspace(0, 1, 8), np.linspace(0.01, 0.2, 8)
    features = features_of(plans)
    draws = joint(mean, spread, features, count=20_000, generator=np.random.default_rng(0))
    assert np.allclose(draws.mean(axis=0), mean, atol=0.01)
    assert np.allclose(draws.std(axis=0), spread, rtol=0.05)
    alike = features.similarity(features, reach=1.0)
    assert np.allclose(np.corrcoef(draws.T), alike, atol=0.05)


# In a run


def test_a_run_says_it_keeps_it_and_says_it_again_after_a_resume(tmp_path: Path) -> None:
    config: dict[str, Any] = {"search": {"mapping": "stock", "schedule": ["no-pipelining", "1f1b"]}}
    run = begin(tmp_path / "r", **config, study={"trials": 6, "rounds": 3, "top_k": 1})
    machine = FakeMachine()
    result = tune(run, machine)
    assert result.regret is not None
    assert result.regret.source == "calibrated cost model"
    write_best(result, run=run)
    assert read_regret(run.folder.best_regret) == result.regret
    again = tune(resume(tmp_path / "r"), machine)
    assert again.regret == result.regret
    write_best(replace(result, regret=None), run=run)
    assert not run.folder.best_regret.exists()


def test_a_run_without_the_cost_model_says_it_by_its_measurements(tmp_path: Path) -> None:
    config: dict[str, Any] = {"search": {"mapping": "stock", "schedule": ["no-pipelining", "1f1b"]}}
    study = {"trials": 6, "rounds": 3, "top_k": 1, "starts": "none", "sampler": "random"}
    result = tune(begin(tmp_path / "r", **config, study=study), FakeMachine())
    assert result.regret is not None
    assert result.regret.source == "measured trials"
    assert result.regret.num_untried > 10
