"""Placements: shapes, rules and names."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError
from quartet_plugin.schedule import placement as places
from quartet_plugin.schedule.placement import PlacementKind


def test_shapes() -> None:
    assert places.linear(3) == (0, 1, 2)
    assert places.loop(2, 3) == (0, 1, 0, 1, 0, 1)
    assert places.v_shape(3) == (0, 1, 2, 2, 1, 0)
    assert places.snake(2, 3) == (0, 1, 1, 0, 0, 1)


@given(kind=st.sampled_from(["linear", "loop", "v", "snake"]), p=st.integers(2, 9), chunks=st.integers(2, 5))
@settings(deadline=None, max_examples=40)
def test_built_placements_are_legal_and_know_their_name(kind: str, p: int, chunks: int) -> None:
    count = None if kind in ("linear", "v") else chunks
    placement = places.build(kind, num_devices=p, num_chunks=count)
    assert places.check(placement, num_devices=p) == placement
    name = places.kind_of(placement, num_devices=p)
    assert name == (PlacementKind.V if kind == "snake" and chunks == 2 else kind)
    chunk = places.chunk_of_stage(placement)
    for device, stages in enumerate(places.stages_of_device(placement, p)):
        assert [placement[s] for s in stages] == [device] * len(stages)
        assert chunk[stages].tolist() == list(range(len(stages)))


@pytest.mark.parametrize(
    ("kind", "chunks", "words"),
    [
        ("linear", 2, "exactly 1"),
        ("v", 3, "exactly 2"),
        ("loop", 1, "at least 2"),
        ("snake", 1, "at least 2"),
        ("spiral", None, "spiral"),
        ("list", None, "list"),
    ],
)
def test_refuses_wrong_shapes(kind: str, chunks: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        places.build(kind, num_devices=4, num_chunks=chunks)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ((1, 0), "start with device 0"),
        ((), "start with device 0"),
        ((0, 1, 2), "does not exist"),
        ((0, 1, 1, 1), "equally often"),
        ((0, 0), "equally often"),
    ],
)
def test_refuses_illegal_lists(placement: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        places.build(placement, num_devices=2)


def test_a_list_is_kept() -> None:
    assert places.build([0, 1, 1, 0], num_devices=2) == (0, 1, 1, 0)
    assert places.kind_of((0, 1, 1, 0, 1, 0), num_devices=2) is PlacementKind.LIST
