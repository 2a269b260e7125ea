"""Shortens orders of a fixed placement and split, by insertion or exactly, and tests them under noise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quartet_plugin.errors import InfeasibleError
from quartet_plugin.model.costs import Costs, FloatArray
from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.exact import ExactResult, exact_optimum
from quartet_plugin.schedule.kernel import NO_PARTS, run_orders
from quartet_plugin.schedule.schedule import CodeArray, Schedule
from quartet_plugin.schedule.search.insertion import improve_orders
from quartet_plugin.schedule.search.problem import ScheduleProblem
from quartet_plugin.schedule.simulate import flatten, lanes_of, one_route

MAX_ACTIONS_POLISHED = 200
# A pass of width w keeps w orders a level and looks at about three actions of each.
WIDTHS = (20, 200, 2_000, 20_000)
EVALUATIONS_A_WIDTH = 3
# Paired draws of the costs, each off by up to a tenth: what profiling cannot tell apart.
NUM_DRAWS = 64
SPREAD = 0.1


def is_small(schedule: Schedule) -> bool:
    """Whether branch and bound is worth its time."""
    return sum(map(len, schedule.orders)) <= MAX_ACTIONS_POLISHED


def exact_order(
    schedule: Schedule, problem: ScheduleProblem, *, widths: Sequence[int], time_limit_s: float
) -> ExactResult | None:
    """The best order with the placement, split and forms of backward of `schedule`.

    None when time or width do not suffice for any.
    """
    assert schedule.layers_per_stage is not None
    codes = np.concatenate(schedule.orders)
    full_backward = np.isin(
        np.arange(schedule.num_stages), (codes >> 2)[(codes & 3) == ActionKind.B] // schedule.num_microbatches
    )
    try:
        optimum = exact_optimum(
            problem.costs,
            placement=schedule.placement,
            layers_per_stage=schedule.layers_per_stage,
            split_backward=(~full_backward).tolist(),
            time_limit_s=time_limit_s,
            widths=widths,
        )
    except InfeasibleError:
        return None
    return replace(optimum, schedule=_reordered(schedule, optimum.schedule.orders))


def improve_by_insertion(
    start: tuple[Schedule, int], seed: int, *, problem: ScheduleProblem, target: float
) -> tuple[tuple[float, Schedule], Schedule]:
    """The best order with its makespan, and the last one, after some steps of insertion from a schedule.

    `start` is the schedule and the number of steps.
    """
    schedule, steps = start
    assert schedule.layers_per_stage is not None
    costs = problem.stage_costs(schedule.placement, schedule.layers_per_stage)
    orders, offsets = flatten(schedule)
    best = np.empty_like(orders)
    limit = problem.limit_bytes * (1 + 1e-12)
    score = improve_orders(orders, offsets, lanes_of(schedule, costs), limit, steps, target, seed, best)
    best_schedule, last = (_reordered(schedule, np.split(codes, offsets[1:-1])) for codes in (best, orders))
    return (float(score), best_schedule), last


def _reordered(schedule: Schedule, orders: Sequence[CodeArray]) -> Schedule:
    return replace(schedule, orders=tuple(orders), origin={**schedule.origin, "inserted": True})


@dataclass(frozen=True, slots=True)
class NoisyCosts:
    """Paired draws: `prefix[k, kind, device]`, cumulated seconds over layers with slowdown applied."""

    costs: Costs
    prefix: FloatArray

    @classmethod
    def draw(cls, costs: Costs, rng: np.random.Generator, *, num_draws: int = NUM_DRAWS) -> "NoisyCosts":
        """Every (layer, kind, device) cost times U(0.9, 1.1)."""
        base = np.array([[x.forward_s, x.input_grad_s, x.weight_grad_s] for x in costs.layers]).T
        num_layers, num_devices = len(costs.layers), costs.num_devices
        factor = rng.uniform(1 - SPREAD, 1 + SPREAD, (num_draws, 4, num_devices, num_layers))
        seconds = np.empty_like(factor)
        seconds[:, :3] = factor[:, :3] * base[None, :, None, :]
        if costs.backward_fused_s is None:
            seconds[:, 3] = seconds[:, 1] + seconds[:, 2]
        else:
            seconds[:, 3] = factor[:, 3] * np.array(costs.backward_fused_s)
        seconds *= costs.device_slowdown[None, None, :, None]
        zero = np.zeros((num_draws, 4, num_devices, 1))
        return cls(costs, np.concatenate((zero, np.cumsum(seconds, axis=3)), axis=3))

    def mean_makespan(self, schedule: Schedule) -> float:
        """The mean over the draws, order and split fixed."""
        assert schedule.layers_per_stage is not None
        device = np.array(schedule.placement, dtype=np.int64)
        edges = np.concatenate(([0], np.cumsum(schedule.layers_per_stage)))
        seconds = self.prefix[:, :, device, edges[1:]] - self.prefix[:, :, device, edges[:-1]]
        transfer = self.costs.transfer_s
        send = np.zeros((2, len(device)))
        send[0, :-1] = transfer[device[:-1], device[1:]]
        send[1, 1:] = transfer[device[1:], device[:-1]]
        orders, offsets = flatten(schedule)
        lanes = one_route(schedule.placement, schedule.num_microbatches)
        total = 0.0
        for draw in np.ascontiguousarray(seconds):
            _, _, end, _ = run_orders(orders, offsets, NO_PARTS, lanes._replace(cost_s=draw, send_s=send))
            total += float(end.max())
        return total / len(seconds)
