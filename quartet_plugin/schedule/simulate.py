"""What a schedule costs: times of every action, makespan, period, bubble and peak activation memory.

A device runs its list in order, one action at a time. A transfer starts when its producer ends and
occupies nobody. `activation_bytes` are taken at the start of F; the end of I frees all but the held
fraction, the end of W the rest; the end of B frees all. A pair takes its forward's activations while those
of its backward are held.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from quartet_plugin.errors import PlanError
from quartet_plugin.model.costs import Costs, FloatArray, IntArray, StageCosts, stage_costs
from quartet_plugin.schedule import kernel
from quartet_plugin.schedule.action import Action
from quartet_plugin.schedule.kernel import Lanes
from quartet_plugin.schedule.schedule import PartArray, Schedule, marked_parts
from quartet_plugin.schedule.table import refusal
from quartet_plugin.schedule.validate import check_pairs, validate

_PERIOD_ROUNDS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The outcome of a simulation.

    `period_s` is the steady interval when the lists repeat without a barrier. `bubble_fraction` is
    1 - sum(busy_s) / (num_devices * makespan_s). `peak_activation_bytes` and `busy_s` are [num_devices];
    `start_s[d]` and `end_s[d]` are aligned with the schedule's `orders[d]`; both parts of a pair have the
    pair's times.
    """

    makespan_s: float
    period_s: float
    bubble_fraction: float
    peak_activation_bytes: FloatArray
    busy_s: FloatArray
    start_s: tuple[FloatArray, ...]
    end_s: tuple[FloatArray, ...]


def lanes_of_stages(costs: Sequence[StageCosts], route: IntArray) -> Lanes:
    """The kernels' view of the stage costs of one route, or of two; `route` [num_microbatches]."""

    def join(name: str) -> FloatArray:
        return np.concatenate([getattr(c, name) for c in costs])

    return Lanes(
        num_stages=costs[0].num_stages,
        num_microbatches=len(route),
        device=np.concatenate([c.device_of_stage for c in costs]),
        cost_s=np.stack([join(f"{k}_s") for k in ("forward", "input_grad", "weight_grad", "backward")]),
        send_s=np.stack([join("forward_transfer_s"), join("backward_transfer_s")]),
        num_bytes=join("activation_bytes"),
        held_fraction=float(costs[0].held_fraction),
        route=route,
        exchange_s=np.concatenate(
            [np.zeros((2, c.num_stages)) if c.exchange_s is None else c.exchange_s for c in costs], axis=1
        ),
    )


def one_route(placement: Sequence[int], num_microbatches: int) -> Lanes:
    """The lanes of one copy of the model, all costs 0, for callers that put theirs there."""
    num_stages = len(placement)
    return Lanes(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        device=np.array(placement, dtype=np.int64),
        cost_s=np.zeros((4, num_stages)),
        send_s=np.zeros((2, num_stages)),
        num_bytes=np.zeros(num_stages),
        held_fraction=0.0,
        route=np.zeros(num_microbatches, dtype=np.int64),
        exchange_s=np.zeros((2, num_stages)),
    )


def flatten(schedule: Schedule) -> tuple[IntArray, IntArray]:
    """All orders in one array, and where each device's begins [num_devices + 1]."""
    offsets = np.concatenate(([0], np.cumsum([len(order) for order in schedule.orders]))).astype(np.int64)
    return np.concatenate(schedule.orders, dtype=np.int64), offsets


def lanes_of(schedule: Schedule, costs: StageCosts, other_route: StageCosts | None = None) -> Lanes:
    """The kernels' view of `costs`; a two-copy schedule also needs its second route's costs.

    Raises PlanError when the stages or devices do not match the schedule's.
    """
    routes = (schedule.placement,) if schedule.routes is None else schedule.routes
    stages_of_routes = (costs,) if other_route is None else (costs, other_route)
    if len(stages_of_routes) != len(routes):
        raise PlanError(
            f"{len(stages_of_routes)} stage costs for {len(routes)} routes; give one for each copy of the "
            "model"
        )
    for placement, stages in zip(routes, stages_of_routes, strict=True):
        if tuple(stages.device_of_stage.tolist()) != tuple(placement):
            raise PlanError(
                f"stage costs are for placement {stages.device_of_stage.tolist()[:16]}, the schedule has "
                f"{list(placement)[:16]}; compute them with the schedule's own placement"
            )
    num_microbatches = schedule.num_microbatches
    if schedule.routes is None:
        return lanes_of_stages(stages_of_routes, np.zeros(num_microbatches, dtype=np.int64))
    chosen = schedule.route_of_microbatch
    if chosen is None or len(chosen) != num_microbatches or not set(chosen) <= {0, 1}:
        raise PlanError("route_of_microbatch: a schedule with two routes needs a 0 or 1 for every microbatch")
    return lanes_of_stages(stages_of_routes, np.asarray(chosen, dtype=np.int64))


def simulate(
    schedule: Schedule,
    costs: StageCosts,
    *,
    memory_limit_bytes: FloatArray | None = None,
    other_route: StageCosts | None = None,
) -> Simulation:
    """Run `schedule` as soon as possible under `costs`.

    `memory_limit_bytes` is [num_devices] and for activations only. `other_route` holds the costs of the
    second copy of a two-copy schedule. Raises PlanError, with the table and the offending cell, when an
    action is unknown, misplaced, doubled or missing, when the lists deadlock, or when memory does not fit.
    """
    lanes = lanes_of(schedule, costs, other_route)
    orders, offsets = flatten(schedule)
    is_whole = len(schedule.orders) == schedule.num_devices
    if not (is_whole and kernel.are_complete(orders, offsets, lanes)):
        validate(schedule)
    check_pairs(schedule)
    parts = marked_parts(schedule)
    limit = np.full(schedule.num_devices, np.inf) if memory_limit_bytes is None else memory_limit_bytes
    peak = np.zeros(schedule.num_devices)
    device, index = kernel.check_memory(orders, offsets, lanes, limit, peak)
    if device >= 0:
        action = Action.decode(int(schedule.orders[device][index]), schedule.num_microbatches)
        reason = f"{action} on device {device} exceeds its limit of {limit[device]:g} bytes of activations"
        raise refusal(schedule, reason, mark=(device, index))
    ran, start, end, sequence = kernel.run_orders(orders, offsets, parts, lanes)
    if ran < len(orders):
        validate(schedule)
    period = kernel.steady_period(orders, offsets, parts, sequence, lanes, _PERIOD_ROUNDS)
    return _summary(offsets, parts, start, end, peak, float(period))


def action_times(schedule: Schedule, costs: StageCosts) -> tuple[list[FloatArray], list[FloatArray]]:
    """As-soon-as-possible start and end of every action in seconds, [device][index]; nothing is checked.

    Forwards alone are allowed too. Raises PlanError when the devices wait for one another.
    """
    orders, offsets = flatten(schedule)
    parts = marked_parts(schedule)
    ran, start, end, _ = kernel.run_orders(orders, offsets, parts, lanes_of(schedule, costs))
    if ran < len(orders):
        raise PlanError(f"deadlock: the devices stop after {ran} of {len(orders)} actions; reorder them")
    return np.split(start, offsets[1:-1]), np.split(end, offsets[1:-1])


def simulate_costs(schedule: Schedule, costs: Costs) -> Simulation:
    """`simulate` straight from a cost table: split, both routes and the memory limit included.

    Raises PlanError like `simulate`, and when the schedule is for other devices or microbatches.
    """
    if (schedule.num_devices, schedule.num_microbatches) != (costs.num_devices, costs.num_microbatches):
        raise PlanError(
            f"the schedule is for {schedule.num_devices} devices x {schedule.num_microbatches} microbatches, "
            f"the costs for {costs.num_devices} x {costs.num_microbatches}; use matching files"
        )
    if schedule.layers_per_stage is None:
        raise PlanError("layers_per_stage: missing; a schedule without a split cannot be given costs")
    routes = (schedule.placement,) if schedule.routes is None else schedule.routes
    stages = [stage_costs(costs, placement=r, layers_per_stage=schedule.layers_per_stage) for r in routes]
    return simulate(
        schedule,
        stages[0],
        memory_limit_bytes=costs.memory_limit_bytes,
        other_route=stages[1] if len(stages) == 2 else None,
    )


def bubble_fraction(busy_s: float, *, makespan_s: float, num_devices: int) -> float:
    """The part of the devices' time in which they run no action; `busy_s` is the sum over the devices."""
    return max(0.0, 1.0 - busy_s / (num_devices * makespan_s)) if makespan_s > 0 else 0.0


def _summary(
    offsets: IntArray, parts: PartArray, start: FloatArray, end: FloatArray, peak: FloatArray, period: float
) -> Simulation:
    devices = [slice(a, b) for a, b in pairwise(offsets.tolist())]
    # Both parts of a pair have its times.
    lasting = np.where(parts == 2, 0.0, end - start) if len(parts) else end - start
    busy = np.diff(np.concatenate(([0.0], np.cumsum(lasting)))[offsets])
    makespan = float(end.max()) if len(end) else 0.0
    return Simulation(
        makespan_s=makespan,
        period_s=period,
        bubble_fraction=bubble_fraction(float(busy.sum()), makespan_s=makespan, num_devices=len(devices)),
        peak_activation_bytes=peak,
        busy_s=busy,
        start_s=tuple(start[device] for device in devices),
        end_s=tuple(end[device] for device in devices),
    )
