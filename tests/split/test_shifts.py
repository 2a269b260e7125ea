"""Shifts of stage boundaries: every legal split is reached from every other one, and nothing else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_plugin.split.layers import even_split, is_legal_split
from quartet_plugin.split.shifts import greatest_shift, scaled_split, shifted_split, shifts_between


@st.composite
def splits(draw: st.DrawFn, *, num_layers: int, num_stages: int) -> tuple[int, ...]:
    inner = max(0, num_stages - 2)
    edges = sorted(draw(st.integers(0, num_layers - inner)) for _ in range(num_stages - 1))
    counts = [b - a for a, b in zip([0, *edges], [*edges, num_layers - inner], strict=True)]
    return tuple(count + (0 < stage < num_stages - 1) for stage, count in enumerate(counts))


@given(st.data(), st.integers(2, 9), st.integers(0, 20))
def test_any_split_is_made_of_any_other(data: st.DataObject, num_stages: int, more: int) -> None:
    num_layers = num_stages + more
    origin, split = (data.draw(splits(num_layers=num_layers, num_stages=num_stages)) for _ in range(2))
    shifts = shifts_between(origin, split)
    assert shifted_split(origin, shifts) == split
    assert max(map(abs, shifts)) <= greatest_shift(num_layers, num_stages=num_stages)


@given(st.data(), st.integers(2, 9), st.integers(0, 20))
def test_any_shifts_give_a_legal_split(data: st.DataObject, num_stages: int, more: int) -> None:
    num_layers = num_stages + more
    origin = data.draw(splits(num_layers=num_layers, num_stages=num_stages))
    shifts = data.draw(st.lists(st.integers(-30, 30), min_size=num_stages - 1, max_size=num_stages - 1))
    made = shifted_split(origin, shifts)
    assert is_legal_split(made, num_layers=num_layers, num_stages=num_stages)


@pytest.mark.parametrize(
    ("split", "num_layers", "expected"),
    [
        ((5, 3), 16, (10, 6)),
        ((10, 6), 8, (5, 3)),
        ((2, 2, 2, 2), 4, (1, 1, 1, 1)),
        ((7, 1), 2, (2, 0)),
        ((0, 4, 4, 0), 6, (0, 3, 3, 0)),
    ],
)
def test_a_split_of_another_depth_has_its_boundaries_in_proportion(
    split: tuple[int, ...], num_layers: int, expected: tuple[int, ...]
) -> None:
    origin = even_split(num_layers, num_stages=len(split))
    assert scaled_split(split, num_layers=num_layers, origin=origin) == expected
    assert sum(scaled_split(split, num_layers=3, origin=even_split(3, num_stages=len(split)))) == 3
