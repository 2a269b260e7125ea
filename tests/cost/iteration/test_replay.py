"""The critical path: its sum is the makespan that the simulator gives, its counts are the derivative."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.cost.iteration.orders import FULL_ROUNDS, OrderedActions, folded
from quartet_plugin.cost.iteration.replay import SAME, critical_path, makespan, makespans
from quartet_plugin.model.costs import StageCosts
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import simulate

SCHEDULES = [("1f1b", None), ("gpipe", None), ("interleaved", 2), ("zb-h1", None), ("zb-v", 2)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, np.ndarray, np.ndarray]:
    name, chunks = draw(st.sampled_from(SCHEDULES))
    devices = draw(st.integers(2, 4))
    count = devices * draw(st.integers(1, 3))
    schedule = named(name, num_devices=devices, num_microbatches=count, num_chunks=chunks)
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    times = generator.uniform(0.5, 2.0, size=(3, schedule.num_stages))
    send = generator.uniform(0.0, 0.5, size=schedule.num_stages)
    send[-1] = 0.0
    return (
        schedule,
        np.vstack([times, times[1] + times[2]]),
        np.stack([send, np.concatenate(([0.0], send[:-1]))]),
    )


def path(schedule: Schedule, times: np.ndarray, sends: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """The makespan and the counts of actions and of transfers on the critical path."""
    ordered = OrderedActions(schedule)
    actions, transfers = np.zeros((4, ordered.num_stages)), np.zeros((2, ordered.num_stages))
    route = np.zeros(ordered.num_microbatches, dtype=np.int64)
    seconds = critical_path(
        ordered.orders, ordered.offsets, ordered.placement, route, times, sends, SAME, actions, transfers
    )
    return seconds, actions, transfers


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_path_sums_to_the_simulated_makespan(case: tuple[Schedule, np.ndarray, np.ndarray]) -> None:
    schedule, times, sends = case
    seconds, actions, transfers = path(schedule, times, sends)
    costs = StageCosts(
        device_of_stage=np.array(schedule.placement),
        forward_s=times[0],
        input_grad_s=times[1],
        weight_grad_s=times[2],
        backward_s=times[3],
        activation_bytes=np.ones(schedule.num_stages),
        forward_transfer_s=sends[0],
        backward_transfer_s=sends[1],
        held_fraction=1.0,
    )
    assert seconds == pytest.approx(simulate(schedule, costs).makespan_s, rel=1e-12)
    total = (actions * times).sum() + (transfers * sends).sum()
    assert total == pytest.approx(seconds, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(0, 3), st.integers(0, 100))
def test_counts_are_the_derivative(case: tuple[Schedule, np.ndarray, np.ndarray], kind: int, at: int) -> None:
    """Times drawn at random have one longest path, which a change of a billionth leaves the longest."""
    schedule, times, sends = case
    stage = at % schedule.num_stages
    before, actions, _ = path(schedule, times, sends)
    step = 1e-8
    moved = times.copy()
    moved[kind, stage] += step
    slope = (path(schedule, moved, sends)[0] - before) / step
    assert slope == pytest.approx(actions[kind, stage], abs=1e-3)


def waiting() -> Schedule:
    """Orders that wait for each other."""
    good = named("1f1b", num_devices=2, num_microbatches=2)
    first = good.orders[0][::-1].copy()
    return Schedule(num_devices=2, num_microbatches=2, placement=(0, 1), orders=(first, good.orders[1]))


def test_orders_that_wait_for_each_other_have_no_makespan() -> None:
    assert path(waiting(), np.ones((4, 2)), np.zeros((2, 2)))[0] == -1
    assert together(waiting(), np.ones((4, 2, 3)), np.zeros((2, 2, 3))).tolist() == [-1.0] * 3
    assert len(OrderedActions(waiting()).sequence) < 8


def together(schedule: Schedule, times: np.ndarray, sends: np.ndarray) -> np.ndarray:
    """The makespans under several times, the last axis of `times` and `sends`."""
    ordered = OrderedActions(schedule)
    return makespans(
        ordered.orders,
        ordered.sequence,
        ordered.num_devices,
        ordered.placement,
        ordered.num_microbatches,
        times,
        sends,
    )


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 20))
def test_several_times_together_take_what_each_takes_alone(
    case: tuple[Schedule, np.ndarray, np.ndarray], num: int
) -> None:
    """To the last bit; the sequence holds every action once, after those that it waits for."""
    schedule, times, sends = case
    ordered = OrderedActions(schedule)
    assert sorted(ordered.sequence.tolist()) == list(range(len(ordered.orders)))
    scales = np.linspace(0.5, 1.5, num)
    each = [
        makespan(
            ordered.orders,
            ordered.offsets,
            np.empty(0, dtype=np.uint8),
            ordered.placement,
            ordered.num_microbatches,
            times * scale,
            sends / scale,
            np.zeros_like(sends),
        )
        for scale in scales
    ]
    assert together(schedule, times[..., None] * scales, sends[..., None] / scales).tolist() == each


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_many_microbatches_are_extrapolated_from_two_shorter_runs(name: str) -> None:
    devices, count = 3, 3 * FULL_ROUNDS + 19
    times = np.vstack([np.linspace(1, 2, devices)] * 3 + [2 * np.linspace(1, 2, devices)])
    sends = np.array([[0.3, 0.1, 0.0], [0.0, 0.3, 0.1]])

    def seconds(number: int) -> float:
        schedule = named(name, num_devices=devices, num_microbatches=number)
        return path(schedule, times, sends)[0]

    parts = folded(count, unit=devices)
    assert len(parts) == 2
    assert sum(size * weight for size, weight in parts) == pytest.approx(count)
    assert sum(weight * seconds(size) for size, weight in parts) == pytest.approx(seconds(count), rel=1e-9)
    assert folded(5, unit=devices) == [(5, 1.0)]
