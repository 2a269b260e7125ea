"""The split model takes the iteration model's time, for any split and mapping."""

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quartet_plugin.cost.iteration.split_model import CalibratedSplits
from quartet_plugin.mapping.orders import is_legal, slot_indices
from quartet_plugin.model.job_description import Experts
from quartet_plugin.model.plan import Mapping, Split
from quartet_plugin.model.shape import LayerKinds, ModelShape
from quartet_plugin.planner.split_search import Pipeline, balanced_split, best_splits
from quartet_plugin.space.param_sources import RandomParams
from quartet_plugin.space.plan_space import build_space
from quartet_plugin.split.layers import even_split
from quartet_plugin.tuner.config import parse_config
from tests.calibration.truth import Truth
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape

EXPERTS = Experts(num_experts=4, experts_per_token=2, ffn_hidden_size=4096)
PATTERN = "MM*-M***E-*M"


DENSE = [
    ({"pipeline_parallel": 4}, "1f1b"),
    ({"pipeline_parallel": 2, "data_parallel": 2}, "1f1b"),
    ({"pipeline_parallel": 2, "tensor_parallel": 2}, "zb-h1"),
    ({"pipeline_parallel": 2, "virtual_stages": 2, "data_parallel": 2}, "interleaved"),
    ({"pipeline_parallel": 4, "virtual_stages": 2}, "zb-v"),
    ({"pipeline_parallel": 2, "context_parallel": 2}, "1f1b"),
]
WITH_EXPERTS = [
    ({"pipeline_parallel": 2, "data_parallel": 2, "expert_parallel": 2}, "1f1b"),
    ({"pipeline_parallel": 4, "expert_parallel": 1}, "1f1b"),
]


def with_layers(shape: ModelShape, pattern: str) -> ModelShape:
    """The shape with a hybrid model's layers, if there is a pattern."""
    kinds = LayerKinds(attention=0, mlp=0, experts=0, state_space=0, projected_size=2048)
    return replace(shape, layer_kinds=kinds).with_pattern(pattern) if pattern else shape


@pytest.mark.parametrize(("layout", "schedule"), [*DENSE, *WITH_EXPERTS])
def test_of_a_hybrid_model_it_has_the_layers_of_each_stage(layout: dict[str, int], schedule: str) -> None:
    check_model(layout, schedule, num_dense=0, pattern=PATTERN)


@pytest.mark.parametrize(
    ("layout", "schedule", "num_dense"),
    [(*case, 0) for case in (*DENSE, *WITH_EXPERTS)] + [(*case, 2) for case in WITH_EXPERTS],
)
def test_it_is_the_iteration_model(layout: dict[str, int], schedule: str, num_dense: int) -> None:
    check_model(layout, schedule, num_dense=num_dense, pattern="")


def check_model(layout: dict[str, int], schedule: str, *, num_dense: int, pattern: str) -> None:
    """Compare both for random splits and mappings."""
    nodes = make_nodes(2, 2)
    search: dict[str, Any] = {**layout, "schedule": schedule, "micro_batch_size": 2}
    experts = replace(EXPERTS, num_dense_layers=num_dense) if "expert_parallel" in layout else None
    space = build_space(
        make_job(
            layout=make_layout(micro_batch_size=2, **layout),
            shape=with_layers(make_shape(num_layers=12), pattern),
            global_batch_size=16,
            experts=experts,
        ),
        nodes=nodes,
        search=parse_config({"search": search}, where="test").search,
        run="r",
        seed=0,
    )
    factors = {"head": 3.0, "transfer": 9.0, "network": 4.0, "runtime": 1.2}
    truth = Truth(nodes, slowdowns=(1.0, 1.5, 0.8, 1.1), experts=experts, **factors)
    draw = random.Random(0)
    plan = space.decode(RandomParams(draw), trial=0)
    calibrated = CalibratedSplits(model=truth._iteration_models.split_model(plan), point=truth.theta)
    for _ in range(12):
        orders = itertools.permutations(plan.mapping.slots)
        slots = draw.choice([order for order in orders if is_legal(order, layout=plan.layout)])
        counts = np.random.default_rng(draw.randrange(2**31)).multinomial(
            12 - plan.layout.num_stages, np.ones(plan.layout.num_stages) / plan.layout.num_stages
        )
        split = tuple((counts + 1).tolist())
        if split[0] < num_dense:
            continue  # the first stage has the dense layers
        other = replace(plan, mapping=Mapping(slots=slots), split=Split(transformer_layers_per_stage=split))
        seconds, _ = truth._iteration_models.of(other).evaluate(truth.theta)
        times = calibrated.times(slot_indices(nodes, other.mapping), other.mapping)
        # Gradients of experts and of the head are reduced at two rates; the step is a line in the weights.
        # Dense layers have other weights than those with experts.
        tolerance = 1e-9 if experts is None else 5e-3 if num_dense else 2e-4
        assert Pipeline(times).seconds(split) == pytest.approx(seconds, rel=tolerance)


@pytest.mark.parametrize(
    "degrees",
    [
        {"pipeline_parallel": 4},
        {"pipeline_parallel": 4, "virtual_stages": 2},
        {"pipeline_parallel": 2, "data_parallel": 2},
    ],
)
def test_it_is_the_iteration_model_with_multi_token_prediction_before_the_last_stage(
    degrees: dict[str, int],
) -> None:
    nodes, layout = make_nodes(2, 2), make_layout(micro_batch_size=2, **degrees)
    num_stages, shape = layout.num_stages, make_shape(num_layers=12, tied_embeddings=False)
    split = Split.of(even_split(12, num_stages=num_stages, is_mtp_before_last=True), is_mtp_before_last=True)
    job = replace(
        make_job(layout=layout, shape=shape, global_batch_size=16, features=("mtp", "mtp_before_last")),
        mtp_layers=2,
        split=split,
    )
    search = parse_config({"search": {"schedule": ["1f1b", "interleaved"]}}, where="test").search
    plan = build_space(job, nodes=nodes, search=search, run="r", seed=0).baseline
    truth = Truth(nodes, slowdowns=(1.0, 1.5, 0.8, 1.1), head=3.0, transfer=9.0, network=4.0)
    calibrated = CalibratedSplits(model=truth._iteration_models.split_model(plan), point=truth.theta)
    times = calibrated.times(slot_indices(nodes, plan.mapping), plan.mapping)
    assert times.num_layer_stages == num_stages - 1
    draw = np.random.default_rng(0)
    for _ in range(8):
        counts = draw.multinomial(12, np.ones(num_stages - 1) / (num_stages - 1))
        if 0 in counts[1:-1]:
            continue
        other = Split.of((*counts.tolist(), 0), is_mtp_before_last=True)
        seconds, _ = truth._iteration_models.of(replace(plan, split=other)).evaluate(truth.theta)
        modelled = Pipeline(times).seconds(other.transformer_layers_per_stage)
        assert modelled == pytest.approx(seconds, rel=1e-9)


def test_the_balanced_split_has_the_least_busiest_device() -> None:
    from tests.planner.test_best_moves import every_split, space_of

    space = space_of(3, num_layers=9, search={"pipeline_parallel": 3, "schedule": "1f1b"})
    truth = Truth(space.nodes, slowdowns=(1.3, 1.0, 0.7), head=0.5)
    plan = space.baseline
    model = truth._iteration_models.split_model(plan)
    times = CalibratedSplits(model=model, point=truth.theta).times((0, 1, 2), plan.mapping)

    def busiest(split: tuple[int, ...]) -> float:
        return float(times.action_s(split).sum(axis=0).max())

    assert busiest(balanced_split(times, 9)) == pytest.approx(min(map(busiest, every_split(9, 3))))


def test_orders_differ_by_the_nodes_of_their_expert_parallel_groups() -> None:
    nodes, layout = make_nodes(4, 4), {"pipeline_parallel": 2, "data_parallel": 4, "expert_parallel": 2}
    job = make_job(
        layout=make_layout(micro_batch_size=2, **layout), shape=make_shape(num_layers=8), experts=EXPERTS
    )
    search = parse_config({"search": {**layout, "schedule": "1f1b"}}, where="test").search
    plan = build_space(job, nodes=nodes, search=search, run="r", seed=0).baseline
    truth = Truth(nodes, experts=EXPERTS)
    calibrated = CalibratedSplits(model=truth._iteration_models.split_model(plan), point=truth.theta)
    # Stages send inside a node under both, and copies of a stage are on two.
    together, apart = [0, 1, 4, 5, 2, 3, 6, 7], [0, 4, 1, 5, 2, 6, 3, 7]
    assert calibrated.signature(together) != calibrated.signature(apart)
    assert calibrated.distinct(np.array([together, apart])) == [0, 1]
    slots = plan.mapping.slots
    seconds = [
        truth(replace(plan, mapping=Mapping(slots=tuple(slots[index] for index in order))))
        for order in (together, apart)
    ]
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize(("num_dense", "width"), [(3, 1024), (3, 16_384), (5, 1024)])
def test_the_best_split_of_two_kinds_of_layers_is_the_iteration_models(num_dense: int, width: int) -> None:
    """Also where dense layers are cheaper, and where no stage has room for all of them."""
    from tests.planner.test_best_moves import every_split

    nodes, layout = make_nodes(3), {"pipeline_parallel": 3}
    experts = replace(EXPERTS, num_dense_layers=num_dense, ffn_hidden_size=width)
    job = make_job(
        layout=make_layout(micro_batch_size=2, **layout), shape=make_shape(num_layers=12), experts=experts
    )
    search = parse_config({"search": {**layout, "schedule": "1f1b"}}, where="test").search
    plan = build_space(job, nodes=nodes, search=search, run="r", seed=0).baseline
    truth = Truth(nodes, experts=experts, head=2.0)
    calibrated = CalibratedSplits(model=truth._iteration_models.split_model(plan), point=truth.theta)
    best = best_splits(calibrated, [(slot_indices(nodes, plan.mapping), plan.mapping)], num_layers=12).splits[
        0
    ]

    def seconds(split: tuple[int, ...]) -> float:
        return truth(replace(plan, split=Split(transformer_layers_per_stage=split)))

    slack = 1.002 if num_dense < 5 else 1.2
    assert seconds(best.split) <= slack * min(map(seconds, every_split(12, 3)))


@pytest.mark.parametrize(
    ("num_layers", "layout", "schedule"),
    [
        (6, {"pipeline_parallel": 6}, "1f1b"),
        (8, {"pipeline_parallel": 4, "virtual_stages": 2}, "zb-v"),
        (2, {"pipeline_parallel": 2, "data_parallel": 2}, "1f1b"),
    ],
)
def test_stages_of_one_layer_have_a_step_that_grows_with_their_layers(
    num_layers: int, layout: dict[str, int], schedule: str
) -> None:
    """No stage can give a layer without being left empty."""
    world = make_layout(**layout).world_size
    nodes = make_nodes(world)
    job = make_job(
        layout=make_layout(micro_batch_size=2, **layout),
        shape=make_shape(num_layers=num_layers),
        global_batch_size=16,
    )
    search = parse_config({"search": {**layout, "schedule": schedule, "split": "even"}}, where="test").search
    space = build_space(job, nodes=nodes, search=search, run="r", seed=0)
    plan = space.decode(RandomParams(random.Random(0)), trial=0)
    assert plan.split.transformer_layers_per_stage == (1,) * plan.layout.num_stages
    truth = Truth(nodes, optimizer=300.0, head=2.0)
    calibrated = CalibratedSplits(model=truth._iteration_models.split_model(plan), point=truth.theta)
    times = calibrated.times(slot_indices(nodes, plan.mapping), plan.mapping)
    assert times.step.per_layer_s > 0.0
    last = plan.layout.num_stages - 1
    for giver in (0, last):
        for taker in range(last + 1):
            if taker == giver:
                continue
            counts = [1] * (last + 1)
            counts[giver], counts[taker] = 0, 2
            other = replace(plan, split=Split(transformer_layers_per_stage=tuple(counts)))
            seconds, _ = truth._iteration_models.of(other).evaluate(truth.theta)
            assert Pipeline(times).seconds(counts) == pytest.approx(seconds, rel=1e-9), counts


@pytest.mark.parametrize(
    ("layout", "schedule", "num_stages"),
    [
        ({"pipeline_parallel": 4}, "1f1b", 4),
        ({"pipeline_parallel": 2, "virtual_stages": 2}, "interleaved", 4),
        ({"pipeline_parallel": 3}, "zb-h1", 3),
    ],
)
@pytest.mark.parametrize("pattern", [PATTERN, "MMMMMMMM****", "*-*-*-EEEEEE"])
def test_the_best_split_of_a_hybrid_model_is_the_iteration_models(
    layout: dict[str, int], schedule: str, num_stages: int, pattern: str
) -> None:
    from tests.planner.test_best_moves import every_split

    nodes = make_nodes(layout["pipeline_parallel"])
    job = make_job(
        layout=make_layout(micro_batch_size=2, **layout),
        shape=with_layers(make_shape(seq_length=8192), pattern),
        global_batch_size=16,
        experts=EXPERTS,
    )
    search = parse_config({"search": {**layout, "schedule": schedule}}, where="test").search
    plan = build_space(job, nodes=nodes, search=search, run="r", seed=0).decode(
        RandomParams(random.Random(0)), trial=0
    )
    truth = Truth(
        nodes, experts=EXPERTS, head=2.0, slowdowns=(1.0, 1.4, 0.9, 1.2)[: layout["pipeline_parallel"]]
    )
    calibrated = CalibratedSplits(model=truth._iteration_models.split_model(plan), point=truth.theta)
    slots = slot_indices(nodes, plan.mapping)
    best = best_splits(calibrated, [(slots, plan.mapping)], num_layers=12, max_work=50_000_000)
    assert not best.num_cut_off
    pipeline = Pipeline(calibrated.times(slots, plan.mapping))
    times = sorted(pipeline.seconds(split) for split in every_split(12, num_stages))
    assert [split.seconds for split in best.splits] == pytest.approx(times[:5], rel=1e-8)

    def seconds(split: tuple[int, ...]) -> float:
        return truth(replace(plan, split=Split(transformer_layers_per_stage=split)))

    assert seconds(best.splits[0].split) <= 1.002 * min(map(seconds, every_split(12, num_stages)))
