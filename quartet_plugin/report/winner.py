"""The predicted timeline of a plan's step: its schedule and its stages' costs, simulated."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from quartet_plugin.model.costs import StageCosts
from quartet_plugin.model.plan import Plan
from quartet_plugin.report.gantt import MAX_ACTIONS
from quartet_plugin.schedule.choice import costs_of, generated, written_of
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.split.layers import flops_end_loads

if TYPE_CHECKING:
    from quartet_plugin.schedule.simulate import Simulation

_ACTIONS_A_MICROBATCH = 3


def simulated_plan(plan: Plan, *, iteration_s: float | None) -> "tuple[Schedule, Simulation, str] | None":
    """The plan's schedule, its simulation, and the origin of its times in words; None without a pipeline.

    A custom schedule has the costs that its plan carries. For a stock schedule, stages cost in proportion to
    their FLOPs, and the measured `iteration_s` (seconds) sets the scale. Of many microbatches the first are
    drawn.
    """
    from quartet_plugin.schedule.simulate import simulate

    num_stages = plan.layout.num_stages
    count = min(plan.num_microbatches, max(1, MAX_ACTIONS // (_ACTIONS_A_MICROBATCH * num_stages)))
    if plan.layout.pipeline_parallel == 1:
        return None
    custom = plan.schedule.custom
    if custom is not None:
        if custom.orders is not None:
            schedule = written_of(custom, num_microbatches=plan.num_microbatches)
        else:
            schedule = generated(plan.schedule, layout=plan.layout, num_microbatches=count)
        if schedule is None:
            return None
        simulation = simulate(schedule, costs_of(custom))
        return schedule, simulation, _shown(plan, schedule, "stage times are those the plan carries")
    devices = plan.layout.pipeline_parallel
    count = max(devices, count - count % devices) if plan.schedule.name == "interleaved" else count
    schedule = generated(plan.schedule, layout=plan.layout, num_microbatches=count)
    costs = flop_costs(plan)
    simulation = simulate(schedule, costs)
    words = "stage times are in proportion to FLOPs, transfers left out"
    if iteration_s is not None and simulation.makespan_s > 0 and count == plan.num_microbatches:
        simulation = simulate(schedule, _scaled(costs, iteration_s / simulation.makespan_s))
        words += ", scaled to the measured iteration"
    return schedule, simulation, _shown(plan, schedule, words)


def flop_costs(plan: Plan) -> StageCosts:
    """Stage costs in units of a layer's forward: the split's layers, the embedding and the head."""
    weights = flops_end_loads(plan.shape)
    loads = np.array(plan.split.transformer_layers_per_stage, dtype=np.float64)
    loads[0] += weights.embedding
    loads[-1] += weights.head
    forward_again = loads if plan.layout.recompute == "full" else np.zeros_like(loads)
    num_stages, devices = plan.layout.num_stages, plan.layout.pipeline_parallel
    return StageCosts(
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


def _scaled(costs: StageCosts, factor: float) -> StageCosts:
    names = ("forward_s", "input_grad_s", "weight_grad_s", "backward_s")
    return replace(costs, **{name: getattr(costs, name) * factor for name in names})


def _shown(plan: Plan, schedule: Schedule, words: str) -> str:
    if schedule.num_microbatches == plan.num_microbatches:
        return words
    return f"{words}; {schedule.num_microbatches} of {plan.num_microbatches} microbatches"
