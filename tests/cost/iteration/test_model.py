"""The iteration model: its seconds are those of `predict`, its slopes are derivatives."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.calibration.machine_prior import machine_model_of
from quartet_plugin.cost.cluster import uniform_topology_of
from quartet_plugin.cost.coefficients import COEFFICIENTS, INDEX, Coefficient, MachineModel
from quartet_plugin.cost.communication import context_parallel, transfer_latency_s
from quartet_plugin.cost.compute import Rates, head_times, layer_times
from quartet_plugin.cost.constants import ClusterConstants
from quartet_plugin.cost.iteration.assigned import AssignedRun
from quartet_plugin.cost.iteration.cache import IterationModelCache
from quartet_plugin.cost.iteration.plan_terms import run_of_plan
from quartet_plugin.cost.iteration.step import transfers_s
from quartet_plugin.cost.iteration.terms import stage_parts, stage_sums
from quartet_plugin.cost.memory import stage_activations, weights_of_stages
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import ScheduleKind, TrainingRun
from quartet_plugin.mapping.orders import order_named
from quartet_plugin.model.costs import StageCosts
from quartet_plugin.model.job_description import Experts
from quartet_plugin.model.layout import Setting
from quartet_plugin.model.plan import Plan, ScheduleChoice, Split
from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.planner.split_search import Pipeline
from quartet_plugin.schedule.choice import choice_of
from quartet_plugin.schedule.named import Offer, named
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


EXPERTS = Experts(
    num_experts=8, experts_per_token=2, ffn_hidden_size=512, shared_ffn_hidden_size=256, num_dense_layers=1
)


@st.composite
def machine_plans(draw: st.DrawFn) -> tuple[MachineModel, Plan]:
    """A plan of any layout, split and schedule on equal devices of one node, with or without experts."""
    pp, tp, cp, dp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 3), (1, 2), (1, 2), (1, 2)))
    experts = EXPERTS if draw(st.booleans()) else None
    kind = draw(st.sampled_from([kind for kind in ScheduleKind if kind.spec is not None]))
    assert kind.spec is not None
    chunks = kind.spec.default_num_chunks if pp > 1 else 1
    layout = make_layout(
        pipeline_parallel=pp,
        tensor_parallel=tp,
        context_parallel=cp,
        data_parallel=dp,
        virtual_stages=chunks,
        micro_batch_size=1,
        expert_parallel=dp * cp if experts else 1,
    )
    node_class = draw(st.sampled_from(["cpu", "NVIDIA H100 80GB HBM3"]))
    count = pp * tp * cp * dp
    nodes = tuple(replace(node, node_class=f"{node_class} x{count}") for node in make_nodes(count))
    job = make_job(layout=layout)
    plan = baseline_plan(job, nodes=nodes, run="r", seed=0)
    stages = layout.num_stages
    split = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    plan = replace(
        plan,
        shape=replace(plan.shape, num_layers=sum(split)),
        split=Split(transformer_layers_per_stage=tuple(split)),
        made_for=replace(plan.made_for, global_batch_size=dp * draw(st.sampled_from([6, 12, 60]))),
    )
    if kind.spec.offer is Offer.STOCK or pp == 1:
        group = pp if pp > 1 and kind is ScheduleKind.INTERLEAVED else None
        plan = replace(plan, schedule=replace(plan.schedule, group=group))
    else:
        schedule = named(
            kind.value, num_devices=pp, num_microbatches=plan.num_microbatches, num_chunks=chunks
        )
        one = np.ones(stages)
        costs = StageCosts(
            device_of_stage=np.array(schedule.placement),
            held_fraction=1.0,
            **{f"{name}_s": one for name in ("forward", "input_grad", "weight_grad", "backward")},
            activation_bytes=one,
            forward_transfer_s=0 * one,
            backward_transfer_s=0 * one,
        )
        plan = replace(plan, schedule=ScheduleChoice(name="custom", custom=choice_of(schedule, costs)))
    model = machine_model_of(nodes, precision="fp32" if node_class == "cpu" else "bf16", experts=experts)
    constants = replace(
        ClusterConstants.of(model.constants), contention=draw(st.sampled_from([0.0, 0.3])), residual=1.05
    )
    return replace(model, constants=constants), plan


@settings(max_examples=60, deadline=None)
@given(machine_plans())
def test_one_plan_has_the_same_seconds_and_terms_from_every_side(case: tuple[MachineModel, Plan]) -> None:
    """A run's prediction, the iteration model at coefficients of 1, and the run on given slots."""
    machine_model, plan = case
    run = run_of_plan(plan, machine_model)
    expected = predict(run, machine_model.constants)
    iteration_model = IterationModelCache(machine_model).of(plan)
    ones = np.zeros(machine_model.num_coefficients)
    assert iteration_model.evaluate(ones)[0] == pytest.approx(expected.iter_time_s, rel=1e-9)
    topology = uniform_topology_of(run.cluster, machine_model.constants)
    assigned = AssignedRun(run, machine_model.constants, topology)
    for prediction in (
        iteration_model.predict(ones),
        assigned.predict(tuple(range(plan.layout.world_size))),
    ):
        least = 1e-9 * expected.iter_time_s
        assert prediction.terms == pytest.approx(dict(expected.terms), rel=1e-9, abs=least)
        assert prediction.compute_terms == pytest.approx(dict(expected.compute_terms), rel=1e-9, abs=least)
        assert prediction.bubble_fraction == pytest.approx(expected.bubble_fraction, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(machine_plans(), st.integers(0, 2**32 - 1))
def test_the_terms_sum_to_the_seconds_under_any_coefficients(
    case: tuple[MachineModel, Plan], seed: int
) -> None:
    machine_model, plan = case
    log_coefficients = np.random.default_rng(seed).normal(scale=0.5, size=machine_model.num_coefficients)
    iteration_model = IterationModelCache(machine_model).of(plan)
    prediction = iteration_model.predict(log_coefficients)
    assert sum(prediction.terms.values()) == pytest.approx(prediction.iter_time_s)
    assert iteration_model.evaluate(log_coefficients)[0] == pytest.approx(prediction.iter_time_s, rel=1e-9)
    points = np.array([log_coefficients, np.zeros(len(log_coefficients))])
    one_by_one = [iteration_model.evaluate(point)[0] for point in points]
    # Sums of terms may be rounded in another order.
    assert iteration_model.seconds(points) == pytest.approx(one_by_one, rel=1e-13)


def test_experts_cost_more_than_a_dense_layer_and_their_collectives_have_a_slope() -> None:
    plan = plan_of((4,), pipeline_parallel=1, data_parallel=4, expert_parallel=4)
    dense = iteration_models_of(plan).machine_model
    zeros = np.zeros(dense.num_coefficients)
    seconds, slopes = IterationModelCache(replace(dense, experts=EXPERTS)).of(plan).evaluate(zeros)
    assert slopes[INDEX[Coefficient.EXPERTS]] > 0
    assert seconds != pytest.approx(IterationModelCache(dense).of(plan).evaluate(zeros)[0])


def test_layers_of_multi_token_prediction_weigh_on_the_last_stage() -> None:
    plan = plan_of((2, 2), pipeline_parallel=2, data_parallel=2)
    with_mtp = replace(plan, made_for=replace(plan.made_for, mtp_layers=1))
    machine_model = iteration_models_of(plan).machine_model
    runs = [run_of_plan(each, machine_model) for each in (plan, with_mtp)]
    plain, more = (stage_sums(stage_parts(run, machine_model.constants)) for run in runs)
    assert more[0] == plain[0]
    # A layer, the head once more, and the product that joins two hidden states.
    assert more[1].forward_s > 1.5 * plain[1].forward_s
    weights = [weights_of_stages(run) for run in runs]
    assert weights[1][0] == weights[0][0]
    assert weights[1][1].num_total > weights[0][1].num_total


def test_multi_token_prediction_before_the_last_stage_weighs_there_and_its_head_on_the_last() -> None:
    plan, counts = plan_of((4,), pipeline_parallel=4), (4, 4, 0, 0)
    untied = replace(plan.shape, tied_embeddings=False)
    plan = replace(
        plan,
        shape=untied,
        made_for=replace(plan.made_for, shape=untied, mtp_layers=2),
        split=Split(transformer_layers_per_stage=counts, mtp_before_last=True),
    )
    iteration_models = iteration_models_of(plan)
    machine_model = iteration_models.machine_model
    run, constants = run_of_plan(plan, machine_model), machine_model.constants
    on_last = replace(run, is_mtp_before_last=False)
    # What leaves the last stage is on the one before it; the two further heads stay.
    here, there = (stage_sums(stage_parts(each, constants)) for each in (run, on_last))
    assert here[:2] == there[:2]
    moved = [a.total_s - b.total_s for a, b in zip(here[2:], there[2:], strict=True)]
    assert moved[0] > 0.0 > moved[1]
    assert sum(moved) == pytest.approx(0.0, abs=1e-12)
    head = head_times(run, constants, Rates(run, constants))
    assert here[3].forward_s > 3 * head.gemm.forward_s
    weights = [[held.num_total for held in weights_of_stages(each)] for each in (run, on_last)]
    assert weights[0][:2] == weights[1][:2]
    assert sum(weights[0]) == pytest.approx(sum(weights[1]))
    assert weights[0][3] == pytest.approx(untied.vocab_size * untied.hidden_size)
    # Three states of each token go to the last stage, one to the others.
    forward_s, backward_s = transfers_s(run, constants)
    latency_s = transfer_latency_s(constants)
    assert forward_s[2] - latency_s == pytest.approx(3 * (forward_s[1] - latency_s))
    assert backward_s[3] == forward_s[2]
    # The model of coefficients and the split model predict the same.
    zeros = np.zeros(machine_model.num_coefficients)
    model = iteration_models.of(plan)
    assert model.evaluate(zeros)[0] == pytest.approx(predict(run, constants).iter_time_s)
    assert model.predict(zeros).iter_time_s == pytest.approx(model.evaluate(zeros)[0])
    splits = iteration_models.split_model(plan)
    times = splits.times(zeros, range(4), plan.mapping)
    assert Pipeline(times).seconds(counts) == pytest.approx(model.evaluate(zeros)[0])


def test_the_models_norms_are_those_of_the_command() -> None:
    plan = plan_of((2, 2), pipeline_parallel=2, data_parallel=2)
    known = machine_model_of(plan.made_for.nodes, precision="fp32", normalization="RMSNorm")
    assert run_of_plan(plan, known).has_rms_norms
    assert not run_of_plan(plan, iteration_models_of(plan).machine_model).has_rms_norms


def test_what_block_recompute_repeats_is_of_each_split_whichever_comes_first() -> None:
    """Two layers a stage are all of 2+2+2+2, and three quarters of 1+3+3+1."""
    block = (
        Setting(name="recompute_method", value="block"),
        Setting(name="recompute_num_layers", value=2),
    )
    plans = [plan_of((4,), pipeline_parallel=4, split=split) for split in ((2, 2, 2, 2), (1, 3, 3, 1))]
    plans = [replace(plan, layout=replace(plan.layout, recompute="full", settings=block)) for plan in plans]
    machine_model = iteration_models_of(plans[0]).machine_model
    assert [run_of_plan(plan, machine_model).recomputed_share for plan in plans] == [1.0, 0.75]

    def seconds(plans: list[Plan], iteration_models: IterationModelCache) -> list[float]:
        ones = np.zeros(machine_model.num_coefficients)
        return [iteration_models.of(plan).evaluate(ones)[0] for plan in plans]

    alone = [seconds([plan], IterationModelCache(machine_model))[0] for plan in plans]
    assert seconds(plans, IterationModelCache(machine_model)) == alone
    assert seconds(plans[::-1], IterationModelCache(machine_model)) == alone[::-1]


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


def test_neighbours_that_exchange_heads_stay_in_their_node() -> None:
    """On two nodes of two devices heads change places inside each node, keys and values between nodes."""
    nodes = tuple(replace(node, node_class="NVIDIA H100 80GB HBM3 x2") for node in make_nodes(2, 2))
    sizes = Setting(name="hierarchical_context_parallel_sizes", value="2+2")
    plan = plan_of((2, 2), pipeline_parallel=1, context_parallel=4)

    def layer_s(comm: str) -> tuple[float, float, float]:
        """Seconds of a layer's microbatch as a plan has them, by the nodes' links, and by slow ones alone."""
        settings = (Setting(name="cp_comm_type", value=comm), sizes)
        model = machine_model_of(nodes, precision="bf16", settings=settings)
        run, constants = run_of_plan(plan, model), model.constants
        attention = layer_times(run, constants, Rates(run, constants), experts=None).attention
        of_nodes, slow = (
            context_parallel(replace(run, cluster=cluster), constants, attention).total_s
            for cluster in (replace(model.inter_node, scale_up_devices=2), model.inter_node)
        )
        terms = IterationModelCache(model).of(plan).predict(np.zeros(model.num_coefficients)).terms
        return terms["cp_comm_s"] / run.num_microbatches / run.shape.num_layers, of_nodes, slow

    planned, of_nodes, slow = layer_s("a2a+p2p")
    assert planned == pytest.approx(of_nodes)
    assert planned < 0.9 * slow
    for comm in ("p2p", "a2a"):
        planned, _, slow = layer_s(comm)
        assert planned == pytest.approx(slow)


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


def test_a_depth_of_a_hybrid_models_prediction_has_all_layers_of_its_pattern() -> None:
    """Of `*-*-*-*-/*-*-` a depth takes twice what one of `*-` takes, which is as much as two layers."""
    kinds = LayerKinds(attention=4, mlp=4, experts=0, state_space=0, pattern="*-*-*-*-")
    shape = replace(plan_of().shape, layer_kinds=kinds)
    plan = plan_of((2, 2), pipeline_parallel=2, data_parallel=2)
    plan = replace(plan, shape=shape, made_for=replace(plan.made_for, mtp_layers=1))
    machine_model = iteration_models_of(plan).machine_model
    depth = LayerKinds(attention=1, mlp=1, experts=0, state_space=0)
    twice = LayerKinds(attention=2, mlp=2, experts=0, state_space=0)
    pair, pairs = (run_of_plan(plan, replace(machine_model, mtp_kinds=each)) for each in (depth, twice))
    without = replace(pair, mtp_layers=0)
    longer = replace(without, pattern="*-*-*-*-*-", layers_per_stage=(4, 6))

    def last(run: TrainingRun) -> tuple[float, float, float]:
        """Seconds, weights and bytes of activations of the last stage."""
        seconds = stage_sums(stage_parts(run, machine_model.constants))[-1].total_s
        return seconds, weights_of_stages(run)[-1].num_total, float(stage_activations(run)[0][-1])

    more = [with_pairs - with_pair for with_pairs, with_pair in zip(last(pairs), last(pair), strict=True)]
    layer = [after - before for after, before in zip(last(longer), last(without), strict=True)]
    assert more == pytest.approx(layer)
    assert weights_of_stages(pairs)[0] == weights_of_stages(pair)[0]


def test_layers_of_multi_token_prediction_exchange_tokens_between_nodes_too() -> None:
    plan = plan_of((2, 2), pipeline_parallel=1, data_parallel=4, expert_parallel=4)
    plan = replace(plan, made_for=replace(plan.made_for, mtp_layers=1))
    machine_model = machine_model_of(plan.made_for.nodes, precision="fp32", experts=EXPERTS)
    run = run_of_plan(plan, machine_model)
    apart = replace(run, cluster=machine_model.inter_node)
    expected = predict(apart, machine_model.constants).terms["ep_comm_s"]
    predicted = IterationModelCache(machine_model).of(plan).predict(np.zeros(machine_model.num_coefficients))
    assert predicted.terms["ep_comm_s"] == pytest.approx(expected)
