"""Schedules of our own in the space: legal, made the same again, and found again from the plan."""

import random
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.calibration.machine_prior import KnownMachine
from quartet_plugin.errors import ConfigError, InterruptedByUserError
from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.plan import Plan, ScheduleName
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.candidate_plans import PlanCandidates
from quartet_plugin.planner.space_request import request_of_space
from quartet_plugin.runtime.programs import make_schedule, schedule_spec_of
from quartet_plugin.schedule.choice import relative_costs
from quartet_plugin.schedule.placement import PlacementKind, kind_of
from quartet_plugin.schedule.search.effort import stopped_by
from quartet_plugin.schedule.search.named_starts import NamedStart
from quartet_plugin.schedule.search.problem import ScheduleProblem
from quartet_plugin.schedule.simulate import simulate
from quartet_plugin.space.config import CUSTOM_NAMES, DEFAULT_NAMES, SEARCHED, STOCK_NAMES
from quartet_plugin.space.param_sources import FixedParams, RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.space.runtime_refusals import REFUSED, Refused, refusal
from quartet_plugin.space.schedules import CustomOrder, cost_table, custom_order, custom_schedules_of
from quartet_plugin.split.layers import EndLoads, entries_of, even_split, flops_end_loads, is_legal_split
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape

# It needs twice as many microbatches as devices, which a drawn job may not have.
SMALLEST = "dualpipev"


def space_of(search: dict[str, Any] | None = None, **job: Any) -> Space:
    config = parse_config({"search": search or {}}, where="test").search
    layout = job.get("layout") or make_layout()
    nodes = make_nodes(layout.world_size)
    return build_space(make_job(**job), nodes=nodes, search=config, run="r", seed=0)


def sample(space: Space, *, num: int) -> list[Plan]:
    generator = random.Random(0)
    return [space.decode(RandomParams(generator), trial=at) for at in range(num)]


def makespan_s(order: CustomOrder, *, shape: ModelShape, num_microbatches: int) -> float:
    """The makespan in forwards of one layer, with the ends by their FLOPs."""
    spec = schedule_spec_of(order.custom, num_microbatches=num_microbatches)
    schedule = make_schedule(spec, num_microbatches)
    costs = cost_table(
        shape,
        end_loads=flops_end_loads(shape).rounded(),
        placement=schedule.placement,
        num_devices=schedule.num_devices,
        num_microbatches=num_microbatches,
    )
    start = NamedStart(schedule=schedule, split=entries_of(order.split))
    return start.climb(ScheduleProblem.of(costs), steps=0, seed=0).score


@st.composite
def own_spaces(draw: st.DrawFn) -> Space:
    """Jobs with a pipeline whose search is of our schedules alone."""
    pipeline = draw(st.sampled_from([2, 3, 4]))
    layout = make_layout(
        pipeline_parallel=pipeline,
        data_parallel=draw(st.sampled_from([1, 2])),
        micro_batch_size=draw(st.sampled_from([1, 2])),
    )
    shape = make_shape(
        num_layers=draw(st.integers(2 * pipeline, 14)), vocab_size=draw(st.sampled_from([128, 4096, 32768]))
    )
    batch = layout.micro_batch_size * layout.data_parallel * draw(st.integers(1, 9))
    names = draw(
        st.lists(st.sampled_from([n for n in CUSTOM_NAMES if n != "dualpipev"]), min_size=1, unique=True)
    )
    wish: dict[str, Any] = {"schedule": names, "pipeline_parallel": pipeline}
    if draw(st.booleans()):
        wish["split"] = "even"
    return space_of(wish, layout=layout, shape=shape, global_batch_size=batch)


def test_a_fixed_split_that_fills_a_device_more_than_the_balanced_has_memory_for_its_own_layers() -> None:
    search = {"schedule": SEARCHED, "split": "even", "pipeline_parallel": 4, "virtual_stages": 2}
    shape = make_shape(num_layers=11, vocab_size=4096)
    layout = make_layout(pipeline_parallel=4, micro_batch_size=1)
    space = space_of(search, layout=layout, shape=shape, global_batch_size=1)
    plan = space.decode(RandomParams(random.Random(0)), trial=1)
    assert plan.split.transformer_layers_per_stage == even_split(11, num_stages=8)


@settings(max_examples=60, deadline=None)
@given(own_spaces(), st.integers(0, 2**31))
def test_every_plan_of_ours_is_legal_and_runs(space: Space, seed: int) -> None:
    plan = space.decode(RandomParams(random.Random(seed)), trial=3)
    custom = plan.schedule.custom
    assert custom is not None
    assert is_legal_split(
        plan.split.transformer_layers_per_stage,
        num_layers=plan.shape.num_layers,
        num_stages=plan.layout.num_stages,
    )
    chunks = plan.layout.virtual_stages
    kind = kind_of(custom.placement, num_devices=custom.num_devices)
    assert (kind is PlacementKind.LINEAR) == (chunks == 1)
    # Raises for an order that breaks a rule, and where devices would wait for one another.
    schedule = make_schedule(
        schedule_spec_of(custom, num_microbatches=plan.num_microbatches), plan.num_microbatches
    )
    assert simulate(schedule, relative_costs(custom).ratios).makespan_s > 0


@settings(max_examples=60, deadline=None)
@given(own_spaces(), st.integers(0, 2**31))
def test_choices_make_the_same_plan_again_and_can_be_read_off_it(space: Space, seed: int) -> None:
    chooser = RandomParams(random.Random(seed))
    plan = space.decode(chooser, trial=3)
    custom_order.cache_clear()
    assert space.decode(FixedParams(chooser.params), trial=3) == plan
    params = space.params_of(plan)
    # What the ends of an order of ours were said to weigh can be guessed nearly always.
    assert params is None or space.decode(FixedParams(params), trial=3).key == plan.key


def test_nearly_every_plan_can_be_read_off() -> None:
    space = space_of({"pipeline_parallel": 2})
    plans = sample(space, num=40)
    assert sum(space.params_of(plan) is not None for plan in plans) >= 38


def test_a_plan_of_another_model_is_not_in_the_space() -> None:
    other = sample(space_of({"schedule": "zb-h1"}, shape=make_shape(vocab_size=32768)), num=1)[0]
    assert space_of({"schedule": "zb-h1"}).params_of(other) is None


def test_by_default_ours_are_tried_beside_the_frameworks() -> None:
    space = space_of()
    offered = {
        (name, layout.virtual_stages)
        for layouts in space.layouts.values()
        for layout in layouts
        for name in space.schedules_of(layout, shape=space.job.shape)
    }
    assert {name for name, _ in offered} == {*STOCK_NAMES, *DEFAULT_NAMES}
    assert {chunks for name, chunks in offered if name in ("zb-h1", "zb-h2", "1f1b")} == {1}
    assert {chunks for name, chunks in offered if name in ("zb-v", "v-half", "v-min")} == {2}
    plans = sample(space, num=120)
    assert {plan.schedule.name for plan in plans} == {*STOCK_NAMES, "custom"}
    assert any(
        plan.schedule.custom is not None and plan.schedule.custom.placement == (0, 1, 1, 0) for plan in plans
    )


def test_what_is_asked_for_is_what_is_tried() -> None:
    plans = sample(space_of({"schedule": ["1f1b", "gpipe"]}), num=60)
    assert {plan.schedule.label for plan in plans} == {"1f1b", "gpipe"}
    only = sample(space_of({"schedule": "zb-v"}), num=20)
    assert {(plan.schedule.label, plan.layout.virtual_stages) for plan in only} == {("zb-v", 2)}


@pytest.mark.parametrize("feature", ["fsdp", "cpu_offload"])
@pytest.mark.parametrize("wish", [{}, {"schedule": ["zb-h1", "zb-v"]}])
def test_where_a_feature_locks_the_schedule_stock_stays(feature: str, wish: dict[str, Any]) -> None:
    plans = sample(space_of(wish, features=(feature,)), num=60)
    assert all(plan.schedule.custom is None for plan in plans)


VALUES = {"cuda_graph_impl": "local", "optimizer": "dist_muon"}


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.dest)
@pytest.mark.parametrize("wish", [{}, {"schedule": ["zb-h1", "zb-v"]}])
def test_where_the_runtime_steps_aside_no_layout_has_a_custom_schedule(
    refused: Refused, wish: dict[str, Any]
) -> None:
    reason = refusal(Namespace(**{refused.dest: VALUES.get(refused.dest, 2)}))
    assert reason is not None
    space = space_of(wish, no_custom_schedules=reason)
    for shape, layouts in space.layouts.items():
        for layout in layouts:
            assert set(space.schedules_of(layout, shape=shape)) <= set(STOCK_NAMES)


def test_a_wish_that_no_pipeline_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="fits what is asked"):
        space_of({"schedule": "zb-v", "pipeline_parallel": 1})
    with pytest.raises(ConfigError, match="fits what is asked"):
        space_of({"schedule": "zb-v", "virtual_stages": 1})


@pytest.mark.parametrize("schedule", [None, ["zb-h1", "1f1b"]])
def test_a_job_whose_layers_make_full_backwards_has_split_schedules_only_on_request(
    schedule: list[str] | None,
) -> None:
    reason = "--fp8-format: backwards are not split"
    space = space_of({} if schedule is None else {"schedule": schedule}, full_backward=reason)
    plans = sample(space, num=60)
    assert any(plan.schedule.custom is not None for plan in plans) == (schedule is not None)


def test_recomputing_jobs_get_no_schedule_that_they_cannot_use() -> None:
    requested: dict[str, Any] = {"num_microbatches": 8, "requested": None}
    plain = make_layout(pipeline_parallel=2)
    assert custom_schedules_of(plain, splits_backward=True, **requested) == ("zb-h1", "zb-h2", SEARCHED)
    assert custom_schedules_of(plain, splits_backward=False, **requested) == ()
    saving = make_layout(pipeline_parallel=2, recompute="selective")
    assert custom_schedules_of(saving, splits_backward=True, **requested) == ("zb-h1", SEARCHED)
    folded = make_layout(pipeline_parallel=2, virtual_stages=2)
    assert custom_schedules_of(folded, splits_backward=True, **requested) == (
        "zb-v",
        "v-half",
        "v-min",
        SEARCHED,
    )


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([2, 3, 4]), st.integers(0, 8), st.integers(1, 12), st.sampled_from([1, 2]))
def test_a_searched_order_is_no_slower_than_zb_h1_and_holds_no_more_than_1f1b(
    devices: int, more: int, microbatches: int, chunks: int
) -> None:
    shape = make_shape(num_layers=devices * chunks + more)
    sizes: dict[str, Any] = {
        "shape": shape, "num_devices": devices, "num_microbatches": microbatches, "end_loads": None
    }  # fmt: skip
    even = even_split(shape.num_layers, num_stages=devices * chunks)
    found = custom_order(SEARCHED, num_chunks=chunks, split=even, **sizes)
    named = custom_order("zb-h1" if chunks == 1 else "v-half", num_chunks=chunks, split=even, **sizes)
    assert found.split == named.split == even
    if chunks == 1:
        seconds = [makespan_s(order, shape=shape, num_microbatches=microbatches) for order in (found, named)]
        assert seconds[0] <= seconds[1] * (1 + 1e-9)
    free = custom_order(SEARCHED, num_chunks=chunks, split=None, **sizes)
    schedule = make_schedule(schedule_spec_of(free.custom, num_microbatches=microbatches), microbatches)
    peak = simulate(schedule, relative_costs(free.custom).ratios).peak_activation_bytes
    assert peak.max() <= min(devices, microbatches) * shape.num_layers


def test_a_heavier_head_takes_layers_off_its_device() -> None:
    shape = make_shape(num_layers=12)
    sizes: dict[str, Any] = {
        "shape": shape, "num_devices": 2, "num_chunks": 1, "num_microbatches": 8, "split": None
    }  # fmt: skip
    for name in ("zb-h1", SEARCHED):
        light = custom_order(name, end_loads=EndLoads(embedding=0.0, head=0.0), **sizes)
        heavy = custom_order(name, end_loads=EndLoads(embedding=0.0, head=6.0), **sizes)
        spare = custom_order(name, end_loads=EndLoads(embedding=0.0, head=-6.0), **sizes)
        assert heavy.split[-1] < light.split[-1] < spare.split[-1]


def test_the_split_that_fits_the_flops_is_predicted_to_be_fastest() -> None:
    shape = make_shape(num_layers=12, vocab_size=32768)
    sizes: dict[str, Any] = {"num_devices": 2, "num_chunks": 1, "num_microbatches": 8, "split": None}
    right = custom_order("zb-h1", shape=shape, end_loads=flops_end_loads(shape).rounded(), **sizes)
    wrong = custom_order("zb-h1", shape=shape, end_loads=EndLoads(embedding=6.0, head=0.0), **sizes)
    seconds = [makespan_s(order, shape=shape, num_microbatches=8) for order in (right, wrong)]
    assert seconds[0] < seconds[1]


def test_schedules_of_ours_are_among_the_candidates_of_a_study() -> None:
    def costs_of(plans: Sequence[Plan]) -> list[float]:
        return [float(plan.num_microbatches) for plan in plans]

    for batch in (8, 32):
        space = space_of({"pipeline_parallel": 2}, global_batch_size=batch)
        candidates = PlanCandidates(
            space, is_predictable=lambda plan: True, request=request_of_space(space, machine=KnownMachine())
        )
        found = candidates.best(costs_of=costs_of, splits_of=lambda plan: None, order_of=lambda plan: None)
        own = {one.plan.schedule.label for one in found if one.plan.schedule.custom is not None}
        assert len(own) > 1


def test_an_order_whose_search_was_stopped_is_not_kept() -> None:
    sizes: dict[str, Any] = {
        "shape": make_shape(num_layers=10),
        "num_devices": 2,
        "num_chunks": 1,
        "num_microbatches": 7,
        "end_loads": None,
        "split": None,
    }

    def stop() -> None:
        raise InterruptedByUserError("stopped")

    custom_order.cache_clear()
    with pytest.raises(InterruptedByUserError), stopped_by(stop):
        custom_order(SEARCHED, **sizes)
    assert custom_order.cache_info().currsize == 0
    assert custom_order(SEARCHED, **sizes).custom.num_devices == 2


def test_the_names_of_a_plan_file_are_those_of_the_registry() -> None:
    assert get_args(ScheduleName) == (*STOCK_NAMES, "custom")
    assert set(STOCK_NAMES) == MEGATRON.stock_schedules
    assert STOCK_NAMES == ("no-pipelining", "1f1b", "interleaved")
    assert DEFAULT_NAMES == ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", SEARCHED)
    assert (*DEFAULT_NAMES, "gpipe", "breadth-first", "dualpipev") == CUSTOM_NAMES
