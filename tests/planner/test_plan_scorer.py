"""What the scorer predicts again, and what it remembers: what was learned alone decides."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from quartet_plugin.calibration.machine_prior import KnownMachine
from quartet_plugin.calibration.predictor import PlanPrediction, PlanPredictor
from quartet_plugin.model.plan import Plan
from quartet_plugin.planner import candidate_plans
from quartet_plugin.planner.plan_scorer import PlanScorer, ScoredPlan
from quartet_plugin.planner.space_request import request_of_space
from quartet_plugin.space.choices import ParamSource
from quartet_plugin.space.config import SearchConfig
from quartet_plugin.space.plan_space import Space, build_space
from tests.calibration.test_predictor import outcomes, ranker_of, space_of, trial
from tests.calibration.truth import Truth
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape


def test_what_was_measured_is_predicted_once_for_all_that_was_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space = space_of(2)
    truth = Truth(space.nodes)
    trials = outcomes(space, truth, num=3)
    scorer = PlanScorer(
        space,
        predictor=ranker_of(truth),
        objective="tokens_per_s",
        request=request_of_space(space, machine=KnownMachine()),
    )
    scorer.predictor.learn(trials)
    asked: list[int] = []
    predict = PlanPredictor.predict

    def counting(self: PlanPredictor, plans: Sequence[Plan]) -> list[PlanPrediction]:
        asked.append(len(plans))
        return predict(self, plans)

    prediction = scorer.predictor.predict([space.baseline])[0]
    monkeypatch.setattr(PlanPredictor, "predict", counting)
    before = [scorer.log_speedup(space.baseline, prediction) for _ in range(3)]
    assert len(asked) == 1
    assert len(set(before)) == 1
    # Another measurement of the best plan, twice as fast: the memory is of what was learned.
    best = min(trials, key=lambda one: one.record.iteration_s or 0.0)
    scorer.predictor.learn([trial(7, best.plan, (best.record.iteration_s or 0.0) / 2)])
    assert scorer.log_speedup(space.baseline, prediction) < before[0]
    assert len(asked) == 2


def test_a_search_that_has_ended_is_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    space = space_of(2)
    truth = Truth(space.nodes)
    scorer = PlanScorer(
        space,
        predictor=ranker_of(truth),
        objective="tokens_per_s",
        request=request_of_space(space, machine=KnownMachine()),
    )
    scorer.predictor.learn(outcomes(space, truth, num=2))
    scored = scorer.final_plans()
    assert scored == scorer.scored_plans()
    assert scorer.final_plans() is scored
    scorer.predictor.learn(outcomes(space, truth, num=4)[2:])
    assert scorer.final_plans() is not scored


def test_each_plan_is_compared_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    space = space_of(2)
    truth = Truth(space.nodes)
    scorer = PlanScorer(
        space,
        predictor=ranker_of(truth),
        objective="tokens_per_s",
        request=request_of_space(space, machine=KnownMachine()),
    )
    scorer.predictor.learn(outcomes(space, truth, num=2))
    asked: list[Plan] = []
    most_likely_s = PlanPredictor.most_likely_s

    def counting(self: PlanPredictor, plans: Sequence[Plan]) -> list[float]:
        asked.extend(plans)
        return most_likely_s(self, plans)

    monkeypatch.setattr(PlanPredictor, "most_likely_s", counting)
    scored = scorer.scored_plans()
    assert len(asked) == len({plan.identity for plan in asked})
    assert {best.candidate.plan.identity for best in scored} <= {plan.identity for plan in asked}
    # Nothing of it is kept for the next call: what was learned may have changed.
    num_asked = len(asked)
    assert scorer.scored_plans() == scored
    assert len(asked) == 2 * num_asked


def test_what_is_prepared_changes_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    space = space_of(2)
    truth = Truth(space.nodes)
    trials = outcomes(space, truth, num=2)

    def scorer_of() -> PlanScorer:
        return PlanScorer(
            space_of(2),
            predictor=ranker_of(truth),
            objective="tokens_per_s",
            request=request_of_space(space, machine=KnownMachine()),
        )

    def scored_by(scorer: PlanScorer) -> tuple[list[ScoredPlan], tuple[str, ...]]:
        scorer.predictor.learn(trials)
        return scorer.scored_plans(), scorer.limits

    monkeypatch.setattr(candidate_plans, "MAX_CHOICES", 96)
    expected = scored_by(scorer_of())
    assert any(line.startswith("combinations: ") for line in expected[1])
    for num_plans in (0, 7, 10_000):
        left = iter([False] * num_plans)
        scorer = scorer_of()
        scorer.prepare_candidates(is_stopped=lambda left=left: next(left, True))  # type: ignore[misc]
        assert scored_by(scorer) == expected


def test_what_was_prepared_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    space = space_of(2)
    truth = Truth(space.nodes)
    scorer = PlanScorer(
        space,
        predictor=ranker_of(truth),
        objective="tokens_per_s",
        request=request_of_space(space, machine=KnownMachine()),
    )
    scorer.prepare_candidates(is_stopped=lambda: False)
    scorer.predictor.learn(outcomes(space, truth, num=2))
    decoded: list[object] = []
    decode = Space.decode

    def counting(self: Space, source: ParamSource, *, trial: int) -> Plan:
        decoded.append(source)
        return decode(self, source, trial=trial)

    monkeypatch.setattr(Space, "decode", counting)
    assert len(decoded) < len(scorer.scored_plans()) / 2


def is_in_one_network(plan: Plan) -> bool:
    """Whether ranks that reduce gradients together are all in the same half of a host."""
    halves = np.array([slot.local // 2 for slot in plan.mapping.slots])
    halves = halves.reshape(plan.layout.pipeline_parallel, -1, plan.layout.tensor_parallel)
    return bool((halves == halves[:, :1]).all())


def test_after_the_command_alone_replicas_are_proposed_inside_a_network() -> None:
    """The command's own gradients cross a link that is 30 times as slow as assumed."""
    shape = make_shape(seq_length=16, max_position_embeddings=16, tied_embeddings=False)
    schedules = "no-pipelining", "1f1b"
    searched = {"virtual_stages": (1, 2), "micro_batch_size": (1, 2, 4), "schedule": schedules}
    space = build_space(
        make_job(layout=make_layout(pipeline_parallel=1, data_parallel=4, micro_batch_size=2), shape=shape),
        nodes=(replace(make_nodes(4)[0], network_namespaces=((0, 1), (2, 3))),),
        search=SearchConfig().model_copy(update=searched),
        run="r",
        seed=0,
    )
    truth = Truth(space.nodes, network=30.0, speed=2.0)
    scorer = PlanScorer(
        space,
        predictor=ranker_of(truth),
        objective="tokens_per_s",
        request=request_of_space(space, machine=KnownMachine()),
    )
    scorer.predictor.learn([trial(0, space.baseline, truth(space.baseline))])
    plans = [point.plan for point in scorer.plans_to_try()]
    two_stages = [
        plan for plan in plans if (plan.layout.pipeline_parallel, plan.layout.data_parallel) == (2, 2)
    ]
    assert is_in_one_network(plans[0])
    assert is_in_one_network(two_stages[0])
    assert not all(map(is_in_one_network, two_stages))
