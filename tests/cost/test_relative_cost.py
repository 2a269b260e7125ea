"""The rough cost: it must order what theory orders, and nothing more is asked of it."""

import pytest

from quartet_plugin.cost.relative_cost import iteration_flops, relative_cost
from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.split.layers import flops_end_loads
from tests.model.plans import plan_with
from tests.space.jobs import make_shape


def split_plan(*counts: int, vocab_size: int = 16384) -> Plan:
    shape = make_shape(vocab_size=vocab_size)
    made_for = plan_with().made_for
    return plan_with(shape=shape, split=Split(transformer_layers_per_stage=counts), made_for=made_for)


def test_the_baseline_costs_one() -> None:
    plan = split_plan(4, 4)
    assert relative_cost(plan, baseline=plan) == pytest.approx(1.0)


def test_a_heavy_head_wants_fewer_layers_on_the_last_stage() -> None:
    heavy = {
        counts: iteration_flops(split_plan(*counts, vocab_size=65536)) for counts in [(4, 4), (6, 2), (8, 0)]
    }
    assert heavy[(8, 0)] < heavy[(6, 2)] < heavy[(4, 4)]
    light = {
        counts: iteration_flops(split_plan(*counts, vocab_size=512)) for counts in [(4, 4), (6, 2), (8, 0)]
    }
    assert light[(4, 4)] < light[(6, 2)] < light[(8, 0)]


def test_the_head_weighs_its_flops_in_layers() -> None:
    shape = make_shape(hidden_size=384, ffn_hidden_size=1536, num_attention_heads=6, num_query_groups=6)
    weights = flops_end_loads(make_shape())
    assert weights.head == pytest.approx(
        make_shape().forward_flops_of_head / make_shape().forward_flops_per_layer
    )
    assert 0 < weights.embedding < 0.1
    assert flops_end_loads(shape).head < weights.head


def test_a_pipeline_of_one_stage_has_no_bubble() -> None:
    from dataclasses import replace

    from quartet_plugin.model.plan import ScheduleChoice

    even = split_plan(4, 4, vocab_size=512)
    layout = replace(even.layout, pipeline_parallel=1, data_parallel=2)
    replicas = replace(
        even,
        layout=layout,
        split=Split(transformer_layers_per_stage=(8,)),
        schedule=ScheduleChoice(name="no-pipelining"),
    )
    assert iteration_flops(replicas) < iteration_flops(even)
