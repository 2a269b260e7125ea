"""The few lines of text a schedule comes to."""

from dataclasses import replace

import numpy as np
import pytest

from quartet_plugin.report.summary import aligned, describe, schedule_summary, seconds
from quartet_plugin.schedule.simulate import simulate
from tests.schedule.orders import one_f_one_b, schedule_of, unit_costs, v_schedule


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 s"), (12.5, "12.5 s"), (0.0125, "12.5 ms"), (2e-6, "2 us"), (1.23456789, "1.23457 s")],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


def test_columns() -> None:
    assert aligned([["a", ">b"], ["long", "1"], ["x", "100"]]) == ["a       b", "long    1", "x     100"]


def test_the_figures_and_a_row_a_device() -> None:
    schedule = v_schedule()
    simulation = simulate(schedule, unit_costs(schedule))
    text = schedule_summary(
        schedule,
        simulation,
        memory_limit_bytes=np.array([4.0, 5.0]),
        lower_bound_s=simulation.makespan_s,
        best_named=("zb-v", 2 * simulation.makespan_s),
    )
    lines = text.splitlines()
    assert lines[0] == "schedule   1f1b: 2 devices, 4 stages, 2 microbatches"
    assert lines[1].split() == ["makespan", f"{simulation.makespan_s:g}", "s"]
    assert "reached, so this is proven optimal" in text
    assert "50.0 % saved" in text
    rows = [line.split() for line in lines[-2:]]
    assert rows[0][:5] == ["0", "0", "3", "1", "1"]
    assert rows[1][-2:] == ["5", "B"]


def test_what_it_is_compared_with() -> None:
    schedule = schedule_of(one_f_one_b(2, 3), 3)
    simulation = simulate(schedule, unit_costs(schedule))
    text = schedule_summary(schedule, simulation, lower_bound_s=10.0, best_named=("1f1b", 12.0))
    assert "20.0 % above" in text
    assert "no schedule found is shorter" in text
    by_period = replace(simulation, period_s=6.0)
    text = schedule_summary(schedule, by_period, best_named=("1f1b", 12.0), objective="period")
    assert "50.0 % saved" in text


def test_many_devices_are_cut() -> None:
    schedule = schedule_of(one_f_one_b(70, 2), 2)
    lines = schedule_summary(schedule, simulate(schedule, unit_costs(schedule))).splitlines()
    assert lines[-1] == "(6 more devices)"
    assert len(lines) < 75


def test_words_for_where_it_comes_from() -> None:
    schedule = schedule_of(one_f_one_b(2, 3), 3)
    assert describe(schedule).startswith("1f1b: 2 devices")
    assert describe(replace(schedule, origin={"family": {}})).startswith("the family: ")
    assert describe(replace(schedule, origin={})).startswith("of no origin: ")
    two = replace(schedule, routes=((0, 1), (1, 0)), route_of_microbatch=(0, 1, 0))
    assert "two copies of the model" in describe(two)
