"""What shortens one order, its placement and split fixed: insertion, and the exact optimum of small ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quartet_plugin.errors import InfeasibleError
from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.exact import exact_optimum
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.search.insertion import improve_orders
from quartet_plugin.schedule.search.problem import ScheduleProblem
from quartet_plugin.schedule.simulate import flatten

MAX_ACTIONS_POLISHED = 200
# A pass of width w keeps w orders a level and looks at about three actions of each.
WIDTHS = (20, 200, 2_000, 20_000)
EVALUATIONS_A_WIDTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Polished:
    """A schedule that branch and bound found; `is_proven` when no order of the same form is shorter."""

    schedule: Schedule
    makespan_s: float
    is_proven: bool


def is_small(schedule: Schedule) -> bool:
    """Whether branch and bound is worth its time."""
    return sum(map(len, schedule.orders)) <= MAX_ACTIONS_POLISHED


def widths_within(evaluations: int | None) -> tuple[int, ...]:
    """The passes that so many evaluations pay for; all when seconds count."""
    if evaluations is None:
        return WIDTHS
    return tuple(width for width in WIDTHS if width * EVALUATIONS_A_WIDTH <= evaluations)


def polished(
    schedule: Schedule, problem: ScheduleProblem, *, widths: Sequence[int], time_limit_s: float
) -> Polished | None:
    """The best order with the placement, split and forms of backward of `schedule`; None if none is found."""
    assert schedule.layers_per_stage is not None
    codes = np.concatenate(schedule.orders)
    whole = np.isin(
        np.arange(schedule.num_stages), (codes >> 2)[(codes & 3) == ActionKind.B] // schedule.num_microbatches
    )
    try:
        found = exact_optimum(
            problem.costs,
            placement=schedule.placement,
            layers_per_stage=schedule.layers_per_stage,
            split_backward=(~whole).tolist(),
            time_limit_s=time_limit_s,
            widths=widths,
        )
    except InfeasibleError:
        return None
    origin = dict(schedule.origin) | {"inserted": True}
    return Polished(
        schedule=replace(schedule, orders=found.schedule.orders, origin=origin),
        makespan_s=found.makespan_s,
        is_proven=found.proven,
    )


def inserted(
    start: tuple[Schedule, int], seed: int, *, problem: ScheduleProblem, target: float
) -> tuple[tuple[float, Schedule], Schedule]:
    """The best order with its makespan, and the last one, after some steps of insertion."""
    schedule, steps = start
    assert schedule.layers_per_stage is not None
    costs = problem.stage_costs(schedule.placement, schedule.layers_per_stage)
    orders, offsets = flatten(schedule)
    best = np.empty_like(orders)
    score = improve_orders(
        orders,
        offsets,
        schedule.num_stages,
        schedule.num_microbatches,
        costs.device_of_stage,
        np.stack([costs.forward_s, costs.input_grad_s, costs.weight_grad_s, costs.backward_s]),
        np.stack([costs.forward_transfer_s, costs.backward_transfer_s]),
        costs.activation_bytes,
        costs.held_fraction,
        problem.limit_bytes * (1 + 1e-12),
        steps,
        target,
        seed,
        best,
    )
    origin = dict(schedule.origin) | {"inserted": True}
    parts = tuple(np.split(best, offsets[1:-1])), tuple(np.split(orders, offsets[1:-1]))
    best_schedule, last = (replace(schedule, orders=part, origin=origin) for part in parts)
    return (float(score), best_schedule), last
