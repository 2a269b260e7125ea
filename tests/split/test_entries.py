"""Entries: the even rule, the balanced ones against brute force, and what is refused."""

from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.costs import Costs
from quartet_plugin.schedule import placement as places
from quartet_plugin.split.entries import (
    balanced_entries,
    check_entries,
    device_loads,
    even_entries,
    minimum_entries,
)
from quartet_plugin.split.layers import entries_of, layers_of
from tests.schedule.sample_costs import random_costs


def costs_for(p: int, layers: int, seed: int = 0) -> Costs:
    return random_costs(num_devices=p, num_microbatches=4, num_layers=layers, seed=seed, head=3.0)


@given(stages=st.integers(1, 12), layers=st.integers(12, 60))
@settings(deadline=None, max_examples=40)
def test_even_entries_follow_the_rule(stages: int, layers: int) -> None:
    entries = even_entries(costs_for(2, layers), stages)
    assert sum(entries) == layers + 2
    split = layers_of(entries)
    assert entries_of(split) == entries
    assert max(split) - min(split) <= 1
    assert list(split) == [(s + 1) * layers // stages - s * layers // stages for s in range(stages)]


def brute_force(costs: Costs, placement: tuple[int, ...]) -> float:
    total, stages = len(costs.layers), len(placement)
    best = np.inf
    for cuts in combinations_with_replacement(range(total + 1), stages - 1):
        edges = (0, *cuts, total)
        counts = [b - a for a, b in pairwise(edges)]
        if min(counts) >= 1:
            best = min(best, float(device_loads(costs, placement, counts).max()))
    return best


@given(p=st.integers(2, 3), layers=st.integers(6, 9), seed=st.integers(0, 50))
@settings(deadline=None, max_examples=20)
def test_balanced_entries_are_exact_with_one_stage_a_device(p: int, layers: int, seed: int) -> None:
    costs = costs_for(p, layers, seed)
    placement = places.linear(p)
    split = balanced_entries(costs, placement)
    assert device_loads(costs, placement, split).max() == pytest.approx(brute_force(costs, placement))


@given(layers=st.integers(6, 10), seed=st.integers(0, 50))
@settings(deadline=None, max_examples=20)
def test_balanced_entries_are_near_the_best_with_two_stages_a_device(layers: int, seed: int) -> None:
    costs = costs_for(2, layers, seed)
    placement = places.v_shape(2)
    split = balanced_entries(costs, placement)
    loads = device_loads(costs, placement, split)
    assert loads.max() <= 1.25 * brute_force(costs, placement)
    even = device_loads(costs, placement, even_entries(costs, 4)).max()
    assert loads.max() <= even + 1e-9 or loads.max() <= 1.1 * brute_force(costs, placement)


def test_a_heavy_head_and_a_slow_device_get_fewer_layers() -> None:
    costs = replace(costs_for(4, 20), device_slowdown=np.array([1.0, 2.0, 1.0, 1.0]))
    split = balanced_entries(costs, places.linear(4))
    assert split[1] < split[0]
    assert split[1] < split[2]
    assert split[3] < split[2]


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((4, 4, 4), "for 4 stages"),
        ((3, 3, 3, 4), "sums to 13"),
        ((-1, 5, 4, 4), "sums to 12"),
        ((0, 4, 4, 4), "embedding"),
        ((4, 4, 4, 0), "head"),
        ((4, 0, 4, 4), "allow-empty"),
    ],
)
def test_refuses_illegal_entries(counts: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_entries(costs_for(4, 10), counts, num_stages=4)


def test_empty_stages_only_when_asked() -> None:
    costs = costs_for(2, 2)
    with pytest.raises(ConfigError, match="allow-empty"):
        balanced_entries(costs, places.loop(2, 3))
    with pytest.raises(ConfigError, match="allow-empty"):
        even_entries(costs, 6)
    assert sum(balanced_entries(costs, places.loop(2, 3), allow_empty=True)) == 4
    assert sum(even_entries(costs, 6, allow_empty=True)) == 4
    assert minimum_entries(costs, 6, allow_empty=True) == (1, 0, 0, 0, 0, 1)
