"""Custom schedules of planned layouts: legality, the assumptions of the bounds, plans, searched orders."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.run import ScheduleKind
from quartet_plugin.errors import ConfigError, InfeasibleError
from quartet_plugin.model.plan import read_plan, write_plan
from quartet_plugin.planner import order_search
from quartet_plugin.planner.bounds import first_forwards, v_split
from quartet_plugin.planner.described_rules import rules_of
from quartet_plugin.planner.explain import explained, job_of_plan
from quartet_plugin.planner.job import PlanRequest, parse_job
from quartet_plugin.planner.layout_table import layout_table_of
from quartet_plugin.planner.order_search import (
    SearchedOrder,
    SearchTime,
    custom_choice,
    planned_ranking,
    with_searched_orders,
)
from quartet_plugin.planner.plans import plain_layout, plan_of
from quartet_plugin.planner.ranking import Ranking, rank
from quartet_plugin.planner.table_schedules import KINDS
from quartet_plugin.space.config import TABLE_SCHEDULES
from quartet_plugin.space.layouts import requested_groups
from tests.planner.planning import job_data

PIPELINE = {"pipeline_parallel": 4, "tensor_parallel": 1, "micro_batch_size": 1, "recompute": "none"}


def parsed(**search: Any) -> PlanRequest:
    return parse_job(job_data(search=search), where="job")


def schedules_of(job: PlanRequest) -> dict[tuple[int, int, str], set[str]]:
    """The schedules of each PP, virtual stages and recompute in the table."""
    table = layout_table_of(job, job.shape)
    found: dict[tuple[int, int, str], set[str]] = {}
    for row in range(len(table)):
        layout = table.layout(row)
        key = (layout.pipeline_parallel, layout.virtual_stages, layout.recompute)
        found.setdefault(key, set()).add(table.schedule(row).value)
    return found


def test_the_numbers_of_a_table_are_those_of_its_names() -> None:
    assert [kind.value for kind in KINDS[1:]] == list(TABLE_SCHEDULES[1:])


def test_auto_has_stock_and_the_named_schedules_that_are_legal() -> None:
    found = schedules_of(parsed())
    assert found[1, 1, "none"] == {"none"}
    assert found[2, 1, "none"] == {"1f1b", "zb-h1", "zb-h2"}
    assert found[2, 1, "selective"] == {"1f1b", "zb-h1"}
    assert found[2, 1, "full"] == {"1f1b"}
    assert found[2, 2, "none"] == {"interleaved", "zb-v", "v-half", "v-min"}
    assert found[2, 4, "none"] == {"interleaved"}


def test_experts_split_no_backward_unless_they_are_asked_to() -> None:
    model = {"num_experts": 4}
    search = {"pipeline_parallel": 2}
    free = parse_job(job_data(model=model, search=search), where="job")
    assert set.union(*schedules_of(free).values()) == {"1f1b", "interleaved"}
    asked = parse_job(job_data(model=model, search={**search, "schedule": "zb-h1"}), where="job")
    assert set.union(*schedules_of(asked).values()) == {"zb-h1"}


def test_a_list_holds_what_it_names() -> None:
    found = schedules_of(parsed(schedule=["stock", "gpipe", "breadth-first", "dualpipev"]))
    assert found[2, 1, "full"] == {"1f1b", "gpipe"}
    assert found[2, 2, "none"] == {"interleaved", "breadth-first", "dualpipev"}
    assert found[1, 1, "none"] == {"none"}


def test_every_legal_group_is_tried_and_the_best_kept() -> None:
    search = {**PIPELINE, "virtual_stages": 2, "schedule": "interleaved"}
    best = rank(parsed(**search)).best[0]
    groups = requested_groups(best.layout, rules=rules_of(parsed(**search)))
    assert groups == (4, 8)
    times = {group: rank(parsed(**search, group=group)).best[0].iteration_s for group in groups}
    assert best.iteration_s == min(times.values())
    assert times[best.group or 0] == best.iteration_s
    with pytest.raises(InfeasibleError):
        rank(parsed(**search, group=3))


@pytest.mark.parametrize("kind", [ScheduleKind.V_HALF, ScheduleKind.V_MIN, ScheduleKind.ZB_V])
@pytest.mark.parametrize("devices", [2, 3, 5, 8])
def test_longer_orders_begin_as_those_of_two_rounds(kind: ScheduleKind, devices: int) -> None:
    """The bound of memory takes it for granted."""
    short = first_forwards(kind, devices, 2 * devices)
    for count in (2 * devices + 1, 3 * devices, 5 * devices + 2):
        assert first_forwards(kind, devices, count) == short


def test_the_split_of_a_v_evens_out_devices_that_hold_both_ends() -> None:
    for layers, devices, embedding, head in ((24, 4, 0, 4), (30, 4, 2, 6), (7, 3, 0, 1), (9, 2, 5, 0)):
        split = np.array(v_split(layers, num_devices=devices, embedding=embedding, head=head))
        assert split.sum() == layers
        assert (split >= 0).all()
        assert (split[1:-1] > 0).all()
        loads = split[:devices] + split[: devices - 1 : -1]
        loads[0] += embedding + head
        assert loads.max() <= -(-(layers + embedding + head) // devices) + 1
    # Too few layers for two stages a device.
    assert sum(v_split(3, num_devices=3, embedding=0, head=0)) == 3


def planned(**search: Any) -> tuple[PlanRequest, Ranking]:
    job = parsed(**{**PIPELINE, **search})
    return job, planned_ranking(job, top=3)


def test_a_plan_carries_its_named_schedule_and_is_explained(tmp_path: Path) -> None:
    job, ranking = planned(schedule="zb-v")
    best = ranking.best[0]
    plan = plan_of(job, best, plain=plain_layout(job, best=best), name="job", place=1)
    write_plan(plan, path=tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")
    assert read.schedule.custom is not None
    assert read.schedule.custom.named == "zb-v"
    assert read.schedule.custom.orders is None
    assert read.made_for.baseline.schedule.name in ("1f1b", "no-pipelining")
    again, assumed = job_of_plan(read)
    shown = explained(read, again, assumed=assumed)
    assert shown.prediction.iter_time_s == pytest.approx(best.iteration_s, rel=1e-9)
    assert shown.assumed == {}


def test_a_searched_order_is_never_slower_fits_and_says_its_gap(tmp_path: Path) -> None:
    job, ranking = planned()
    named = rank(job, top=3)
    assert ranking.best[0].iteration_s <= named.best[0].iteration_s
    searched = [one for one in ranking.best if one.order is not None]
    assert searched
    for one in ranking.best:
        assert one.gap is not None
        assert one.gap >= -1e-9
        assert one.memory.fits
    best = searched[0]
    plan = plan_of(job, best, plain=plain_layout(job, best=best), name="job", place=1)
    write_plan(plan, path=tmp_path / "plan.json")
    again, assumed = job_of_plan(read_plan(tmp_path / "plan.json"))
    shown = explained(plan, again, assumed=assumed)
    assert shown.prediction.iter_time_s == pytest.approx(best.iteration_s, rel=1e-9)
    assert max(memory.total_bytes for memory in shown.memory) == pytest.approx(best.memory.total_bytes)


def test_the_same_search_finds_the_same_orders() -> None:
    times = [[one.iteration_s for one in planned()[1].best] for _ in range(2)]
    assert times[0] == times[1]


def test_a_searched_order_keeps_the_memory_of_a_device() -> None:
    job, ranking = planned(data_parallel=2)
    least = rank(replace(job, search=job.search.model_copy(update={"schedule": ("v-min",)})))
    limit = int(least.best[0].memory.total_bytes / 0.98 + 2 * 2**30)
    tight = replace(job, machines=replace(job.machines, memory_bytes=limit))
    for one in planned_ranking(tight, top=3).best:
        assert one.memory.fits
    assert ranking.best[0].iteration_s <= planned_ranking(tight, top=1).best[0].iteration_s


def test_searched_alone_has_no_other_schedules() -> None:
    _, ranking = planned(schedule="searched")
    assert all(one.order is not None for one in ranking.best)
    with pytest.raises(InfeasibleError, match="searched"):
        planned_ranking(parsed(pipeline_parallel=1, schedule="searched"), top=1)
    # Layouts without a pipeline are faster here, and as many as are looked at.
    assert rank(parsed(tensor_parallel=1), top=1).best[0].layout.pipeline_parallel == 1
    free = planned_ranking(parsed(tensor_parallel=1, schedule="searched"), top=1).best[0]
    assert free.order is not None


def test_a_search_does_not_end_with_a_forbidden_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    search = {**PIPELINE, "virtual_stages": 1}
    free = parsed(**search, schedule=["stock", "searched"])
    order = custom_choice(free, rank(parsed(**search, schedule="zb-h1")).best[0], constants=fitted())
    searched = SearchedOrder(custom=order, makespan_s=1.0, bound_s=1.0, is_cut=False)
    monkeypatch.setattr(order_search, "best_order", lambda *args, **kwargs: searched)
    assert "zb-h1" in {ranked.schedule_label for ranked in planned_ranking(free, top=3).best}
    forbidden = parsed(**search, schedule=["stock", "searched"], forbid=[{"schedule": "zb-h1"}])
    assert "zb-h1" not in {ranked.schedule_label for ranked in planned_ranking(forbidden, top=3).best}


def test_named_only_searches_nothing() -> None:
    job = parsed(**PIPELINE)
    named = planned_ranking(job, top=2, has_search=False)
    assert all(one.order is None and one.gap is None for one in named.best)
    assert named.best[0].iteration_s == rank(job).best[0].iteration_s


def test_a_file_of_a_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="use `quartet tune` for schedule files"):
        parsed(schedule="mine.json")


def test_a_forbidden_schedule_is_not_planned() -> None:
    found = schedules_of(parsed(forbid=[{"schedule": ["zb-v", "1f1b"]}]))
    assert "zb-v" not in set.union(*found.values())
    assert (2, 1, "full") not in found


def test_a_time_limit_cuts_the_searches_short_and_says_so() -> None:
    job = parsed(**PIPELINE)
    best = planned_ranking(job, top=4, has_search=False).best
    # A clock that stands: something is left before each search, and nothing in its middle.
    short = SearchTime(limit_s=1e-9, clock=lambda: 0.0)
    plans = with_searched_orders(job, best, constants=fitted(), search_time=short)
    assert any(plan.gap is not None for plan in plans)
    assert short.num_cut > 0
    assert short.num_left_out == 0
    (line,) = short.lines
    assert line == (
        "searched orders: the time limit of 1e-09 s has cut the search short for "
        f"{short.num_cut} of the best plans"
    )
    # What has ended before counts in full.
    enough = SearchTime(limit_s=1e6)
    whole = with_searched_orders(job, best, constants=fitted(), search_time=enough)
    assert whole == with_searched_orders(job, best, constants=fitted())
    assert not list(enough.lines)


def test_without_time_no_order_is_searched_where_none_is_needed() -> None:
    job = parsed(**PIPELINE)
    ranking = planned_ranking(job, top=4, time_limit_s=0.0)
    assert {plan.order for plan in ranking.best} == {None}
    (line,) = [line for line in ranking.limits if "time limit" in line]
    assert line.startswith("searched orders: none for ")
    assert line.endswith(" of the best plans, because of the time limit of 0 s")
    (plan,) = planned_ranking(parsed(**PIPELINE, schedule="searched"), top=1, time_limit_s=0.0).best
    assert plan.order is not None


def test_a_line_says_for_which_of_the_best_plans_no_order_is_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = parsed(**PIPELINE)
    assert not [line for line in planned_ranking(job, top=2).limits if line.startswith("searched orders: ")]
    monkeypatch.setattr(order_search, "MAX_SEARCHED", 1)
    (line,) = planned_ranking(job, top=4).limits
    assert line.startswith("searched orders: only for the best 1 of ")
    monkeypatch.setattr(order_search, "MAX_PLANNED_ACTIONS", 1)
    ranking = planned_ranking(job, top=4)
    assert all(ranked.order is None for ranked in ranking.best)
    (line,) = ranking.limits
    assert line == "searched orders: none for 4 of the best 4 plans, whose steps have more than 1 actions"
    assert planned_ranking(job, top=2, has_search=False).limits == ()
