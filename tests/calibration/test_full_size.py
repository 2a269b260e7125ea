"""Times at full size from trials with fewer replicas, on a machine unlike the assumed one."""

import math
import statistics
from typing import Any

import numpy as np
import pytest

from quartet_plugin.calibration.full_size import (
    FullSizePrediction,
    FullSizePredictor,
    MeasuredPlan,
    enlarged_machine,
    log_ratio,
    scale_spread,
    wait_for_nodes,
)
from quartet_plugin.calibration.predictor import PlanPredictor
from quartet_plugin.cost.iteration.cache import IterationModelCache
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.measurement import Interval
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord, score_of_median
from quartet_plugin.space.full_size import at_full_size, full_nodes
from quartet_plugin.space.plan_space import baseline_plan
from tests.calibration.truth import Truth
from tests.space.jobs import make_job, make_nodes, make_shape
from tests.space.test_full_size import random_plans

FACTOR = 4
# Short sequences, beside which reducing gradients takes a good part of the time.
SHORT = 16
WRONG: dict[str, Any] = {"speed": 3.0, "head": 2.0, "transfer": 5.0, "network": 6.0, "optimizer": 2.0}


class TwoSizes:
    """The same machine at a trial's size and at full size, and a predictor that has learned trials."""

    def __init__(self, *nodes: int, plans: list[Plan], num_learned: int, stage_factor: int = 1) -> None:
        self._stage_factor = stage_factor
        self.small = Truth(make_nodes(*nodes), **WRONG)
        self._full = IterationModelCache(enlarged_machine(self.small.machine_model, factor=FACTOR))
        self._num_nodes = len(nodes)
        predictor = PlanPredictor(self.small.machine_model, num_iterations=3)
        predictor.learn([self.trial(plan, number) for number, plan in enumerate(plans[:num_learned])])
        self.predictor = FullSizePredictor(
            self.small.machine_model,
            predictor.posterior_samples(),
            covariance=predictor.coefficient_covariance(),
            factor=FACTOR,
        )

    def trial(self, plan: Plan, number: int) -> FinishedTrial:
        record = TrialRecord(
            verdict="measured", outcome="OK", reason="", attempt_id="0" * 32, num_iterations=10, spread=0.002
        )
        record = record.scored(score_of_median(plan, iteration_s=self.small(plan)), objective="tokens_per_s")
        return FinishedTrial(number=number, plan=plan, record=record)

    def measured(self, plan: Plan) -> MeasuredPlan:
        return MeasuredPlan(
            plan=plan,
            full=at_full_size(
                plan,
                factor=FACTOR,
                stage_factor=self._stage_factor,
                nodes=full_nodes(plan.made_for.nodes, factor=FACTOR),
            ),
            iteration_s=self.small(plan),
            spread=0.002,
        )

    def truth_s(self, plan: Plan) -> float:
        """Seconds at full size, with the wait for more nodes."""
        model = self._full.of(self.measured(plan).full)
        wait = wait_for_nodes(FACTOR * self._num_nodes) - wait_for_nodes(self._num_nodes)
        share = IterationModelCache(self.small.machine_model).of(plan).share
        return model.evaluate(self.small.theta)[0] / model.share * share * math.exp(wait)


@pytest.mark.timeout(120)
def test_plans_are_predicted_at_full_size_from_trials_of_a_quarter() -> None:
    plans = random_plans(28, seq_length=SHORT)
    sizes = TwoSizes(2, 2, plans=plans, num_learned=8)
    errors, inside = [], 0
    for plan in plans[8:]:
        predicted, truth_s = sizes.predictor.predict(sizes.measured(plan)), sizes.truth_s(plan)
        errors.append(abs(predicted.iteration_s / truth_s - 1))
        inside += predicted.interval.low <= truth_s <= predicted.interval.high
    assert statistics.fmean(errors) < 0.03
    assert inside >= 17
    same = [abs(sizes.small(plan) / sizes.truth_s(plan) - 1) for plan in plans[8:]]
    assert statistics.fmean(errors) < 0.5 * statistics.fmean(same), "what replicas cost is seen"


@pytest.mark.timeout(120)
def test_plans_are_predicted_from_trials_with_half_of_the_stages() -> None:
    plans = [
        plan
        for plan in random_plans(40, stage_divisor=2, seq_length=SHORT)
        if plan.schedule.name != "interleaved" or plan.num_microbatches >= 8
    ]
    sizes = TwoSizes(2, 2, plans=plans, num_learned=8, stage_factor=2)
    errors, inside, same = [], 0, []
    for plan in plans[8:]:
        predicted, truth_s = sizes.predictor.predict(sizes.measured(plan)), sizes.truth_s(plan)
        errors.append(abs(predicted.iteration_s / truth_s - 1))
        same.append(abs(sizes.small(plan) / truth_s - 1))
        inside += predicted.interval.low <= truth_s <= predicted.interval.high
    assert len(errors) >= 20
    assert statistics.fmean(errors) < 0.03
    assert inside >= 0.85 * len(errors)
    assert statistics.fmean(errors) < 0.25 * statistics.fmean(same), "what stages cost is seen"


def test_a_trial_of_one_replica_has_seen_no_reduction_and_its_interval_is_wide() -> None:
    job = make_job(shape=make_shape(seq_length=SHORT), global_batch_size=8)
    one = baseline_plan(job, nodes=make_nodes(1, 1), run="r", seed=0)
    assert one.layout.data_parallel == 1
    blind = TwoSizes(1, 1, plans=[one], num_learned=1)
    plans = [plan for plan in random_plans(16, seq_length=SHORT) if plan.layout.data_parallel > 1]
    seen = TwoSizes(2, 2, plans=plans, num_learned=len(plans))
    spread = seen.predictor.predict(seen.measured(plans[0])).spread
    assert blind.predictor.predict(blind.measured(one)).spread > 3 * spread
    assert spread >= scale_spread(FACTOR)


def test_the_wait_grows_with_nodes_and_the_spread_with_the_distance() -> None:
    waits = [wait_for_nodes(count) for count in (1, 2, 16, 256)]
    assert waits[0] == 0.0
    assert waits == sorted(waits)
    assert scale_spread(1) == 0.0
    assert scale_spread(16) == pytest.approx(2 * scale_spread(2))
    assert log_ratio(trial_s=2.0, full_s=2.0, num_nodes=4, num_full_nodes=4) == 0.0


def test_what_two_plans_have_in_common_cancels_in_the_speedup() -> None:
    plans = random_plans(6, seq_length=SHORT)
    sizes = TwoSizes(2, 2, plans=plans, num_learned=3)
    predicted = sizes.predictor.predict(sizes.measured(plans[0]))
    measured = Interval(median=1.2, low=1.18, high=1.22)
    same = sizes.predictor.speedup(predicted, baseline=predicted, measured=measured)
    assert same.median == pytest.approx(1.2)
    assert (same.high - same.low) / same.median < 4 * predicted.spread
    slower = FullSizePrediction(
        iteration_s=predicted.iteration_s,
        spread=0.0,
        ratios=predicted.ratios + np.log(1.1),
        slopes=predicted.slopes,
    )
    lost = sizes.predictor.speedup(slower, baseline=predicted, measured=measured)
    assert lost.median == pytest.approx(1.2 / 1.1)


def test_nodes_of_unequal_size_are_refused() -> None:
    truth = Truth(make_nodes(2, 1))
    with pytest.raises(ConfigError, match="nodes of 1 and of 2 devices"):
        FullSizePredictor(truth.machine_model, [], covariance=np.zeros((0, 0)), factor=2)
