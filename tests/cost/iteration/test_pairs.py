"""The time of overlapped pairs in the iteration model: what they hide of the experts' all-to-all."""

from dataclasses import replace

import numpy as np
import pytest

from quartet_plugin.cost.communication import hideable_s
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.iteration.overlap import hidden_terms
from quartet_plugin.cost.iteration.replay import replayed_s
from quartet_plugin.cost.iteration.terms import stage_parts, stage_sums
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import ScheduleKind, TrainingRun
from quartet_plugin.cost.times import Times
from quartet_plugin.model.costs import StageCosts
from quartet_plugin.schedule.choice import choice_of
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import simulate
from tests.cost.runs import EXPERTS, run
from tests.schedule.orders import unit_costs

CONSTANTS = fitted()
ROW = EXPERTS | {"layers": 9, "pp": 2, "vpp": 2, "gpus": 16, "gbs": 64, "schedule": "interleaved 1F1B"}


def with_order(described: TrainingRun, schedule: Schedule) -> TrainingRun:
    """The run with this order as the custom schedule."""
    custom = choice_of(schedule, unit_costs(schedule), with_orders=True)
    return replace(described, schedule=ScheduleKind.CUSTOM, custom=custom)


def in_pairs_and_apart(name: str, **changes: object) -> tuple[TrainingRun, TrainingRun]:
    """The run under a schedule with its pairs, and under the same order part by part."""
    described = run(ROW, **changes)
    schedule = named(name, num_devices=2, num_microbatches=described.num_microbatches, with_pairs=True)
    described = replace(described, layers_per_stage=(2, 2, 2, 3))
    return with_order(described, schedule), with_order(described, replace(schedule, pairs=()))


@pytest.mark.parametrize("name", ["interleaved", "dualpipev"])
def test_pairs_hide_all_to_all_and_the_terms_sum_to_the_time(name: str) -> None:
    paired, apart = in_pairs_and_apart(name)
    assert paired.has_pairs
    assert not apart.has_pairs
    with_pairs, without = predict(paired, CONSTANTS), predict(apart, CONSTANTS)
    assert with_pairs.iter_time_s < without.iter_time_s
    for prediction in (with_pairs, without):
        assert sum(prediction.terms.values()) == pytest.approx(prediction.iter_time_s, rel=1e-12)
        assert 0 <= prediction.bubble_fraction < 1
        assert prediction.terms["ep_comm_s"] > 0
    hidden = hidden_terms(paired, CONSTANTS)["ep_comm_s"]
    assert with_pairs.terms["ep_comm_s"] + hidden == pytest.approx(without.terms["ep_comm_s"])
    assert "ep_comm_s" not in hidden_terms(apart, CONSTANTS)


def test_the_replay_is_the_simulation_of_the_same_stages() -> None:
    paired, _ = in_pairs_and_apart("dualpipev")
    parts = stage_parts(paired, CONSTANTS)
    forward, input_grad, weight_grad = np.array(stage_sums(parts)).T
    exchange = hideable_s(CONSTANTS, [part["ep_comm"] for part in parts])
    schedule = named("dualpipev", num_devices=2, num_microbatches=paired.num_microbatches, with_pairs=True)
    costs = StageCosts(
        device_of_stage=np.array(schedule.placement),
        forward_s=forward,
        input_grad_s=input_grad,
        weight_grad_s=weight_grad,
        backward_s=input_grad + weight_grad,
        activation_bytes=np.zeros(4),
        forward_transfer_s=np.zeros(4),
        backward_transfer_s=np.zeros(4),
        held_fraction=1.0,
        exchange_s=exchange,
    )
    work = np.stack((forward, input_grad, weight_grad))
    seconds = replayed_s(paired, work, np.zeros((2, 4)), exchange)
    assert seconds == pytest.approx(simulate(schedule, costs).makespan_s, rel=1e-12)


def test_without_experts_a_pair_takes_the_sum_of_its_parts() -> None:
    paired, apart = (replace(each, experts=None) for each in in_pairs_and_apart("interleaved"))
    seconds = [predict(each, CONSTANTS) for each in (paired, apart)]
    assert all(prediction.terms["ep_comm_s"] == 0 for prediction in seconds)
    # Both parts wait for both inputs, so pairs alone never make it shorter.
    assert seconds[0].iter_time_s >= seconds[1].iter_time_s * (1 - 1e-12)
    assert seconds[0].compute_terms == pytest.approx(seconds[1].compute_terms)


def test_the_frameworks_own_overlap_is_not_counted_a_second_time() -> None:
    paired, _ = in_pairs_and_apart("interleaved")
    overlapping = replace(paired, software=replace(paired.software, expert_overlap=True))
    assert predict(overlapping, CONSTANTS).iter_time_s == predict(paired, CONSTANTS).iter_time_s
    stock = replace(overlapping, schedule=ScheduleKind.INTERLEAVED, custom=None)
    plain = replace(stock, software=paired.software)
    assert predict(stock, CONSTANTS).terms["ep_comm_s"] < predict(plain, CONSTANTS).terms["ep_comm_s"]


def test_a_constant_part_of_an_exchange_stays_exposed() -> None:
    exchange = [Times(1.0, 2.0, 0.0), Times()]
    expected = (1 - CONSTANTS.data_exposed) * np.array([[1.0, 0.0], [2.0, 0.0]])
    assert hideable_s(CONSTANTS, exchange) == pytest.approx(expected)
