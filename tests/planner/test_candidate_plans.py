"""The candidates: all of a small space's choices, each once, and legal."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.calibration.machine_prior import KnownMachine
from quartet_plugin.cost.iteration.split_model import CalibratedSplits
from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.planner import candidate_plans
from quartet_plugin.planner.candidate_plans import Candidate, PlanCandidates, candidate_of
from quartet_plugin.planner.layout_bounds import least_seconds_of
from quartet_plugin.planner.ranking import rank
from quartet_plugin.planner.space_request import request_of_space
from quartet_plugin.planner.split_search import NUM_SPLITS
from quartet_plugin.space.param_sources import FixedParams, RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.space.written_schedules import read_written_schedule
from quartet_plugin.tuner.config import parse_config
from tests.calibration.truth import Truth
from tests.space.jobs import make_job, make_layout, make_nodes
from tests.space.test_written_schedules import NAME, by_hand, edited, saved
from tests.tuner.fakes import by_formula


def space_of(search: dict[str, object], *nodes: int, **layout: int) -> Space:
    config = parse_config({"search": search}, where="test").search
    degrees = {"pipeline_parallel": sum(nodes), **layout}
    job = make_job(layout=make_layout(**degrees))
    return build_space(job, nodes=make_nodes(*nodes), search=config, run="r", seed=0)


def rates(plans: Sequence[Plan]) -> list[float]:
    return [by_formula(plan) for plan in plans]


def no_splits(plan: Plan) -> None:
    """No model for other splits than the first."""


def no_order(plan: Plan) -> None:
    """No order for calibrated costs."""


def found_in(space: Space) -> list[Candidate]:
    candidates = PlanCandidates(
        space, is_predictable=lambda plan: True, request=request_of_space(space, machine=KnownMachine())
    )
    return candidates.best(costs_of=rates, splits_of=no_splits, order_of=no_order)


def discrete(plan: Plan) -> object:
    """What is chosen of a plan beside its split."""
    return plan.shape, plan.layout, plan.schedule.label, plan.mapping


def test_every_choice_of_a_small_space_is_there() -> None:
    space = space_of({"schedule": ["no-pipelining", "1f1b", "interleaved", "zb-h1"]}, 2)
    found = {discrete(one.plan) for one in found_in(space)}
    generator = random.Random(0)
    chosen = {discrete(space.decode(RandomParams(generator), trial=0)) for _ in range(600)}
    stock = {one for one in chosen if "zb" not in one[2]}  # type: ignore[index]
    assert stock <= found
    assert any("zb" in one[2] for one in found)  # type: ignore[index]


def test_every_asked_split_is_there() -> None:
    asked = ["7+1", "6+2", "5+3", "even"]
    space = space_of({"schedule": "1f1b", "pipeline_parallel": 2, "virtual_stages": 1, "split": asked}, 2)
    assert {one.plan.split.label for one in found_in(space)} == {"7+1", "6+2", "5+3", "4+4"}


def test_each_plan_is_there_once_and_its_choices_lead_to_it() -> None:
    space = space_of({"schedule": ["1f1b", "zb-h1"], "pipeline_parallel": 2}, 2)
    found = found_in(space)
    assert len({one.plan.key for one in found}) == len(found)
    assert len({one.plan.identity for one in found}) == len(found)
    for one in found[::5]:
        assert space.decode(FixedParams(one.params), trial=0).key == one.plan.key
        assert space.params_of(one.plan) is not None


def test_beside_the_best_split_the_next_best_are_there() -> None:
    space = space_of({"schedule": "1f1b", "pipeline_parallel": 2, "virtual_stages": 1, "mapping": "stock"}, 2)
    truth = Truth(space.nodes, head=0.1, embedding=0.1)

    def splits_of(plan: Plan) -> CalibratedSplits:
        return CalibratedSplits(model=truth._iteration_models.split_model(plan), point=truth.theta)

    found = PlanCandidates(
        space, is_predictable=lambda plan: True, request=request_of_space(space, machine=KnownMachine())
    ).best(costs_of=lambda plans: [truth(plan) for plan in plans], splits_of=splits_of, order_of=no_order)
    chosen = min(found, key=lambda one: truth(one.plan)).plan
    alike = [one.plan.split.label for one in found if one.plan.layout == chosen.layout]
    every = {
        f"{first}+{8 - first}": replace(chosen, split=Split(transformer_layers_per_stage=(first, 8 - first)))
        for first in range(9)
    }
    best = sorted(every, key=lambda label: truth(every[label]))[:NUM_SPLITS]
    assert set(best) <= set(alike)


def test_the_schedule_of_a_file_is_there_although_its_layout_is_the_slowest(tmp_path: Path) -> None:
    written = read_written_schedule(saved(tmp_path, edited(by_hand())))
    wanted = {"schedule": ["1f1b", "interleaved", "zb-h1", NAME], "mapping": "stock"}
    search = parse_config({"search": wanted}, where="test").search
    job = make_job(layout=make_layout(micro_batch_size=8))
    space = build_space(job, nodes=make_nodes(2), search=search, run="r", seed=0, written={NAME: written})

    def slow_where_it_fits(plans: Sequence[Plan]) -> list[float]:
        return [1e3 if plan.layout.virtual_stages == 2 else by_formula(plan) for plan in plans]

    candidates = PlanCandidates(
        space, is_predictable=lambda plan: True, request=request_of_space(space, machine=KnownMachine())
    )
    found = candidates.best(costs_of=slow_where_it_fits, splits_of=no_splits, order_of=no_order)
    assert any(one.plan.split.transformer_layers_per_stage == (3, 1, 2, 2) for one in found)


def test_a_large_space_is_cut_to_what_can_be_ranked() -> None:
    space = space_of({"schedule": "stock"}, 8, 8, 8, 8, pipeline_parallel=4, data_parallel=8)
    candidates = PlanCandidates(
        space, is_predictable=lambda plan: True, request=request_of_space(space, machine=KnownMachine())
    )
    assert len(candidates.layouts) <= 400
    assert len(candidates.best(costs_of=rates, splits_of=no_splits, order_of=no_order)) <= 4000


@pytest.mark.parametrize("schedule", ["stock", "zb-h1"])
def test_of_too_many_layouts_those_that_may_be_fastest_are_predicted(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 12
    monkeypatch.setattr(candidate_plans, "MAX_LAYOUTS", most)
    monkeypatch.setattr(candidate_plans, "MAX_LAYOUTS_CUSTOM", most)
    space = space_of({"schedule": schedule}, 8, 8, pipeline_parallel=4, data_parallel=4)
    request = request_of_space(space, machine=KnownMachine())
    candidates = PlanCandidates(space, is_predictable=lambda plan: True, request=request)
    every = [(shape, layout) for shape, layouts in space.layouts.items() for layout in layouts]
    bounds = dict(zip(every, least_seconds_of(every, request=request, constants=None), strict=True))
    kept = {(candidate.plan.shape, candidate.plan.layout) for candidate in candidates.layouts}
    assert len(kept) == most < len(every)
    assert max(bounds[pair] for pair in kept) <= min(bounds[pair] for pair in bounds.keys() - kept)
    fastest = rank(request).best[0]
    assert (fastest.shape, fastest.layout) in kept
    assert bounds[fastest.shape, fastest.layout] <= fastest.equal_work_s
    candidates.best(costs_of=rates, splits_of=no_splits, order_of=no_order)
    (words,) = [line for line in candidates.limits if line.startswith("layouts: ")]
    assert words.startswith(f"layouts: {most} of {len(every)} are predicted, those with the smallest ")


def test_plans_that_cannot_be_predicted_are_left_out() -> None:
    space = space_of({"schedule": "stock"}, 2)
    candidates = PlanCandidates(
        space,
        is_predictable=lambda plan: plan.layout.data_parallel == 1,
        request=request_of_space(space, machine=KnownMachine()),
    )
    found = candidates.best(costs_of=rates, splits_of=no_splits, order_of=no_order)
    assert found
    assert all(one.plan.layout.data_parallel == 1 for one in found)


def test_a_line_names_the_limit_at_which_choices_were_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A custom schedule of a layout has fewer choices than a layout of a small space."""
    monkeypatch.setattr(candidate_plans, "MAX_CHOICES", 96)
    splits = ["7+1", "6+2", "5+3", "even"]
    search = {"pipeline_parallel": 2, "virtual_stages": 1, "split": splits, "micro_batch_size": 1}
    space = space_of({**search, "recompute": "none", "schedule": ["1f1b", "zb-h1"]}, 2)
    candidates = PlanCandidates(
        space, is_predictable=lambda plan: True, request=request_of_space(space, machine=KnownMachine())
    )
    assert len(candidates.layouts) < 24
    candidates.best(costs_of=rates, splits_of=no_splits, order_of=no_order)
    lines = [line for line in candidates.limits if line.startswith("combinations: ")]
    num = len(candidates.layouts)
    assert lines == [
        f"combinations: {num} custom schedules of layouts have more than the limit of 2 each; the rest is "
        "not predicted"
    ]


def test_a_line_counts_the_layouts_without_a_searched_order() -> None:
    job = make_job(layout=make_layout(pipeline_parallel=4, micro_batch_size=1), global_batch_size=512)
    search = parse_config({"search": {"pipeline_parallel": 4, "mapping": "stock"}}, where="test").search
    space = build_space(job, nodes=make_nodes(4), search=search, run="r", seed=0)
    candidates = PlanCandidates(
        space, is_predictable=lambda plan: True, request=request_of_space(space, machine=KnownMachine())
    )
    candidates.best(costs_of=rates, splits_of=no_splits, order_of=no_order)
    (line,) = [line for line in candidates.limits if line.startswith("searched orders: none for ")]
    assert line.endswith(" layouts, whose steps have more than 2,500 actions")


@pytest.mark.parametrize(("asked", "other"), [("last", True), ("before_last", False)])
def test_no_plan_stands_for_one_with_another_stage_of_multi_token_prediction(asked: str, other: bool) -> None:
    search = parse_config({"search": {"mtp_stage": asked, "schedule": "1f1b"}}, where="test").search
    job = replace(make_job(layout=make_layout(pipeline_parallel=4), features=("mtp",)), mtp_layers=1)
    space = build_space(job, nodes=make_nodes(4), search=search, run="r", seed=0)

    def with_stage(is_mtp_before_last: bool) -> object:
        # Both stages may have these layers.
        return candidate_of(
            space,
            job.shape,
            job.layout,
            schedule="1f1b",
            group=None,
            split=(3, 3, 2, 0),
            mapping=space.baseline.mapping,
            is_mtp_before_last=is_mtp_before_last,
        )

    assert with_stage(not other) is not None
    assert with_stage(other) is None
