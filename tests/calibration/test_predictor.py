"""The ranker: each told trial corrects what is predicted of all plans, and it says how sure it is."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet_plugin.calibration.observations import action_times, spread_of
from quartet_plugin.calibration.predictor import PlanPredictor, SlowNodes
from quartet_plugin.cost.coefficients import COEFFICIENTS, INDEX, Coefficient
from quartet_plugin.model.layout import Setting
from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord
from quartet_plugin.space.param_sources import RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.tuner.config import parse_config
from tests.calibration.truth import Truth, learned_ratios
from tests.space.jobs import make_job, make_layout, make_nodes

WRONG: dict[str, Any] = {"speed": 3.0, "head": 3.0, "transfer": 10.0, "elementwise": 0.6, "weight_grad": 1.3}
ATTEMPT = "a" * 32
STOCK = ["no-pipelining", "1f1b", "interleaved"]


def space_of(*nodes: int, **search: object) -> Space:
    config = parse_config({"search": {"schedule": STOCK, **search}}, where="test").search
    layout = make_layout(pipeline_parallel=sum(nodes))
    return build_space(make_job(layout=layout), nodes=make_nodes(*nodes), search=config, run="r", seed=0)


def sampled(space: Space, *, num: int, seed: int = 0) -> list[Plan]:
    generator = random.Random(seed)
    return [space.decode(RandomParams(generator), trial=0) for _ in range(num)]


def trial(number: int, plan: Plan, seconds: float, **record: object) -> FinishedTrial:
    common = TrialRecord(
        verdict="measured",
        outcome="OK",
        reason="",
        attempt_id=ATTEMPT,
        value=1.0 / seconds,
        iteration_s=seconds,
        num_iterations=10,
        spread=0.002,
    )
    return FinishedTrial(number=number, plan=plan, record=replace(common, **record))  # type: ignore[arg-type]


def outcomes(space: Space, truth: Truth, *, num: int, seed: int = 0) -> list[FinishedTrial]:
    plans = [space.baseline, *sampled(space, num=num - 1, seed=seed)]
    return [trial(at, plan, truth(plan)) for at, plan in enumerate(plans)]


def ranker_of(truth: Truth, folder: Path | None = None) -> PlanPredictor:
    folder_of = None if folder is None else lambda number: folder / f"{number:06d}"
    return PlanPredictor(truth.machine_model, num_iterations=10, folder_of=folder_of)


def errors(ranker: PlanPredictor, truth: Truth, plans: list[Plan]) -> np.ndarray:
    found = ranker.predict(plans)
    return np.array([np.log(one.iteration_s / truth(plan)) for one, plan in zip(found, plans, strict=True)])


def test_wrong_constants_are_corrected_and_the_prediction_converges() -> None:
    space = space_of(2)
    truth = Truth(space.nodes, **WRONG)
    unseen = sampled(space, num=40, seed=99)
    off = {}
    for num in (1, 8, 30):
        ranker = ranker_of(truth)
        ranker.learn(outcomes(space, truth, num=num))
        off[num] = float(np.abs(errors(ranker, truth, unseen)).mean())
    assert off[30] < off[8] < off[1]
    assert off[30] < 0.03


def test_a_relative_cost_is_the_iteration_models_before_any_trial() -> None:
    space = space_of(2)
    truth = Truth(space.nodes)
    ranker = ranker_of(truth)
    assert ranker.relative_cost(space.baseline, baseline=space.baseline) == 1.0
    costs = [(plan, ranker.relative_cost(plan, baseline=space.baseline)) for plan in sampled(space, num=40)]
    expected = [truth(plan) / truth(space.baseline) for plan, _ in costs]
    assert [cost for _, cost in costs] == pytest.approx(expected)
    ranker.learn(outcomes(space, Truth(space.nodes, **WRONG), num=4))
    assert all(ranker.relative_cost(plan, baseline=space.baseline) == cost for plan, cost in costs)


def test_a_split_model_repeats_what_its_own_plan_does_whichever_comes_first() -> None:
    """Four layers a stage that block recompute repeats are all of 4+4, and five of eight of 1+7."""
    space = space_of(2)
    truth = Truth(space.nodes)
    block = (
        Setting(name="recompute_method", value="block"),
        Setting(name="recompute_num_layers", value=4),
    )
    layout = make_layout(recompute="full", settings=block)
    plans = [
        replace(space.baseline, layout=layout, split=Split(transformer_layers_per_stage=counts))
        for counts in ((4, 4), (1, 7))
    ]

    def layer_seconds(plans: list[Plan]) -> list[float]:
        ranker = ranker_of(truth)
        ranker.learn(outcomes(space, truth, num=1))
        models = [ranker.split_model(plan) for plan in plans]
        times = [model.times((0, 1), space.baseline.mapping) for model in models if model is not None]
        return [float(one.layer_s.sum()) for one in times]

    all_layers, fewer = layer_seconds(plans)
    assert all_layers > fewer
    assert layer_seconds(plans[::-1]) == [fewer, all_layers]


def test_it_says_how_sure_it_is() -> None:
    """About as many predictions are within two deviations as should be, and near plans are surer."""
    space = space_of(2)
    truth = Truth(space.nodes, residual=0.05, **WRONG)
    ranker = ranker_of(truth)
    ranker.learn(outcomes(space, truth, num=6))
    unseen = sampled(space, num=60, seed=99)
    spreads = np.array([one.spread for one in ranker.predict(unseen)])
    inside = np.abs(errors(ranker, truth, unseen)) < 2.0 * np.hypot(spreads, 0.03)
    assert inside.mean() > 0.8
    measured = ranker.predict([space.baseline])[0]
    assert measured.spread < np.median(spreads)


def test_it_depends_on_what_was_told_alone() -> None:
    space = space_of(2)
    truth = Truth(space.nodes, residual=0.05, **WRONG)
    trials, plans = outcomes(space, truth, num=8), sampled(space, num=10, seed=5)
    at_once, one_by_one = ranker_of(truth), ranker_of(truth)
    at_once.learn(trials)
    for at in range(len(trials)):
        one_by_one.learn(trials[: at + 1])
        one_by_one.predict(plans)
    assert at_once.predict(plans) == one_by_one.predict(plans)


def test_terms_sum_to_the_prediction_and_are_those_of_what_was_learned() -> None:
    space = space_of(2)
    truth = Truth(space.nodes, **WRONG)
    ranker = ranker_of(truth)
    ranker.learn(outcomes(space, truth, num=30))
    for plan in (space.baseline, *sampled(space, num=5, seed=5)):
        terms = ranker.predict_terms(plan)
        assert terms.iter_time_s == ranker.predict([plan])[0].iteration_s
        assert sum(terms.terms.values()) == pytest.approx(terms.iter_time_s)
        assert sum(terms.compute_terms.values()) == pytest.approx(terms.terms["compute_s"])
        # A machine that follows the model leaves little to what no term explains.
        assert abs(terms.terms["residual_s"]) < 0.1 * terms.iter_time_s


def test_slowdowns_of_slots_are_told_apart_by_their_mappings() -> None:
    space = space_of(3, pipeline_parallel=3)
    truth = Truth(space.nodes, slowdowns=(0.6, 1.2, 1.2), speed=2.0)
    ranker = ranker_of(truth)
    ranker.learn(outcomes(space, truth, num=20))
    slowdowns = learned_ratios(ranker)[0][len(COEFFICIENTS) :]
    assert slowdowns[0] < 0.85 * slowdowns[1]
    assert slowdowns[1] == pytest.approx(slowdowns[2], rel=0.25)


def test_trials_before_and_after_a_node_became_slow_teach_one_machine() -> None:
    space = space_of(1, 1, pipeline_parallel=2)
    nodes = tuple(replace(node, node_class="NVIDIA H100 80GB HBM3 x1") for node in space.nodes)
    healthy, slow = Truth(nodes), Truth(nodes, slowdowns=(1.0, 1.8))
    factors = {nodes[1].host: 1.8}
    drift = healthy(space.baseline) / slow(space.baseline)
    plans = [space.baseline, *sampled(space, num=9)]
    trials = [trial(at, plan, healthy(plan)) for at, plan in enumerate(plans[:6])]
    later: dict[str, Any] = {"drift": drift, "node_slowdowns": factors}
    trials += [trial(at, plan, slow(plan), **later) for at, plan in enumerate(plans[6:], start=6)]
    unseen = sampled(space, num=30, seed=99)
    ranker = ranker_of(healthy)
    ranker.learn(trials)
    # Nothing has confirmed it: then what single trials noticed is not believed.
    unbelieved = ranker.predict(unseen)
    known = frozenset(factors)
    ranker.slow_nodes = SlowNodes(slowdowns=factors, known=known, drift=drift)
    now = np.array([one.iteration_s / drift for one in ranker.predict(unseen)])
    assert np.abs(np.log(now / [slow(plan) for plan in unseen])).max() < 0.05
    ranker.slow_nodes = SlowNodes(known=known)
    assert np.abs(errors(ranker, healthy, unseen)).max() < 0.05
    ranker.slow_nodes = SlowNodes()
    assert ranker.predict(unseen) == unbelieved


def test_a_trial_that_was_cut_short_or_ran_elsewhere_says_less() -> None:
    space = space_of(2)
    truth = Truth(space.nodes, **WRONG)
    plan = sampled(space, num=1, seed=3)[0]

    def spread(**changes: object) -> float:
        ranker = ranker_of(truth)
        ranker.learn([*outcomes(space, truth, num=1), trial(1, plan, truth(plan), **changes)])
        return ranker.predict([plan])[0].spread

    assert spread() < spread(num_iterations=3)
    assert spread() < spread(source="other:7")


def test_a_lucky_launch_counts_less_where_iterations_scatter() -> None:
    space = space_of(2)
    truth = Truth(space.nodes)
    trials = outcomes(space, truth, num=5)
    lucky = sampled(space, num=1, seed=3)[0]

    def posterior_mean(spread: float) -> float:
        ranker = ranker_of(truth)
        known = [trial(one.number, one.plan, truth(one.plan), spread=spread) for one in trials]
        ranker.learn([*known, trial(9, lucky, 0.8 * truth(lucky), spread=spread)])
        return ranker.predict([lucky])[0].iteration_s / truth(lucky)

    assert posterior_mean(0.001) + 0.03 < posterior_mean(0.05) < 1.0


def test_what_a_kind_of_plan_is_off_by_is_learned_with_shrinkage() -> None:
    space = space_of(2, schedule=["1f1b", "zb-h1"], pipeline_parallel=2, virtual_stages=1, mapping="stock")
    truth = Truth(space.nodes)
    plans = sampled(space, num=40, seed=1)
    own = [plan for plan in plans if plan.schedule.label == "zb-h1"]
    stock = [plan for plan in plans if plan.schedule.label == "1f1b"]
    ranker = ranker_of(truth)
    trials = [trial(at, plan, truth(plan)) for at, plan in enumerate([space.baseline, *stock[:6]])]
    ranker.learn(trials)
    before = errors(ranker, truth, own[-1:])[0]
    ranker.learn([*trials, *(trial(20 + at, plan, 1.3 * truth(plan)) for at, plan in enumerate(own[:1]))])
    after = errors(ranker, truth, own[-1:])[0]
    assert before + 0.03 < after < np.log(1.3)
    assert abs(errors(ranker, truth, stock[-1:])[0]) < 0.05


def test_records_of_repeats_lost_trials_and_other_kinds_add_nothing_to_the_times() -> None:
    space = space_of(2)
    truth = Truth(space.nodes)
    first = outcomes(space, truth, num=3)
    plain, noisy = ranker_of(truth), ranker_of(truth)
    plain.learn(first)
    extra = [
        trial(7, space.baseline, 99.0, repeats=0),
        FinishedTrial(
            number=8,
            plan=space.baseline,
            record=TrialRecord(verdict="lost", outcome="INFRA", reason="", attempt_id=""),
        ),
    ]
    noisy.learn([*first, *extra])
    plans = sampled(space, num=5, seed=8)
    assert plain.predict(plans) == noisy.predict(plans)


def write_actions(folder: Path, plan: Plan, truth: Truth, *, attempt_id: str = ATTEMPT) -> None:
    """What the ranks of a schedule of ours would have recorded."""
    from quartet_plugin.cost.iteration.cache import IterationModelCache

    iteration_model = IterationModelCache(truth.machine_model).of(plan)
    folder.mkdir(parents=True)
    for device in range(plan.layout.pipeline_parallel):
        actions, start, end, now = [], [], [], 0.0
        for kind, directions in (("F", (0,)), ("I", (1,)), ("W", (2,))):
            for microbatch in range(3):
                seconds, _ = iteration_model.evaluate_action(truth.theta, stage=device, directions=directions)
                actions.append(f"{device}{kind}{microbatch}")
                start.append(now)
                now += seconds
                end.append(now)
        sheet = {
            "schema_version": 1,
            "attempt_id": attempt_id,
            "launch_rank": device,
            "device": device,
            "replica": 0,
            "begin_at": 0.0,
            "actions": actions,
            "start_s": start,
            "end_s": end,
            "waiting_s": [0.0] * len(actions),
        }
        (folder / f"rank-{device}.actions.json").write_text(json.dumps(sheet))


def test_recorded_actions_say_what_whole_iterations_cannot(tmp_path: Path) -> None:
    space = space_of(2, schedule="zb-h1", pipeline_parallel=2, virtual_stages=1, mapping="stock")
    truth = Truth(space.nodes, speed=2.0, head=3.0)
    plan = sampled(space, num=1)[0]
    trials = [trial(1, plan, truth(plan))]
    blind = ranker_of(truth)
    blind.learn(trials)
    write_actions(tmp_path / "000001" / "attempt-1", plan, truth)
    seeing = ranker_of(truth, tmp_path)
    seeing.learn(trials)

    def head(ranker: PlanPredictor) -> tuple[float, float]:
        ratios, spreads = learned_ratios(ranker)
        return float(ratios[INDEX[Coefficient.HEAD]]), float(spreads[INDEX[Coefficient.HEAD]])

    assert abs(np.log(head(seeing)[0] / 3.0)) < abs(np.log(head(blind)[0] / 3.0))
    assert head(seeing)[1] < head(blind)[1]


def test_actions_of_another_attempt_or_a_broken_file_are_left_out(tmp_path: Path) -> None:
    space = space_of(2, schedule="zb-h1", pipeline_parallel=2, virtual_stages=1, mapping="stock")
    truth = Truth(space.nodes)
    plan = sampled(space, num=1)[0]
    write_actions(tmp_path / "attempt-1", plan, truth, attempt_id="b" * 32)
    write_actions(tmp_path / "attempt-2", plan, truth)
    found = action_times(tmp_path, attempt_id=ATTEMPT)
    assert {(one.stage, one.directions) for one in found} == {(s, (d,)) for s in (0, 1) for d in (0, 1, 2)}
    assert action_times(tmp_path, attempt_id="c" * 32) == ()
    (tmp_path / "attempt-2" / "rank-0.actions.json").write_text("{")
    assert action_times(tmp_path, attempt_id=ATTEMPT) == ()
    assert action_times(tmp_path / "nowhere", attempt_id=ATTEMPT) == ()


def test_the_spread_of_a_median_shrinks_with_more_iterations() -> None:
    assert spread_of([1.0, 1.0, 1.0]) == 0.0
    few, many = [1.0, 1.1, 0.9, 1.05, 0.95], [1.0, 1.1, 0.9, 1.05, 0.95] * 4
    assert spread_of(many) == pytest.approx(spread_of(few) / 2.0)


def test_plans_are_alike_as_far_as_they_share_groups() -> None:
    space = space_of(2)
    ranker = ranker_of(Truth(space.nodes))
    base = space.baseline
    same_layout = replace(base, split=replace(base.split, transformer_layers_per_stage=(5, 3)))
    other = next(plan for plan in sampled(space, num=50) if plan.layout.data_parallel == 2)
    found = ranker.similarity([base, same_layout, other], [base])
    assert found[0] == pytest.approx(1.0)
    assert 1.0 > found[1] > found[2] >= 0.0
    assert ranker.similarity([base], []).tolist() == [0.0]
