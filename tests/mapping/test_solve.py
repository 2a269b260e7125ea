"""The mapping solver: optimal where that can be checked, never worse than stock where it cannot."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import PlanError
from quartet_plugin.mapping.orders import is_legal
from quartet_plugin.mapping.solve import STOCK_ORDERS, solve, stock_arrangement
from quartet_plugin.mapping.topology import (
    Blocks,
    Topology,
    blocks_of,
    crossings,
    crossings_in_order,
    group_link,
)
from quartet_plugin.model.costs import IntArray
from quartet_plugin.model.layout import Layout
from quartet_plugin.planner.closed_form import StepCosts, solve_step, step_s
from tests.mapping.steps import make_costs, make_topology
from tests.space.jobs import make_layout

# tp, pp, dp, cp, ep; nodes, devices a node: six slots, or six blocks.
SMALL = (
    ((1, 2, 3, 1, 1), (3, 2)),
    ((1, 3, 2, 1, 1), (2, 3)),
    ((1, 6, 1, 1, 1), (2, 3)),
    ((2, 3, 1, 1, 1), (3, 2)),
    ((1, 2, 1, 3, 1), (2, 3)),
    ((1, 1, 3, 2, 1), (3, 2)),
    ((1, 1, 2, 3, 1), (3, 2)),
    ((1, 1, 6, 1, 1), (3, 2)),
    ((2, 1, 3, 1, 1), (3, 2)),
    ((1, 1, 6, 1, 2), (3, 2)),
    ((1, 3, 2, 1, 2), (2, 3)),
    ((1, 1, 3, 2, 3), (2, 3)),
)
BIG = (
    ((2, 4, 4, 1, 1), (4, 8)),
    ((1, 4, 8, 1, 1), (8, 4)),
    ((4, 2, 2, 2, 1), (4, 8)),
    ((2, 2, 8, 1, 4), (8, 4)),
    ((1, 2, 4, 4, 2), (4, 8)),
    ((8, 4, 4, 1, 1), (16, 8)),
)


def layout_of(degrees: tuple[int, ...], virtual: int = 1) -> Layout:
    tensor, pipeline, data, context, expert = degrees
    return make_layout(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        data_parallel=data,
        context_parallel=context,
        expert_parallel=expert,
        virtual_stages=virtual if pipeline > 1 else 1,
    )


def best_of_all(costs: StepCosts, topology: Topology) -> float:
    """The least of every permutation of the slots that the rules allow."""
    found = math.inf
    for slots in itertools.permutations(range(len(topology.slots))):
        if is_legal([topology.slots[slot] for slot in slots], layout=costs.layout):
            found = min(found, step_s(costs, topology, slots))
    return found


@pytest.mark.parametrize(("degrees", "cluster"), SMALL)
@pytest.mark.parametrize("seed", range(3))
def test_small_cases_are_solved_exactly(
    degrees: tuple[int, ...], cluster: tuple[int, int], seed: int
) -> None:
    costs = make_costs(layout_of(degrees, virtual=1 + seed % 2), seed=seed)
    topology = make_topology(num_nodes=cluster[0], per_node=cluster[1], seed=seed + 100)
    found = solve_step(costs, topology)
    assert found.exact
    assert found.step_s == pytest.approx(best_of_all(costs, topology), rel=1e-12)
    assert step_s(costs, topology, found.slots) == pytest.approx(found.step_s, rel=1e-12)


def by_places(blocks: Blocks) -> Callable[[IntArray], float]:
    """Seconds that differ between arrangements of kinds, without the costs of a model."""
    return lambda arrangement: float((blocks.kind[arrangement].ravel() * np.arange(arrangement.size)).sum())


@pytest.mark.parametrize(
    ("degrees", "cluster"),
    [((8, 1, 32, 1, 1), (32, 8)), ((1, 1, 1024, 1, 1), (128, 8)), ((1, 1, 1, 1024, 1), (128, 8))],
)
def test_the_only_arrangement_of_many_blocks_is_found_at_once(
    degrees: tuple[int, ...], cluster: tuple[int, int]
) -> None:
    """Without a pipeline replicas have nothing but names."""
    topology = make_topology(num_nodes=cluster[0], per_node=cluster[1], seed=0, unequal=False)
    found = solve(layout_of(degrees), topology, by_places, compute_s=np.ones(1), num_others=3)
    assert (found.slots, found.exact, found.others) == (tuple(range(len(topology.slots))), True, ())


@pytest.mark.parametrize(("most", "is_exact"), [(100, True), (3, False)])
def test_too_many_dead_ends_end_an_enumeration(
    most: int, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quartet_plugin.mapping.solve.MAX_DEAD_ENDS", most)
    equal = make_topology(num_nodes=1, per_node=8, seed=0, unequal=False)
    topology = replace(equal, slowdown=np.array([1.0] * 6 + [1.5] * 2))
    found = solve(layout_of((1, 1, 4, 2, 1)), topology, by_places, compute_s=np.ones(1), evaluations=0)
    assert found.exact == is_exact


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(BIG), st.integers(0, 10_000), st.booleans())
def test_a_solution_is_legal_and_never_worse_than_stock(
    case: tuple[tuple[int, ...], tuple[int, int]], seed: int, unequal: bool
) -> None:
    degrees, cluster = case
    costs = make_costs(layout_of(degrees), seed=seed)
    topology = make_topology(num_nodes=cluster[0], per_node=cluster[1], seed=seed, unequal=unequal)
    found = solve_step(costs, topology, evaluations=60, exact_limit=100)
    assert sorted(found.slots) == list(range(len(topology.slots)))
    assert is_legal([topology.slots[slot] for slot in found.slots], layout=costs.layout)
    assert set(found.stock_s) == set(STOCK_ORDERS)
    assert found.step_s <= min(found.stock_s.values()) * (1 + 1e-12)
    assert step_s(costs, topology, found.slots) == pytest.approx(found.step_s, rel=1e-12)


@pytest.mark.parametrize("name", STOCK_ORDERS)
def test_a_stock_orders_time_is_that_of_its_slots(name: str) -> None:
    costs = make_costs(layout_of((2, 3, 2, 2, 1)), seed=5)
    topology = make_topology(num_nodes=3, per_node=8, seed=6)
    blocks = blocks_of(topology, size=2, sort=False)
    order = stock_arrangement(costs.layout, name).ravel().tolist()
    slots = [slot for block in order for slot in blocks.slots[block]]
    assert solve_step(costs, topology, evaluations=5).stock_s[name] == pytest.approx(
        step_s(costs, topology, slots)
    )


def test_the_stock_orders_are_megatrons() -> None:
    layout = layout_of((1, 2, 2, 2, 1))
    assert stock_arrangement(layout, "tp-cp-ep-dp-pp").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # cp fastest, then pp, then dp.
    assert stock_arrangement(layout, "tp-pp-dp").tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_slow_device_plays_the_lighter_stage() -> None:
    costs = replace(
        make_costs(layout_of((1, 2, 1, 1, 1)), seed=0), compute_s=np.array([1.0, 2.0]), num_microbatches=16
    )
    topology = replace(
        make_topology(num_nodes=1, per_node=2, seed=0, unequal=False), slowdown=np.array([1.0, 1.5])
    )
    assert solve_step(costs, topology).slots == (1, 0)


def test_slow_devices_share_a_tensor_parallel_group() -> None:
    costs = make_costs(layout_of((2, 2, 1, 1, 1)), seed=0)
    topology = replace(
        make_topology(num_nodes=1, per_node=4, seed=0, unequal=False),
        slowdown=np.array([1.0, 1.5, 1.0, 1.5]),
    )
    slots = solve_step(costs, topology).slots
    assert {frozenset(slots[:2]), frozenset(slots[2:])} == {frozenset({0, 2}), frozenset({1, 3})}


def test_a_slow_link_carries_the_pipeline_and_not_the_gradients() -> None:
    costs = replace(
        make_costs(layout_of((1, 2, 2, 1, 1)), seed=0),
        boundary_bytes=1e3,
        hidden_s=np.zeros(2),
        exposed_share=1.0,
    )
    topology = make_topology(num_nodes=2, per_node=2, seed=0, unequal=False)
    found = solve_step(costs, topology)
    assert found.slots == (0, 1, 2, 3)
    far = replace(costs, boundary_bytes=1e10, gradients=replace(costs.gradients, volume_bytes=np.zeros(2)))
    assert solve_step(far, topology).slots == (0, 2, 1, 3)


def test_a_group_that_must_stay_inside_does() -> None:
    costs = make_costs(layout_of((1, 2, 4, 1, 2)), seed=3)
    topology = make_topology(num_nodes=4, per_node=2, seed=3)
    slots = solve_step(costs, topology, inside=frozenset({"expert"})).slots
    domains = topology.domain_of_slot[list(slots)].reshape(-1, 2)
    assert (domains[:, 0] == domains[:, 1]).all()


def test_what_cannot_stay_inside_is_refused() -> None:
    topology = make_topology(num_nodes=4, per_node=2, seed=3)
    with pytest.raises(PlanError, match="expert"):
        solve_step(make_costs(layout_of((1, 2, 4, 1, 4)), seed=3), topology, inside=frozenset({"expert"}))
    with pytest.raises(PlanError, match="tensor_parallel: 4"):
        solve_step(make_costs(layout_of((4, 2, 1, 1, 1)), seed=3), topology)
    with pytest.raises(PlanError, match="8 slots for 4 ranks"):
        solve_step(make_costs(layout_of((1, 2, 2, 1, 1)), seed=3), topology)


@pytest.mark.parametrize(
    ("degrees", "num_nodes"),
    [
        ((1, 2, 2, 1, 1), 4),
        ((1, 2, 2, 1, 2), 4),
        ((1, 3, 2, 1, 1), 6),
        ((1, 2, 3, 1, 1), 6),
        ((1, 1, 2, 3, 1), 6),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_of_orders_that_take_equally_long_the_one_with_the_fewest_crossings_is_taken(
    degrees: tuple[int, ...], num_nodes: int, seed: int
) -> None:
    layout = layout_of(degrees)
    costs = make_costs(layout, seed=seed)
    equal = make_topology(num_nodes=num_nodes, per_node=1, seed=seed, unequal=False)
    segments = np.random.default_rng(seed).permutation(np.arange(num_nodes) // (num_nodes // 2))
    topology = replace(equal, segment_of_slot=segments)
    seconds = {
        slots: step_s(costs, equal, slots)
        for slots in itertools.permutations(range(num_nodes))
        if is_legal([equal.slots[slot] for slot in slots], layout=layout)
    }
    limit_s = min(seconds.values()) * (1 + 1e-9)
    fewest = min(
        crossings_in_order(topology, slots, layout=layout) for slots in seconds if seconds[slots] <= limit_s
    )
    found = solve_step(costs, topology)
    assert seconds[found.slots] <= limit_s
    assert crossings_in_order(topology, found.slots, layout=layout) == fewest


def test_many_nodes_that_alternate_between_segments_are_sorted_by_them() -> None:
    layout = layout_of((8, 4, 8, 1, 1))
    equal = make_topology(num_nodes=32, per_node=8, seed=0, unequal=False)
    topology = replace(equal, segment_of_slot=np.arange(256) // 8 % 4)
    found = solve_step(make_costs(layout, seed=0), topology, evaluations=0, exact_limit=0)
    assert crossings_in_order(topology, found.slots, layout=layout) == 0
    assert topology.slots[found.slots[0]].node == 0


def test_crossings_are_counted() -> None:
    pipelines = np.array([[0, 0, 1, 1], [0, 1, 1, 0], [1, 0, 1, 1]])
    assert crossings(layout_of((1, 3, 4, 1, 1)), pipelines) == 1 + 2 + 0 + 2
    assert crossings(layout_of((1, 3, 4, 1, 2)), pipelines) == 5 + 0 + 2 + 1
    assert crossings(layout_of((1, 3, 2, 2, 1)), pipelines) == 5 + 0 + 2 + 1
    assert crossings(layout_of((1, 3, 1, 4, 1)), pipelines) == 5 + 3


def test_the_same_arguments_give_the_same_mapping() -> None:
    costs = make_costs(layout_of((2, 4, 4, 1, 1)), seed=8)
    topology = make_topology(num_nodes=4, per_node=8, seed=8)
    first = solve_step(costs, topology, evaluations=100, exact_limit=10)
    assert first == solve_step(costs, topology, evaluations=100, exact_limit=10)
    assert not first.exact
    assert sorted(first.slots) == list(range(len(topology.slots)))


def test_a_groups_link() -> None:
    topology = replace(
        make_topology(num_nodes=3, per_node=4, seed=0, unequal=False),
        between_bytes_per_s=np.array([[0, 2e9, 3e9], [4e9, 0, 5e9], [6e9, 7e9, 0]]),
    )
    assert group_link(topology, [1, 1]).bytes_per_s == 2e10
    one = group_link(topology, [2, 0, 1])
    assert (one.num_domains, one.local, one.bytes_per_s) == (3, 1, 2e9)
    several = group_link(topology, [0, 0, 2, 2])
    assert (several.local, several.bytes_per_s) == (2, 6e9)
    assert several.ring_latency_s == pytest.approx(1e-5 + 2 * 1e-6)


@pytest.mark.parametrize("degrees", [(2, 1, 8, 1, 8), (2, 2, 4, 1, 8), (4, 2, 2, 1, 2)])
def test_groups_of_whole_experts_are_consecutive_ranks(degrees: tuple[int, ...]) -> None:
    """The groups of eight devices fit in a node, though eight tensor-parallel groups do not."""
    costs = replace(make_costs(layout_of(degrees), seed=3), has_whole_experts=True)
    topology = make_topology(num_nodes=2, per_node=8, seed=3)
    slots = solve_step(costs, topology, inside=frozenset({"expert"})).slots
    domains = topology.domain_of_slot[list(slots)].reshape(-1, degrees[-1])
    assert (domains == domains[:, :1]).all()
