"""One enumeration: a study of a described job begins with the plans of `quartet plan`, in the same order."""

from dataclasses import replace

import optuna
import pytest

from quartet_plugin.errors import InfeasibleError
from quartet_plugin.mapping.orders import first_equal, slots_of
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan
from quartet_plugin.planner.described_space import space_of
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.layout_table import layout_table_of
from quartet_plugin.planner.order_search import planned_ranking
from quartet_plugin.planner.ranking import Ranked
from quartet_plugin.planner.table_schedules import KINDS
from quartet_plugin.space.config import SEARCHED, TABLE_SCHEDULES
from quartet_plugin.space.plan_space import Space
from quartet_plugin.study.plan_sampler import PlanSampler, suggest_plan
from tests.planner.planning import random_job

# Jobs of the property, and those of them that are tried each time: two have unequal devices, one has custom
# orders on two stages with splits that no end loads make together with the order, the last has plans of one
# copy beside a baseline whose optimizer is sharded.
NUM_JOBS, SAMPLED = 200, (0, 2, 5, 8, 18, 106, 130)
TOP = 20


# With one copy of the model an optimizer that is sharded is as one that is not: a study has the baseline's
# value, a table none.
def effective_layout(layout: Layout) -> Layout:
    has_copies = layout.data_parallel * layout.context_parallel > 1
    return replace(layout, distributed_optimizer=layout.distributed_optimizer and has_copies)


# Orders of ranks that only exchange replicas, or ranks of a TP group, are one order.
def parts_of_plan(plan: Plan) -> tuple[object, ...]:
    custom = plan.schedule.custom
    name = plan.schedule.name if custom is None else custom.named
    counts = plan.split.transformer_layers_per_stage
    order = first_equal(plan.mapping.slots, layout=plan.layout)
    return plan.shape, effective_layout(plan.layout), name, plan.schedule.group, counts, order


def parts_of_ranked(job: PlanRequest, ranked: Ranked) -> tuple[object, ...]:
    slots = slots_of(job.nodes)
    order = slots if ranked.slots is None else tuple(slots[slot] for slot in ranked.slots)
    name = TABLE_SCHEDULES[KINDS.index(ranked.schedule)]
    order = first_equal(order, layout=ranked.layout)
    return ranked.shape, effective_layout(ranked.layout), name, ranked.group, ranked.split, order


def first_proposals(space: Space, job: PlanRequest, num: int) -> list[Plan]:
    """What an Optuna study proposes of which no trial is measured."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=PlanSampler(space, job=job))
    plans = []
    for _ in range(num):
        trial = study.ask()
        plans.append(suggest_plan(trial, space))
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    return plans


def begins_with_the_plans(seed: int) -> bool:
    """Whether a study of a job begins with its plans; a job without any does."""
    job = random_job(seed)
    try:
        ranking = planned_ranking(job, top=TOP, has_search=False)
    except InfeasibleError:
        return True
    proposals = first_proposals(space_of(job), job, len(ranking.best))
    return [parts_of_plan(plan) for plan in proposals] == [
        parts_of_ranked(job, ranked) for ranked in ranking.best
    ]


@pytest.mark.parametrize("seed", SAMPLED)
def test_a_study_without_measurements_begins_with_the_plans(seed: int) -> None:
    assert begins_with_the_plans(seed)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_200_studies_without_measurements_begin_with_the_plans() -> None:
    assert [seed for seed in range(NUM_JOBS) if not begins_with_the_plans(seed)] == []


@pytest.mark.parametrize("seed", [100, 101, 102])
def test_the_space_and_the_table_hold_the_same_layouts_and_schedules(seed: int) -> None:
    job = random_job(seed)
    table, space = layout_table_of(job, job.shape), space_of(job)
    ranked = {
        (table.layout(row), TABLE_SCHEDULES[KINDS.index(table.schedule(row))]) for row in range(len(table))
    }
    tried = {
        (layout, name)
        for layout in space.layouts[job.shape]
        for name in space.schedules_of(layout, shape=job.shape)
        if name != SEARCHED
    }
    assert tried == ranked
