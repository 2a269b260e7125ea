"""The table of a refusal: the marked cell is there, and the window stays readable."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.schedule.table import MAX_WIDTH, refusal, render
from tests.schedule.orders import one_f_one_b, schedule_of


def test_a_small_schedule_is_shown_whole() -> None:
    schedule = schedule_of(one_f_one_b(2, 3), 3)
    assert [line.split() for line in render(schedule).splitlines()] == [
        ["position", "0", "1", "2", "3", "4", "5", "6"],
        ["device", "0", "0F0", "0F1", "0B0", "0F2", "0B1", "0B2"],
        ["device", "1", "1F0", "1B0", "1F1", "1B1", "1F2", "1B2"],
    ]


def test_marks() -> None:
    schedule = schedule_of(one_f_one_b(2, 3), 3)
    text = render(schedule, mark=(1, 3), related=[(0, 2)])
    row0, row1 = text.splitlines()[1:]
    assert "[1B1]" in row1
    assert "(0B0)" in row0
    assert text.count("[") == 1


def test_a_missing_last_action_is_marked() -> None:
    rows = one_f_one_b(2, 3)
    rows[0].pop()
    assert "[-]" in render(schedule_of(rows, 3), mark=(0, 5)).splitlines()[1]


@given(
    devices=st.integers(1, 40),
    microbatches=st.integers(1, 60),
    at=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    own_windows=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_the_window_holds_the_mark_and_fits(
    devices: int, microbatches: int, at: tuple[float, float], own_windows: bool
) -> None:
    schedule = schedule_of(one_f_one_b(devices, microbatches), microbatches)
    device = min(int(at[0] * devices), devices - 1)
    index = min(int(at[1] * 2 * microbatches), 2 * microbatches - 1)
    centres = [index] * devices if own_windows else None
    lines = render(schedule, mark=(device, index), centres=centres).splitlines()
    action = schedule.actions(device)[index]
    marked = [line for line in lines if f"[{action}]" in line]
    assert len(marked) == 1
    assert re.match(rf"device {device}\b", marked[0])
    assert max(map(len, lines)) <= MAX_WIDTH
    assert len(lines) <= 19


def test_a_refusal_is_one_line_and_then_the_table() -> None:
    schedule = schedule_of(one_f_one_b(2, 3), 3)
    first, *table = str(refusal(schedule, "1B1 is wrong", mark=(1, 3))).splitlines()
    assert first == "1B1 is wrong"
    assert table == render(schedule, mark=(1, 3)).splitlines()
