"""A trial's plan with all of the training's replicas and stages: what stays, and where its ranks are."""

import random
from dataclasses import replace

import pytest

from quartet_plugin.errors import PlanError
from quartet_plugin.mapping.order_rules import OrderRules
from quartet_plugin.mapping.orders import coordinates, is_legal, slots_of
from quartet_plugin.model.plan import Mapping, Plan
from quartet_plugin.space.axes import Axis
from quartet_plugin.space.features import FEWER_STAGES
from quartet_plugin.space.full_size import at_full_size, full_nodes, with_all_replicas
from quartet_plugin.space.param_sources import RandomParams
from quartet_plugin.space.plan_space import build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape

FACTOR = 4
STOCK = {"schedule": ["no-pipelining", "1f1b", "interleaved"]}


def random_plans(
    count: int,
    *,
    seed: int = 0,
    stage_divisor: int | None = None,
    search: dict[str, list[str]] = STOCK,
    seq_length: int = 256,
) -> list[Plan]:
    """Plans for two nodes of two slots, every axis as it comes."""
    job = make_job(
        layout=make_layout(pipeline_parallel=2, data_parallel=2), shape=make_shape(seq_length=seq_length)
    )
    if stage_divisor is not None:
        job = replace(job, features=(FEWER_STAGES,), stage_divisor=stage_divisor)
    config = parse_config({"search": search}, where="test").search
    space = build_space(job, nodes=make_nodes(2, 2), search=config, run="r", seed=0)
    assert (Axis.MAPPING in space.locked) == (stage_divisor is not None)
    generator = random.Random(seed)
    return [space.decode(RandomParams(generator), trial=0) for _ in range(count)]


def test_a_replica_stays_and_there_are_more_of_them() -> None:
    for plan in random_plans(40):
        full = with_all_replicas(plan, factor=FACTOR, nodes=full_nodes(plan.made_for.nodes, factor=FACTOR))
        assert full.num_microbatches == plan.num_microbatches
        assert (full.split, full.schedule, full.shape) == (plan.split, plan.schedule, plan.shape)
        assert full.layout.data_parallel == FACTOR * plan.layout.data_parallel
        assert full.made_for.global_batch_size == FACTOR * plan.made_for.global_batch_size
        assert full.made_for.baseline.layout.world_size == full.made_for.world_size
        assert is_legal(full.mapping.slots, layout=full.layout)


def test_the_stock_order_stays_and_another_one_is_that_of_the_trial_in_each_block() -> None:
    plans = random_plans(60)
    moved = [plan for plan in plans if not plan.mapping.is_stock]
    assert moved
    for plan in moved:
        nodes = full_nodes(plan.made_for.nodes, factor=FACTOR)
        full = with_all_replicas(plan, factor=FACTOR, nodes=nodes)
        # The ranks of the first replicas are where the trial had them.
        first = {
            (tp, cp, dp, pp): full.mapping.slots[rank]
            for rank in range(full.layout.world_size)
            for tp, cp, dp, pp in [coordinates(rank, layout=full.layout)]
            if dp < plan.layout.data_parallel
        }
        for rank, slot in enumerate(plan.mapping.slots):
            assert first[coordinates(rank, layout=plan.layout)] == slot
    stock = next(plan for plan in plans if plan.mapping.is_stock)
    nodes = full_nodes(stock.made_for.nodes, factor=FACTOR)
    assert with_all_replicas(stock, factor=FACTOR, nodes=nodes).mapping.slots == slots_of(nodes)


def test_nodes_that_no_trial_had_have_placeholders() -> None:
    nodes = full_nodes(make_nodes(2, 2), factor=2)
    assert [node.num_slots for node in nodes] == [2, 2, 2, 2]
    assert len({node.host for node in nodes}) == 4
    assert nodes[:2] == make_nodes(2, 2)


@pytest.mark.parametrize("factor", [2, 8])
def test_a_plan_keeps_its_digest_of_what_it_is(factor: int) -> None:
    (plan,) = random_plans(1, seed=3)
    nodes = full_nodes(plan.made_for.nodes, factor=factor)
    full = with_all_replicas(plan, factor=factor, nodes=nodes)
    assert full == with_all_replicas(plan, factor=factor, nodes=nodes)
    assert full.prediction is None
    assert full.measurement is None


def test_a_part_of_the_stages_becomes_all_of_them() -> None:
    """Trials of two stages' processes: 4 times the nodes hold twice the stages and twice the replicas."""
    named = {"schedule": ["no-pipelining", "1f1b", "interleaved", "zb-h1", "zb-v"]}
    seen = set()
    for plan in random_plans(60, stage_divisor=2, search=named):
        nodes = full_nodes(plan.made_for.nodes, factor=FACTOR)
        try:
            full = at_full_size(plan, factor=FACTOR, stage_factor=2, nodes=nodes)
        except PlanError as error:
            assert plan.schedule.name == "interleaved"
            assert "must fill" in str(error)  # noqa: PT017
            continue
        seen.add(plan.schedule.label)
        assert full.num_microbatches == plan.num_microbatches
        assert full.layout.pipeline_parallel == 2 * plan.layout.pipeline_parallel
        assert full.layout.data_parallel == 2 * plan.layout.data_parallel
        assert full.layout.world_size == full.made_for.world_size == FACTOR * plan.layout.world_size
        assert full.made_for.baseline.layout.world_size == full.made_for.world_size
        counts = full.split.transformer_layers_per_stage
        assert sum(counts) == full.shape.num_layers == 2 * plan.shape.num_layers
        assert full.made_for.shape.num_layers == 2 * plan.made_for.shape.num_layers
        assert len(counts) == full.layout.num_stages
        of_trial = plan.split.transformer_layers_per_stage
        if len(of_trial) > 1:
            assert (counts[0], counts[-1]) == (of_trial[0], of_trial[-1])
        assert max(counts[1:-1], default=0) - min(counts[1:-1], default=0) <= 1
        if plan.schedule.custom is not None:
            assert full.schedule.label == plan.schedule.label
            assert full.schedule.custom is not None
            assert full.schedule.custom.num_devices == full.layout.pipeline_parallel
        assert full.mapping.is_stock
        assert is_legal(full.mapping.slots, layout=full.layout)
    assert {"no-pipelining", "1f1b", "zb-h1", "zb-v"} <= seen


def test_an_order_that_breaks_a_rule_at_full_size_is_the_launchers() -> None:
    """Of stages smaller than a node, blocks of replicas put two trials' nodes into one."""
    nodes = make_nodes(4, 4, 4)
    slots = slots_of(nodes)
    order = (*slots[:4], *slots[8:], *slots[4:8])
    job = make_job(layout=make_layout(pipeline_parallel=6, data_parallel=2), global_batch_size=32)
    search = parse_config({}, where="test").search
    plan = build_space(job, nodes=nodes, search=search, run="r", seed=0).baseline
    plan = replace(plan, mapping=Mapping(slots=order))
    rules, full = OrderRules(keeps_nodes=True), full_nodes(nodes, factor=2)
    assert rules.fault(order, layout=plan.layout) is None
    assert with_all_replicas(plan, factor=2, nodes=full, rules=rules).mapping.slots == slots_of(full)
    assert with_all_replicas(plan, factor=2, nodes=full).mapping.slots != slots_of(full)
