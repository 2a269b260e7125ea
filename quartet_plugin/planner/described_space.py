"""The space of a described job, in which a study begins with the plans of `quartet plan`.

Layouts are enumerated by the same knobs as those that are ranked, so the space holds every ranked plan.
"""

from dataclasses import replace

from quartet_plugin.cost.constants import Constants, fitted
from quartet_plugin.errors import InfeasibleError
from quartet_plugin.mapping.orders import first_equal, slots_of
from quartet_plugin.model.plan import Mapping, Plan, Slot
from quartet_plugin.planner.candidate_plans import candidate_of
from quartet_plugin.planner.described_job import description_of
from quartet_plugin.planner.described_rules import described_search, training_job_of
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.order_search import planned_ranking
from quartet_plugin.planner.plans import plain_layout
from quartet_plugin.planner.ranking import Ranked
from quartet_plugin.planner.table_schedules import KINDS
from quartet_plugin.space.config import TABLE_SCHEDULES
from quartet_plugin.space.param_sources import Params
from quartet_plugin.space.plan_space import Space, build_space


def space_of(
    job: PlanRequest, *, run: str = "plan", seed: int = 0, constants: Constants | None = None
) -> Space:
    """All plans of a described job; its baseline is the plain layout that `quartet plan` compares with.

    Raises InfeasibleError where no layout is legal or none fits.
    """
    plain = plain_layout(job, constants=constants)
    space = build_space(
        training_job_of(job, layout=plain.layout, split=plain.stage_split),
        nodes=job.nodes,
        search=described_search(job),
        run=run,
        seed=seed,
        is_planned=True,
        scale_up_devices=job.largest_tensor_parallel,
    )
    made_for = replace(
        space.baseline.made_for,
        job=description_of(job),
        batching_features=job.batching_features or None,
    )
    return replace(space, baseline=replace(space.baseline, made_for=made_for))


def first_plans(
    space: Space, job: PlanRequest, *, top: int, constants: Constants | None = None
) -> list[tuple[Params, Plan]]:
    """The plans that are tried first while nothing is measured: those of `quartet plan`, in its order.

    Each with the parameters that lead to it; none where no layout is predicted to fit. Searched orders are
    left to trials: they are made for measured costs.
    """
    try:
        ranking = planned_ranking(job, top=top, has_search=False, constants=constants or fitted())
    except InfeasibleError:
        return []
    plans = (plan_in_space(space, ranked) for ranked in ranking.best)
    return [made for made in plans if made is not None]


def plan_in_space(space: Space, ranked: Ranked) -> tuple[Params, Plan] | None:
    """The parameters of a ranked plan, and the plan; None where the space does not hold it."""
    slots = slots_of(space.nodes)
    order = slots if ranked.slots is None else tuple(slots[slot] for slot in ranked.slots)
    made = _with_order(space, ranked, order)
    # Of orders that only exchange replicas a space of few processes has the first.
    return made or _with_order(space, ranked, first_equal(order, layout=ranked.layout))


def _with_order(space: Space, ranked: Ranked, order: tuple[Slot, ...]) -> tuple[Params, Plan] | None:
    index = list(KINDS).index(ranked.schedule)
    return candidate_of(
        space,
        ranked.shape,
        ranked.layout,
        schedule=TABLE_SCHEDULES[index],
        group=ranked.group,
        split=ranked.split,
        is_mtp_before_last=ranked.is_mtp_before_last,
        mapping=Mapping(slots=order),
    )
