"""The simulator: both implementations agree, and impossible schedules are refused with their cell."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import PlanError
from quartet_plugin.model.costs import StageCosts, stage_costs
from quartet_plugin.schedule import placement as places
from quartet_plugin.schedule.kernel import _largest_cycle_mean
from quartet_plugin.schedule.named import NAMED, named, refusal_of
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import action_times, simulate, simulate_costs
from tests.schedule.reference_simulator import simulate_reference
from tests.schedule.sample_costs import random_costs, uneven, uniform


def costs_of_routes(schedule: Schedule, seed: int) -> tuple[StageCosts, StageCosts | None]:
    routes = schedule.routes or (schedule.placement,)
    given_costs = [uneven(route, seed) for route in routes]
    if len(given_costs) == 1:
        return given_costs[0], None
    return given_costs[0], replace(given_costs[1], held_fraction=given_costs[0].held_fraction)


@given(name=st.sampled_from(sorted(NAMED)), p=st.integers(1, 6), k=st.integers(1, 4), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=80)
def test_kernel_and_reference_agree(name: str, p: int, k: int, seed: int) -> None:
    m = k * p
    if refusal_of(name, num_devices=p, num_microbatches=m) is not None:
        return
    schedule = named(name, num_devices=p, num_microbatches=m)
    costs, other = costs_of_routes(schedule, seed)
    ours = simulate(schedule, costs, other_route=other)
    reference = simulate_reference(schedule, costs, other_route=other)
    assert ours.makespan_s == pytest.approx(reference.makespan_s, rel=1e-12)
    assert ours.peak_activation_bytes == pytest.approx(reference.peak_activation_bytes, rel=1e-9)
    for device in range(p):
        for action, start, end in zip(
            schedule.actions(device), ours.start_s[device], ours.end_s[device], strict=True
        ):
            assert start == pytest.approx(reference.start_s[action], abs=1e-9)
            assert end == pytest.approx(reference.end_s[action], abs=1e-9)
    assert 0 <= ours.bubble_fraction < 1
    assert ours.busy_s.max() * (1 - 1e-9) <= ours.period_s <= ours.makespan_s * (1 + 1e-9)


@given(p=st.integers(2, 5), m=st.integers(2, 8), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=12)
def test_period_is_what_many_repeated_lists_take(p: int, m: int, seed: int) -> None:
    schedule = named("zb-v", num_devices=p, num_microbatches=m)
    costs = uneven(schedule.placement, seed)
    times = [simulate_reference(_repeated(schedule, k), costs).makespan_s for k in (20, 40)]
    assert simulate(schedule, costs).period_s == pytest.approx((times[1] - times[0]) / 20, rel=2e-3)


def _repeated(schedule: Schedule, times: int) -> Schedule:
    m = schedule.num_microbatches
    orders = []
    for device in range(schedule.num_devices):
        actions = schedule.actions(device)
        rows = [a._replace(microbatch=a.microbatch + k * m) for k in range(times) for a in actions]
        orders.append(np.array([a.encode(m * times) for a in rows]))
    return replace(schedule, num_microbatches=m * times, orders=tuple(orders))


def test_largest_cycle_mean() -> None:
    weights = np.array([[1.0, 5.0], [3.0, 2.0]])
    assert _largest_cycle_mean(weights) == pytest.approx(4.0)


def test_memory_follows_the_held_fraction() -> None:
    schedule = named("zb-h1", num_devices=2, num_microbatches=4)
    peaks = [
        simulate(schedule, uniform((0, 1), held=held)).peak_activation_bytes.tolist() for held in (0.0, 1.0)
    ]
    assert peaks[1] == [2.0, 2.0]
    assert peaks[0] == [2.0, 1.0]


def _edited(row: list[str], device: int = 0) -> Schedule:
    """1F1B on 2 devices and 2 microbatches with one device's list replaced."""
    from quartet_plugin.schedule.action import Action

    schedule = named("1f1b", num_devices=2, num_microbatches=2)
    orders = list(schedule.orders)
    orders[device] = np.array([Action.parse(text).encode(2) for text in row], dtype=np.int64)
    return replace(schedule, orders=tuple(orders))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (["0F0", "0F1", "0B0"], "0B1"),
        (["0F0", "0F1", "0B0", "0B0"], "0B0"),
        (["0F0", "0F1", "0B0", "0I1"], "1"),
        (["0F0", "0F1", "0B0", "0B1", "0W1"], "0W1"),
        (["0F0", "0F1", "0B0", "1B1"], "1B1"),
        (["0F0", "0B1", "0F1", "0B0"], "0B1"),
        (["0F0", "0B0", "0B1", "0F1"], "0B1"),
    ],
)
def test_refuses_broken_orders(row: list[str], words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        simulate(_edited(row), uniform((0, 1)))
    assert "device 1" in str(caught.value)


def test_refuses_a_deadlock_across_devices() -> None:
    schedule = _edited(["0F1", "0B1", "0F0", "0B0"])
    with pytest.raises(PlanError, match="deadlock"):
        simulate(schedule, uniform((0, 1)))
    with pytest.raises(PlanError, match="deadlock"):
        simulate_reference(schedule, uniform((0, 1)))


def test_refuses_too_much_memory_and_shows_the_cell() -> None:
    schedule = named("gpipe", num_devices=2, num_microbatches=4)
    with pytest.raises(PlanError, match=r"0F2 on device 0 exceeds its limit of 2 (?s:.*)\[0F2\]"):
        simulate(schedule, uniform((0, 1)), memory_limit_bytes=np.array([2.0, 9.0]))
    simulate(schedule, uniform((0, 1)), memory_limit_bytes=np.array([4.0, 4.0]))


def test_refuses_costs_of_another_placement() -> None:
    schedule = named("zb-v", num_devices=2, num_microbatches=4)
    with pytest.raises(PlanError, match="placement"):
        simulate(schedule, uniform(places.loop(2, 2)))
    with pytest.raises(PlanError, match="copy of the model"):
        simulate(named("chimera", num_devices=2, num_microbatches=4), uniform((0, 1)))


def test_a_cost_table_brings_split_and_limit() -> None:
    costs = random_costs(num_devices=4, num_microbatches=8, num_layers=10, seed=1)
    split = (3, 3, 3, 3)
    schedule = replace(named("1f1b", num_devices=4, num_microbatches=8), layers_per_stage=split)
    whole = simulate_costs(schedule, costs)
    direct = simulate(schedule, stage_costs(costs, placement=(0, 1, 2, 3), layers_per_stage=split))
    assert whole.makespan_s == direct.makespan_s
    tight = replace(costs, memory_limit_bytes=np.full(4, 5.0))
    with pytest.raises(PlanError, match="exceeds its limit"):
        simulate_costs(schedule, tight)
    with pytest.raises(PlanError, match="microbatches"):
        simulate_costs(schedule, replace(costs, num_microbatches=9))
    with pytest.raises(PlanError, match="layers_per_stage"):
        simulate_costs(replace(schedule, layers_per_stage=None), costs)


def test_action_times_are_the_simulations_and_forwards_alone_run() -> None:
    schedule = named("zb-v", num_devices=3, num_microbatches=6)
    costs = uneven(schedule.placement, seed=1)
    expected = simulate(schedule, costs)
    start_s, end_s = action_times(schedule, costs)
    forwards = replace(schedule, orders=tuple(order[order & 3 == 0] for order in schedule.orders))
    first_s, _ = action_times(forwards, costs)
    for device in range(3):
        assert start_s[device].tolist() == expected.start_s[device].tolist()
        assert end_s[device].tolist() == expected.end_s[device].tolist()
        assert len(first_s[device]) == 12
    with pytest.raises(PlanError, match="deadlock"):
        action_times(replace(schedule, orders=tuple(order[::-1] for order in schedule.orders)), costs)
