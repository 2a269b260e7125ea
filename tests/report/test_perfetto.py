"""The trace: its schema, its times, its arrows and its memory."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.report.perfetto import trace
from quartet_plugin.schedule.action import Action, ActionKind
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import Simulation, simulate
from tests.schedule.orders import one_f_one_b, schedule_of, unit_costs, v_schedule

KEYS = {
    "M": {"ph", "pid", "tid", "name", "args"},
    "X": {"ph", "pid", "tid", "ts", "dur", "name", "cat", "args"},
    "s": {"ph", "pid", "tid", "ts", "id", "name", "cat"},
    "f": {"ph", "pid", "tid", "ts", "id", "name", "cat", "bp"},
    "C": {"ph", "pid", "name", "ts", "args"},
}


def traced(schedule: Schedule, *, memory: bool = False) -> tuple[list[dict[str, Any]], Simulation]:
    costs = unit_costs(schedule, transfer_s=0.25)
    simulation = simulate(schedule, costs)
    value = trace(schedule, simulation, name="a <name>", costs=costs if memory else None)
    text = json.dumps(value, allow_nan=False)
    assert set(value) == {"traceEvents", "displayTimeUnit", "otherData"}
    return json.loads(text)["traceEvents"], simulation


def of(events: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == phase]


@given(devices=st.integers(1, 5), microbatches=st.integers(1, 6), memory=st.booleans())
@settings(deadline=None, max_examples=25)
def test_the_schema(devices: int, microbatches: int, memory: bool) -> None:
    events, _ = traced(schedule_of(one_f_one_b(devices, microbatches), microbatches), memory=memory)
    for event in events:
        assert set(event) == KEYS[event["ph"]]
        assert event.get("dur", 0) >= 0
    assert bool(of(events, "C")) == memory


def test_a_track_a_device_with_its_name() -> None:
    events, _ = traced(schedule_of(one_f_one_b(3, 4), 4))
    names = {e["tid"]: e["args"]["name"] for e in of(events, "M") if e["name"] == "thread_name"}
    assert names == {0: "device 0", 1: "device 1", 2: "device 2"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["a <name>"]


def test_slices_are_the_simulated_actions_in_microseconds() -> None:
    schedule = v_schedule()
    events, simulation = traced(schedule)
    for device in range(2):
        slices = [e for e in of(events, "X") if e["tid"] == device]
        assert [e["name"] for e in slices] == [str(a) for a in schedule.actions(device)]
        assert [e["ts"] for e in slices] == pytest.approx((simulation.start_s[device] * 1e6).tolist())
        assert [e["ts"] + e["dur"] for e in slices] == pytest.approx(
            (simulation.end_s[device] * 1e6).tolist()
        )
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(slices))
        for event in slices:
            args = event["args"]
            assert str(Action(args["stage"], ActionKind[args["kind"]], args["microbatch"])) == event["name"]


def test_an_arrow_for_every_hand_over_between_devices() -> None:
    """Stages 0 | 1 2 | 3: of three boundaries the middle one stays on its device."""
    events, _ = traced(v_schedule())
    starts, ends = of(events, "s"), of(events, "f")
    assert len(starts) == len(ends) == 2 * 2 * 2
    for start, end in zip(starts, ends, strict=True):
        assert start["id"] == end["id"]
        assert start["tid"] != end["tid"]
        assert start["ts"] < end["ts"]
    assert len({e["id"] for e in starts}) == len(starts)


def test_arrows_stay_inside_slices() -> None:
    events, _ = traced(v_schedule())
    slices = of(events, "X")
    for event in [*of(events, "s"), *of(events, "f")]:
        assert any(s["tid"] == event["tid"] and s["ts"] < event["ts"] < s["ts"] + s["dur"] for s in slices)


def test_memory_rises_to_the_simulated_peak_and_ends_at_zero() -> None:
    schedule = schedule_of(one_f_one_b(4, 8), 8)
    events, simulation = traced(schedule, memory=True)
    for device in range(4):
        levels = [e["args"]["bytes"] for e in of(events, "C") if e["name"].endswith(f"device {device}")]
        assert max(levels) == simulation.peak_activation_bytes[device]
        assert levels[-1] == pytest.approx(0)
