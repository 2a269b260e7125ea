"""The iteration model: its seconds are those of `predict`, its slopes are derivatives."""

import random
from dataclasses import replace

import numpy as np
import pytest

from quartet_plugin.calibration.machine_prior import machine_model_of
from quartet_plugin.cost.coefficients import COEFFICIENTS, INDEX, Coefficient
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.iteration import IterationModelCache
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import ON_CPU, run_of
from quartet_plugin.mapping.orders import order_named
from quartet_plugin.model.plan import Plan, ScheduleChoice, Split
from quartet_plugin.space.param_sources import RandomParams
from quartet_plugin.space.plan_space import Space, baseline_plan, build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes

NOTHING = -60.0


def plan_of(
    nodes: tuple[int, ...] = (2,), *, split: tuple[int, ...] = (), mapping: str = "", **degrees: int
) -> Plan:
    layout = make_layout(**degrees)
    plan = baseline_plan(make_job(layout=layout), nodes=make_nodes(*nodes), run="r", seed=0)
    if split:
        plan = replace(plan, split=Split(transformer_layers_per_stage=split))
    if mapping:
        order = order_named(mapping, layout=layout, nodes=make_nodes(*nodes))
        plan = replace(plan, mapping=order.mapping)
    return plan


def iteration_models_of(plan: Plan) -> IterationModelCache:
    return IterationModelCache(machine_model_of(plan.made_for.nodes, precision="fp32"))


PLANS = {
    "pp2": plan_of(split=(5, 3)),
    "pp1": plan_of((1,), pipeline_parallel=1),
    "dp2": plan_of(pipeline_parallel=1, data_parallel=2),
    "tp2": plan_of(pipeline_parallel=1, tensor_parallel=2),
    "interleaved": plan_of((4,), pipeline_parallel=4, virtual_stages=2),
}


@pytest.mark.parametrize("name", PLANS)
def test_uncorrected_it_is_the_prediction_of_the_cost_model(name: str) -> None:
    plan = PLANS[name]
    iteration_models = iteration_models_of(plan)
    log_coefficients = np.zeros(iteration_models.machine_model.num_coefficients)
    log_coefficients[INDEX[Coefficient.ACTION]] = NOTHING  # the shared constants have no such term
    run = run_of(
        plan.shape,
        plan.layout,
        global_batch_size=plan.made_for.global_batch_size,
        layers_per_stage=plan.split.transformer_layers_per_stage,
        machines=iteration_models.machine_model.intra_node,
        precision="fp32",
        software=ON_CPU,
    )
    expected = predict(run, fitted()).iter_time_s
    assert iteration_models.of(plan).evaluate(log_coefficients)[0] == pytest.approx(expected, rel=2e-3)


def sampled(nodes: tuple[int, ...], *, num: int) -> list[Plan]:
    layout = make_layout(pipeline_parallel=sum(nodes))
    config = parse_config(
        {"search": {"schedule": ["1f1b", "interleaved", "no-pipelining", "zb-h1"]}}, where="t"
    )
    space: Space = build_space(
        make_job(layout=layout), nodes=make_nodes(*nodes), search=config.search, run="r", seed=0
    )
    generator = random.Random(1)
    return [space.decode(RandomParams(generator), trial=0) for _ in range(num)]


@pytest.mark.parametrize("nodes", [(2,), (2, 2)])
def test_slopes_are_the_derivatives_by_every_coefficient(nodes: tuple[int, ...]) -> None:
    generator = np.random.default_rng(0)
    for plan in sampled(nodes, num=12):
        iteration_models = iteration_models_of(plan)
        log_coefficients = generator.normal(scale=0.3, size=iteration_models.machine_model.num_coefficients)
        iteration_model = iteration_models.of(plan)
        seconds, slopes = iteration_model.evaluate(log_coefficients)
        for index in range(len(log_coefficients)):
            step = 1e-7
            moved = log_coefficients.copy()
            moved[index] += step
            slope = (iteration_model.evaluate(moved)[0] - seconds) / step
            assert slope == pytest.approx(slopes[index], abs=2e-5 * seconds), index


def test_a_stages_actions_have_slopes_too() -> None:
    plan = PLANS["pp2"]
    iteration_model = iteration_models_of(plan).of(plan)
    log_coefficients = np.random.default_rng(0).normal(scale=0.3, size=len(COEFFICIENTS) + 2)
    for stage in (0, 1):
        for directions in ((0,), (1,), (1, 2)):
            seconds, slopes = iteration_model.evaluate_action(
                log_coefficients, stage=stage, directions=directions
            )
            for index in range(len(log_coefficients)):
                moved = log_coefficients.copy()
                moved[index] += 1e-6
                moved_s, _ = iteration_model.evaluate_action(moved, stage=stage, directions=directions)
                assert (moved_s - seconds) / 1e-6 == pytest.approx(slopes[index], abs=1e-4 * seconds)


def test_a_slow_slot_costs_less_where_fewer_layers_are() -> None:
    light_first, light_last = plan_of(split=(2, 6)), plan_of(split=(6, 2))
    iteration_models = iteration_models_of(light_first)
    log_coefficients = np.zeros(iteration_models.machine_model.num_coefficients)
    log_coefficients[len(COEFFICIENTS)] = np.log(4.0)
    log_coefficients[INDEX[Coefficient.HEAD]] = NOTHING
    slow_first = iteration_models.of(light_first).evaluate(log_coefficients)[0]
    assert slow_first < iteration_models.of(light_last).evaluate(log_coefficients)[0]
    moved = plan_of(split=(6, 2), mapping="1,0")
    assert (
        iteration_models.of(moved).evaluate(log_coefficients)[0]
        < iteration_models.of(light_last).evaluate(log_coefficients)[0]
    )


def test_transfers_between_nodes_are_corrected_apart() -> None:
    apart, together = plan_of((1, 1)), plan_of((2,))
    for plan, coefficient in ((apart, Coefficient.NETWORK), (together, Coefficient.TRANSFER)):
        _, slopes = iteration_models_of(plan).of(plan).evaluate(np.zeros(len(COEFFICIENTS) + 2))
        other = Coefficient.TRANSFER if coefficient is Coefficient.NETWORK else Coefficient.NETWORK
        assert slopes[INDEX[coefficient]] > 0
        assert slopes[INDEX[other]] == 0


def test_many_slots_share_the_slowdown_of_their_node_or_have_none() -> None:
    assert machine_model_of(make_nodes(8, 8, 8), precision="bf16").num_coefficients == len(COEFFICIENTS) + 3
    assert machine_model_of(make_nodes(64), precision="bf16").num_coefficients == len(COEFFICIENTS)
    assert machine_model_of(make_nodes(2), precision="bf16").num_coefficients == len(COEFFICIENTS) + 2


def test_a_device_of_the_library_is_known_better_than_a_processor() -> None:
    nodes = tuple(replace(node, node_class="NVIDIA H100 80GB HBM3 x2") for node in make_nodes(2))
    known, unknown = (
        machine_model_of(nodes, precision="bf16"),
        machine_model_of(make_nodes(2), precision="fp32"),
    )
    assert known.intra_node.device.name.startswith("H100")
    assert not known.on_cpu
    assert unknown.on_cpu
    assert (known.spreads < unknown.spreads).all()


def test_custom_schedules_run_in_their_order() -> None:
    """A split backward fills waiting: with equal stages it is faster than 1F1B."""
    custom = next(
        plan
        for plan in sampled((2,), num=120)
        if plan.schedule.label == "zb-h1" and min(plan.split.transformer_layers_per_stage) > 2
    )
    stock = replace(custom, schedule=ScheduleChoice(name="1f1b"))
    iteration_models = iteration_models_of(custom)
    log_coefficients = np.zeros(iteration_models.machine_model.num_coefficients)
    for coefficient in (
        Coefficient.HEAD,
        Coefficient.EMBEDDING,
        Coefficient.TRANSFER,
        Coefficient.LATENCY,
        Coefficient.ACTION,
    ):
        log_coefficients[INDEX[coefficient]] = NOTHING
    assert (
        iteration_models.of(custom).evaluate(log_coefficients)[0]
        < iteration_models.of(stock).evaluate(log_coefficients)[0]
    )
