"""The predicted timeline of a plan's step: its schedule and its stages' costs, simulated."""

import math
from typing import TYPE_CHECKING

import numpy as np

from quartet_plugin.cost.iteration.orders import folded
from quartet_plugin.model.costs import StageCosts
from quartet_plugin.model.plan import Plan
from quartet_plugin.report.gantt import MAX_ACTIONS, step_words
from quartet_plugin.schedule.choice import RelativeCosts, generated, relative_costs, written_of
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.split.layers import flops_end_loads, flops_mtp_load

if TYPE_CHECKING:
    from quartet_plugin.schedule.simulate import Simulation

_ACTIONS_A_MICROBATCH = 3


def simulated_plan(plan: Plan, *, iteration_s: float) -> "tuple[Schedule, Simulation, str] | None":
    """The plan's schedule, its simulation, and a caption without the label; None without a pipeline.

    Stages cost what a custom schedule says, and in proportion to their FLOPs under a stock one;
    `iteration_s`, the measured time of all microbatches, sets the scale. Of many microbatches the first are
    drawn.
    """
    from quartet_plugin.schedule.simulate import simulate

    if plan.layout.pipeline_parallel == 1:
        return None
    custom = plan.schedule.custom
    relative = flop_costs(plan) if custom is None else relative_costs(custom)
    makespan, bubble = _whole_step(plan, relative)
    if makespan <= 0:
        return None
    schedule = _scheduled(plan, _num_drawn(plan))
    simulation = simulate(schedule, relative.scaled(unit_s=iteration_s / makespan))
    origin = (
        "are those stored in the plan"
        if custom is not None
        else "are in proportion to FLOPs (`quartet explain` has the fitted ones)"
    )
    step = step_words(iteration_s, bubble_fraction=bubble)
    words = f"{step}: stage times {origin}, scaled to the measured iteration"
    if schedule.num_microbatches < plan.num_microbatches:
        words += f"; {schedule.num_microbatches} of {plan.num_microbatches} microbatches"
    return schedule, simulation, words


def _whole_step(plan: Plan, relative: RelativeCosts) -> tuple[float, float]:
    """The makespan of all microbatches, in the unit of `relative`, and the bubble.

    An order that repeats is simulated for fewer, as the cost model does, and extrapolated.
    """
    from quartet_plugin.schedule.simulate import bubble_fraction, simulate

    devices, custom = plan.layout.pipeline_parallel, plan.schedule.custom
    parts = [(plan.num_microbatches, 1.0)]
    if custom is None or custom.orders is None:
        parts = folded(plan.num_microbatches, unit=math.lcm(devices, plan.schedule.group or 1))
    simulations = [(simulate(_scheduled(plan, count), relative.ratios), weight) for count, weight in parts]
    makespan = sum(weight * simulation.makespan_s for simulation, weight in simulations)
    busy = sum(weight * float(simulation.busy_s.sum()) for simulation, weight in simulations)
    return makespan, bubble_fraction(busy, makespan_s=makespan, num_devices=devices)


def _num_drawn(plan: Plan) -> int:
    """Microbatches of which every action is drawn; an order that is written out has its own number."""
    custom, devices = plan.schedule.custom, plan.layout.pipeline_parallel
    if custom is not None and custom.orders is not None:
        return plan.num_microbatches
    most = max(1, MAX_ACTIONS // (_ACTIONS_A_MICROBATCH * plan.layout.num_stages))
    count = min(plan.num_microbatches, most)
    return max(devices, count - count % devices) if plan.schedule.name == "interleaved" else count


def _scheduled(plan: Plan, num_microbatches: int) -> Schedule:
    custom = plan.schedule.custom
    written = written_of(custom, num_microbatches=num_microbatches) if custom is not None else None
    return written or generated(plan.schedule, layout=plan.layout, num_microbatches=num_microbatches)


def flop_costs(plan: Plan) -> RelativeCosts:
    """Stage costs in units of a layer's forward: the split's layers, the embedding and the head."""
    weights = flops_end_loads(plan.shape, mtp_layers=plan.made_for.mtp_layers)
    loads = np.array(plan.split.transformer_layers_per_stage, dtype=np.float64)
    loads[0] += weights.embedding
    loads[-1] += weights.head
    if plan.split.mtp_before_last:
        further = (plan.made_for.mtp_layers or 0) * flops_mtp_load(plan.shape)
        loads[-2:] += further, -further
    forward_again = loads if plan.layout.recompute == "full" else np.zeros_like(loads)
    num_stages, devices = plan.layout.num_stages, plan.layout.pipeline_parallel
    ratios = StageCosts(
        device_of_stage=np.arange(num_stages, dtype=np.int64) % devices,
        forward_s=loads,
        input_grad_s=loads + forward_again,
        weight_grad_s=loads,
        backward_s=2 * loads + forward_again,
        activation_bytes=loads,
        forward_transfer_s=np.zeros(num_stages),
        backward_transfer_s=np.zeros(num_stages),
        held_fraction=1.0,
    )
    return RelativeCosts(ratios)
