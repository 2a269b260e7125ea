"""Processes that share processor cores: how long work takes depends on how busy the others are."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.calibration.machine_prior import machine_model_of
from quartet_plugin.cost.coefficients import COEFFICIENTS, INDEX, Coefficient
from quartet_plugin.cost.core_sharing import CoreSharing, core_sharing_of
from quartet_plugin.cost.iteration.cache import IterationModelCache
from quartet_plugin.mapping.orders import order_named
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.plan import CoreGroup, NodeInfo, Plan, Split
from quartet_plugin.protocol.rank_files import CoreLimit, num_cores_of
from quartet_plugin.space.plan_space import baseline_plan
from quartet_plugin.tuner.trial_backend import nodes_of
from tests.space.jobs import make_job, make_layout, make_nodes
from tests.trial.factory import report


def plan_on(*groups: CoreGroup, split: tuple[int, ...] = (3, 3, 3, 3), mapping: str = "stock") -> Plan:
    nodes = (replace(make_nodes(4)[0], crowds=groups or None),)
    layout = make_layout(pipeline_parallel=4, micro_batch_size=2)
    shape = replace(make_job().shape, num_layers=sum(split))
    plan = baseline_plan(make_job(layout=layout, shape=shape), nodes=nodes, run="r", seed=0)
    order = order_named(mapping, layout=layout, nodes=nodes)
    return replace(plan, split=Split(transformer_layers_per_stage=split), mapping=order.mapping)


def seconds(plan: Plan) -> float:
    machine_model = machine_model_of(plan.made_for.nodes, precision="fp32")
    return IterationModelCache(machine_model).of(plan).evaluate(np.zeros(machine_model.num_coefficients))[0]


THREE = CoreGroup(locals=(1, 2, 3), num_cores=1)


def test_without_shared_cores_nobody_waits_for_a_core() -> None:
    plan = plan_on()
    assert core_sharing_of(plan, plan.made_for.nodes) is None


def test_who_is_beside_whom_goes_with_the_mapping() -> None:
    plan = plan_on(THREE)
    sharing = core_sharing_of(plan, plan.made_for.nodes)
    assert sharing is not None
    assert sharing.greatest_slowdown.tolist() == [1.0, 3.0, 3.0, 3.0]
    moved = plan_on(THREE, mapping="3,0,1,2")
    sharing = core_sharing_of(moved, moved.made_for.nodes)
    assert sharing is not None
    assert sharing.greatest_slowdown.tolist() == [3.0, 1.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("busy", "expected"),
    [([1, 0, 0, 0], [1, 1, 1, 1]), ([1, 1, 1, 1], [1, 3, 3, 3]), ([0, 0.5, 0, 1], [1, 2, 2.5, 1.5])],
)
def test_the_busier_the_others_the_longer_it_takes(busy: list[float], expected: list[float]) -> None:
    plan = plan_on(THREE)
    sharing = core_sharing_of(plan, plan.made_for.nodes)
    assert sharing is not None
    assert sharing.slowdown(np.array(busy, dtype=float)).tolist() == expected


def test_several_cores_are_shared_by_more_processes() -> None:
    plan = plan_on(CoreGroup(locals=(0, 1, 2, 3), num_cores=2))
    sharing = core_sharing_of(plan, plan.made_for.nodes)
    assert sharing is not None
    assert sharing.greatest_slowdown.tolist() == [2.0] * 4
    assert sharing.slowdown(np.array([1.0, 1.0, 0.0, 0.0])).tolist() == [1.0, 1.0, 1.5, 1.5]


def test_replicas_of_one_stage_work_at_the_same_time() -> None:
    nodes = (replace(make_nodes(4)[0], crowds=(CoreGroup(locals=(0, 1), num_cores=1),)),)
    layout = make_layout(pipeline_parallel=2, data_parallel=2)
    plan = baseline_plan(make_job(layout=layout), nodes=nodes, run="r", seed=0)
    sharing = core_sharing_of(plan, nodes)
    assert sharing is not None
    assert sharing.slowdown(np.zeros(2)).tolist() == [2.0, 1.0]


def test_work_that_moves_off_a_shared_core_makes_everybody_faster() -> None:
    even, moved = plan_on(THREE, split=(3, 3, 3, 3)), plan_on(THREE, split=(8, 2, 1, 1))
    assert seconds(moved) < 0.85 * seconds(even)
    assert seconds(plan_on(THREE, split=(0, 4, 4, 4))) > seconds(even)
    # It is not that the ends weigh more: with a core for each the same move gains little.
    gain_alone = seconds(plan_on(split=(3, 3, 3, 3))) / seconds(plan_on(split=(8, 2, 1, 1)))
    assert seconds(even) / seconds(moved) > 1.1 * gain_alone


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=4, max_size=4), st.sampled_from([1, 2]))
def test_no_core_does_more_than_its_time(split: list[int], num_cores: int) -> None:
    group = CoreGroup(locals=(1, 2, 3), num_cores=num_cores)
    plan, alone = plan_on(group, split=tuple(split)), plan_on(split=tuple(split))
    machine_model = machine_model_of(plan.made_for.nodes, precision="fp32")
    iteration_model = IterationModelCache(machine_model).of(plan)
    work = iteration_model._work(np.exp(np.zeros(machine_model.num_coefficients)))
    assert seconds(plan) >= 0.93 * max(work[0], work[1:].sum() / num_cores)
    assert seconds(alone) - 1e-9 <= seconds(plan) <= 3.0 * seconds(alone)


def test_a_slowdown_that_never_agrees_ends() -> None:
    sharing = CoreSharing(sharers=np.array([[0.0, 1.0], [1.0, 0.0]]), cores=np.ones(2))
    assert sharing.consistent_slowdown(np.ones(2), span_s=lambda _: 0.0).tolist() == [2.0, 2.0]
    calls = []

    def span_s(slowdown: FloatArray) -> float:
        calls.append(slowdown)
        return float(1 + len(calls) % 2)

    sharing.consistent_slowdown(np.ones(2), span_s=span_s)
    assert len(calls) <= 12


def test_the_slopes_hold_the_core_slowdown_constant() -> None:
    plan = plan_on(THREE, split=(6, 3, 2, 1))
    machine_model = machine_model_of(plan.made_for.nodes, precision="fp32")
    value, slopes = (
        IterationModelCache(machine_model).of(plan).evaluate(np.zeros(machine_model.num_coefficients))
    )
    assert slopes[len(COEFFICIENTS) :].sum() < value
    assert (slopes >= 0).all()


def test_what_our_runtime_gains_is_less_sure_where_cores_are_shared() -> None:
    runtime = INDEX[Coefficient.RUNTIME]
    shared, alone = (
        machine_model_of(plan.made_for.nodes, precision="fp32").spreads
        for plan in (plan_on(THREE), plan_on())
    )
    assert shared[runtime] > 3.0 * alone[runtime]
    assert (np.delete(shared, runtime) == np.delete(alone, runtime)).all()


def test_an_action_on_a_shared_core_says_little() -> None:
    plan = plan_on(THREE)
    iteration_model = IterationModelCache(machine_model_of(plan.made_for.nodes, precision="fp32")).of(plan)
    assert [iteration_model.shares_cores(stage) for stage in range(4)] == [False, True, True, True]


def test_core_groups_are_read_from_the_cores_that_ranks_may_use() -> None:
    cores = [(0,), (1,), (1,), (0, 1)]
    (node,) = nodes_of(report(rank, cores=cores[rank], host="a") for rank in range(4))
    assert node.crowds == (CoreGroup(locals=(1, 2), num_cores=1),)
    (free,) = nodes_of(report(rank, cores=(0, 1, 2, 3), host="a") for rank in range(4))
    assert free.crowds is None
    (silent,) = nodes_of(report(rank, host="a") for rank in range(4))
    assert silent == NodeInfo(host="a", node_class="cpu x4", num_slots=4)


@pytest.mark.parametrize(
    ("groups", "crowds"),
    [
        ({"/a": 0.5, "/b": 0.25, "/c": 0.25}, None),
        ({"/a": 0.5, "/b": 0.5, "/c": 0.5}, (CoreGroup(locals=(0, 1, 2), num_cores=1),)),
        ({"/a": 1.0}, (CoreGroup(locals=(0, 1, 2), num_cores=1),)),
    ],
    ids=["a share each", "shares above the core", "a container for all"],
)
def test_ranks_with_limits_that_fit_on_the_cores_do_not_share_them(
    groups: dict[str, float], crowds: tuple[CoreGroup, ...] | None
) -> None:
    limits = [CoreLimit(group=group, num_cores=num_cores) for group, num_cores in groups.items()]
    reports = [report(rank, cores=(0,), host="a") for rank in range(3)]
    limited = [replace(each, core_limit=limits[index % len(limits)]) for index, each in enumerate(reports)]
    (node,) = nodes_of(limited)
    assert node.crowds == crowds


def test_a_container_with_less_time_than_its_cores_is_a_crowd() -> None:
    limit = CoreLimit(group="/pod", num_cores=2.5)
    reports = [report(rank, cores=tuple(range(16)), host="a") for rank in range(4)]
    (node,) = nodes_of(replace(each, core_limit=limit) for each in reports)
    assert node.crowds == (CoreGroup(locals=(0, 1, 2, 3), num_cores=2),)
    (free,) = nodes_of([replace(reports[0], core_limit=limit), *reports[1:]])
    assert free.crowds is None
    bound = [report(rank, cores=(rank,), host="a") for rank in range(4)]
    (node,) = nodes_of(replace(each, core_limit=limit) for each in bound)
    assert node.crowds == (CoreGroup(locals=(0, 1, 2, 3), num_cores=2),)
    (node,) = nodes_of(replace(report(rank, cores=(0,), host="a"), core_limit=limit) for rank in range(2))
    assert node.crowds == (CoreGroup(locals=(0, 1), num_cores=1),)


def test_a_part_of_a_core_counts_as_the_nearest_number() -> None:
    reports = [report(rank, cores=(0, 1, 2, 3), host="a") for rank in range(2)]
    limits = {limit: CoreLimit(group="/pod", num_cores=limit) for limit in (0.2, 1.2, 1.9, 9.0)}
    limited = {limit: [replace(each, core_limit=made) for each in reports] for limit, made in limits.items()}
    assert {limit: num_cores_of(ranks) for limit, ranks in limited.items()} == {
        0.2: 1,
        1.2: 1,
        1.9: 2,
        9.0: 4,
    }
    assert num_cores_of(reports) == 4
    assert num_cores_of(report(rank, host="a") for rank in range(2)) == 0
    assert [nodes_of(limited[limit])[0].crowds for limit in (1.9, 9.0)] == [None, None]
