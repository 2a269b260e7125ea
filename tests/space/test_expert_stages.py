"""Each pipeline rank of a hybrid model has a layer with experts, where Megatron logs their losses."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.schedule.placement import Placement, linear, loop, v_shape
from quartet_plugin.space.expert_stages import fault_of_plan, fault_of_split, split_with_experts
from quartet_plugin.space.knobs.knob import KnobContext
from quartet_plugin.space.knobs.pipeline_parallel import PIPELINE_PARALLEL
from quartet_plugin.space.param_sources import RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape

# Of the pattern M*ME-E.
LAYERS, NUM_LAYERS = (3, 5), 6
HYBRID = ("hybrid",)


def every_split(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for ends in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *ends, num_layers)))


def ranks_with_experts(split: tuple[int, ...], placement: Placement, layers: tuple[int, ...]) -> set[int]:
    """Counted layer by layer; a layer behind the last is the last stage's."""
    stages = [stage for stage, count in enumerate(split) for _ in range(count)]
    return {placement[[*stages, len(split) - 1][layer]] for layer in layers}


@pytest.mark.parametrize("placement", [linear(2), linear(3), loop(2, 2), v_shape(2), loop(2, 3)], ids=str)
@pytest.mark.parametrize("layers", [(3, 5), (0, 1), (0, 6), (2, 3, 4), (0, 5), (6, 7)], ids=str)
def test_a_split_without_an_expert_layer_on_a_rank_is_replaced(
    placement: Placement, layers: tuple[int, ...]
) -> None:
    """The last of seven layers is 6; 7 is one of multi-token prediction."""
    num_ranks = max(placement) + 1
    splits = list(every_split(7, len(placement)))
    legal = {split for split in splits if len(ranks_with_experts(split, placement, layers)) == num_ranks}
    for split in splits:
        fault = fault_of_split(split, placement=placement, expert_layers=layers)
        assert (fault is None) == (split in legal)
        made = split_with_experts(split, placement=placement, expert_layers=layers)
        assert made == split if split in legal or not legal else made in legal


def test_without_logged_layers_every_split_is_legal() -> None:
    for split in every_split(NUM_LAYERS, 2):
        assert fault_of_split(split, placement=linear(2), expert_layers=()) is None
        assert split_with_experts(split, placement=linear(2), expert_layers=()) == split


def space_of(
    *, layers: tuple[int, ...] | None = LAYERS, layout: Layout | None = None, **search: Any
) -> Space:
    job = make_job(
        layout=layout or make_layout(pipeline_parallel=1, data_parallel=4),
        shape=make_shape(num_layers=NUM_LAYERS),
        features=HYBRID,
    )
    config = parse_config({"search": {"tensor_parallel": 1, **search}}, where="q.yaml").search
    job = replace(job, logged_expert_layers=layers)
    return build_space(job, nodes=make_nodes(4), search=config, run="r", seed=0)


def plans(space: Space, *, num: int = 200) -> list[Plan]:
    generator = random.Random(0)
    return [space.decode(RandomParams(generator), trial=1) for _ in range(num)]


def test_no_plan_leaves_a_rank_without_experts() -> None:
    space = space_of(schedule=["no-pipelining", "1f1b", "interleaved", "zb-h1", "zb-v"])
    made = plans(space)
    assert {plan.layout.pipeline_parallel for plan in made} == {1, 2}  # four ranks have but two such layers
    assert {plan.layout.virtual_stages for plan in made} > {1}
    assert {plan.schedule.name for plan in made} == {"no-pipelining", "1f1b", "interleaved", "custom"}
    assert {plan.split.label for plan in made if plan.layout.num_stages == 2} == {"4+2", "5+1"}
    for plan in made:
        assert fault_of_plan(plan, LAYERS) is None
        assert space.refusal_of(plan) is None
        if plan.schedule.custom is None:
            assert space.params_of(plan) is not None


def test_a_plan_that_does_is_refused_with_the_reason() -> None:
    space = space_of(layout=make_layout(pipeline_parallel=2, data_parallel=2))
    split = Split(transformer_layers_per_stage=(2, 4))
    reason = space.refusal_of(replace(space.baseline, split=split))
    assert reason is not None
    assert reason.startswith("split: 2+4 leaves pipeline rank 0 without a layer with experts (E)")
    assert "\n" not in reason
    free = space_of(layers=None, layout=make_layout(pipeline_parallel=2, data_parallel=2))
    assert free.refusal_of(replace(free.baseline, split=split)) is None


@pytest.mark.parametrize("split", ["2+4", "1+1+1+3", ["4+2", "2+4"]])
def test_a_written_split_that_does_is_refused(split: str | list[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"search\.split: .*; leaves pipeline rank [01] without a layer with"
    ):
        space_of(split=split, schedule="stock")
    assert plans(space_of(split=split, layers=None, schedule=["1f1b", "interleaved"]))


def test_an_even_split_is_taken_where_it_is_legal() -> None:
    made = plans(space_of(split=["even", "4+2"], schedule=["no-pipelining", "1f1b"]))
    assert {plan.split.label for plan in made} == {"6", "4+2"}


def test_a_written_split_of_fewer_stages_than_there_are_ranks_leaves_pipelines_of_its_own_stages() -> None:
    """Four ranks could have a layer with experts each, and the split has but two stages."""
    space = space_of(layers=(0, 1, 3, 5), split="3+3", schedule=["1f1b"])
    assert {plan.layout.pipeline_parallel for plan in plans(space)} == {2}


def test_more_ranks_than_expert_layers_are_refused_with_the_number() -> None:
    with pytest.raises(ConfigError, match="nearest: pipeline_parallel 2"):
        space_of(pipeline_parallel=[4])
    space = space_of(schedule=["no-pipelining", "1f1b"])
    context = KnobContext(layout=space.job.layout, shape=space.job.shape, rules=space.rules())
    fault = "must be at most 2: each device needs a layer with experts of logged losses"
    assert PIPELINE_PARALLEL.fault(4, context) == fault
    assert PIPELINE_PARALLEL.fault(2, context) is None
