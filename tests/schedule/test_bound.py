"""The bound never exceeds a makespan, and is as tight as known optima say."""

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.costs import Costs, LayerCost, stage_costs
from quartet_plugin.schedule.bound import lower_bound, promising_splits
from quartet_plugin.schedule.exact import exact_optimum
from quartet_plugin.schedule.files import costs_from_json
from tests.schedule.pipelines import random_costs, random_placement, random_schedule, random_split
from tests.schedule.reference_simulator import simulate_reference
from tests.schedule.test_exact import CASES

SEEDS = st.integers(0, 100_000)


def uniform(num_devices: int, num_microbatches: int, num_layers: int, limit: float | None = None) -> Costs:
    """F = I = W = 1 a layer."""
    return Costs(
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        layers=tuple(
            LayerCost(name=f"l{n}", forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, activation_bytes=1.0)
            for n in range(num_layers)
        ),
        device_slowdown=np.ones(num_devices),
        transfer_s=np.zeros((num_devices, num_devices)),
        memory_limit_bytes=None if limit is None else np.full(num_devices, limit),
        weight_grad_held_fraction=1.0,
        backward_fused_s=None,
    )


@settings(deadline=None, max_examples=30)
@given(seed=SEEDS, fused=st.booleans())
def test_no_schedule_beats_any_form_of_the_bound(seed: int, fused: bool) -> None:
    rng = np.random.default_rng(seed)
    num_devices, num_chunks = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    num_stages = num_devices * num_chunks
    num_layers = num_stages + int(rng.integers(0, 4))
    costs = random_costs(
        rng,
        num_devices=num_devices,
        num_microbatches=int(rng.integers(1, 6)),
        num_layers=num_layers,
        fused=fused,
    )
    placement = random_placement(rng, num_devices, num_chunks)
    split = random_split(rng, num_layers, num_stages)
    schedule = random_schedule(rng, placement=placement, num_microbatches=costs.num_microbatches)
    outcome = simulate_reference(schedule, stage_costs(costs, placement=placement, layers_per_stage=split))
    costs = replace(costs, memory_limit_bytes=np.array(outcome.peak_activation_bytes))
    makespan = outcome.makespan_s * (1 + 1e-12)
    fixed = lower_bound(costs, placement=placement, layers_per_stage=split).makespan_s
    assert fixed <= makespan

    def free(**options: Any) -> float:
        return lower_bound(costs, time_limit_s=0.5, **options).makespan_s

    one_by_one = free(placement=placement)
    assert free(placement=placement, max_splits=0) <= one_by_one * (1 + 1e-9) <= fixed * (1 + 2e-9)
    for bound in (free(layers_per_stage=split), free(num_chunks=num_chunks), free(), free(allow_empty=True)):
        assert bound <= fixed * (1 + 1e-9)


@settings(deadline=None, max_examples=20)
@given(seed=SEEDS)
def test_empty_stages_are_covered_when_allowed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement = random_placement(rng, 3, 2)
    costs = random_costs(rng, num_devices=3, num_microbatches=3, num_layers=4)
    split = np.diff([0, *sorted(rng.integers(0, 5, size=5).tolist()), 4]).tolist()
    schedule = random_schedule(rng, placement=placement, num_microbatches=3)
    outcome = simulate_reference(schedule, stage_costs(costs, placement=placement, layers_per_stage=split))
    for given_placement in (placement, None):
        bound = lower_bound(costs, placement=given_placement, allow_empty=True, time_limit_s=1)
        assert bound.makespan_s <= outcome.makespan_s * (1 + 1e-12)


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_bounds_stay_below_proven_optima(case: dict[str, Any]) -> None:
    costs = costs_from_json(case["costs"])
    for options in (
        {"placement": case["placement"], "layers_per_stage": case["layers_per_stage"]},
        {"placement": case["placement"]},
        {"layers_per_stage": case["layers_per_stage"]},
        {},
    ):
        assert lower_bound(costs, time_limit_s=0.3, **options).makespan_s <= case["optimum_s"] + 1e-9


def test_the_bound_is_the_optimum_in_four_tenths_of_the_golden_cases() -> None:
    gaps = []
    for case in CASES:
        costs = costs_from_json(case["costs"])
        bound = lower_bound(costs, placement=case["placement"], layers_per_stage=case["layers_per_stage"])
        gaps.append(case["optimum_s"] / bound.makespan_s - 1)
    assert sum(gap < 1e-6 for gap in gaps) >= 0.4 * len(gaps)
    assert max(gaps) < 0.3


def test_zero_bubble_meets_the_bound() -> None:
    """ZB-H2's makespan: the last device starts after p - 1 forwards and never waits again."""
    bound = lower_bound(uniform(8, 32, 8), placement=range(8), layers_per_stage=[1] * 8)
    assert bound.makespan_s == pytest.approx(3 * 32 + 7)


@pytest.mark.parametrize("placement", [None, [0, 1]])
def test_costs_of_zero_are_bounded_by_zero(placement: list[int] | None) -> None:
    costs = uniform(2, 2, 2)
    layers = [replace(layer, forward_s=0.0, input_grad_s=0.0, weight_grad_s=0.0) for layer in costs.layers]
    assert lower_bound(replace(costs, layers=tuple(layers)), placement=placement).makespan_s == 0.0


def test_memory_makes_the_bound_longer() -> None:
    """With room for one microbatch a round trip separates forwards: all F, all I, then W, m times."""
    costs = uniform(4, 6, 4, limit=1.0)
    bound = lower_bound(costs, placement=range(4), layers_per_stage=[1] * 4)
    assert bound.makespan_s == pytest.approx(6 * (4 + 4 + 1))
    optimum = exact_optimum(costs, placement=range(4), layers_per_stage=[1] * 4)
    assert optimum.makespan_s == pytest.approx(bound.makespan_s)


def test_splits_left_out_cannot_have_the_least_bound() -> None:
    rng = np.random.default_rng(5)
    costs = random_costs(rng, num_devices=3, num_microbatches=4, num_layers=9)
    splits = [tuple(b - a for a, b in pairwise((0, *cuts, 9))) for cuts in combinations(range(1, 9), 5)]
    placement = [0, 1, 2, 2, 1, 0]
    bounds = [lower_bound(costs, placement=placement, layers_per_stage=s).makespan_s for s in splits]
    assert lower_bound(costs, placement=placement).makespan_s == min(bounds)
    everything = promising_splits(
        costs, placement=placement, below_s=1e9, allow_empty=False, max_splits=1_000
    )
    assert everything is not None
    assert set(everything) == set(splits)


def test_whole_layers_make_the_free_bound_exceed_the_average() -> None:
    """Nine layers on eight devices: some device has two."""
    costs = uniform(8, 64, 9)
    assert lower_bound(costs).makespan_s == pytest.approx(64 * 6, rel=1e-5)
    assert lower_bound(costs, placement=range(8)).makespan_s == pytest.approx(64 * 6, rel=1e-5)


def test_the_ends_of_the_model_stay_where_they_belong() -> None:
    """A heavy embedding cannot leave slow device 0."""
    costs = uniform(2, 4, 4)
    layers = (replace(costs.layers[0], name="embedding", forward_s=10.0), *costs.layers[1:])
    costs = replace(costs, layers=layers, device_slowdown=np.array([2.0, 1.0]))
    assert lower_bound(costs).makespan_s == pytest.approx(4 * 2 * 12, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": [1, 0]}, "begin with 0"),
        ({"placement": [0, 0, 1, 1, 1, 0], "layers_per_stage": [1] * 5}, "must be equal"),
        ({"placement": [0, 0, 0, 1]}, "equally often"),
        ({"placement": [0, 1, 0]}, "multiple"),
        ({"num_chunks": 3}, "leave one empty"),
        ({"placement": [0, 1], "layers_per_stage": [1, 1]}, "sums to 2"),
    ],
)
def test_sizes_that_disagree_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lower_bound(uniform(2, 2, 4), **options)
