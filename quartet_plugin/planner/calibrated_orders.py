"""Orders searched with the calibrated costs of the custom schedules that are predicted to be fastest.

Split, placement and mapping of a plan stay. The costs are rounded to steps, so that an order is searched anew
only where a cost has left its step, and so that an order follows from the finished trials alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from quartet_plugin.cost.iteration.orders import device_of_stages
from quartet_plugin.cost.iteration.replay import both_ways
from quartet_plugin.cost.iteration.split_model import CalibratedSplits, SlotOrder
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.cost.times import Times
from quartet_plugin.errors import InfeasibleError
from quartet_plugin.mapping.orders import slot_indices
from quartet_plugin.model.costs import Costs, FloatArray
from quartet_plugin.model.custom_schedule import CustomSchedule
from quartet_plugin.model.plan import Plan
from quartet_plugin.planner.order_search import SimulatedTimes, best_order, order_costs
from quartet_plugin.schedule.placement import Placement
from quartet_plugin.space.plan_space import Space

# Orders that are kept from one call to the next.
MAX_KEPT = 512
# Times are rounded to steps of this part of themselves; those far below SMALL, in means of all actions, to
# equal steps of SMALL * STEP. Limits are rounded down to this part of the fullest device's microbatch.
STEP, SMALL, MEMORY_STEP = 0.05, 0.2, 0.25

SplitsOf = Callable[[Plan], CalibratedSplits | None]
RunOf = Callable[[Plan], TrainingRun]
LimitsOf = Callable[[Plan], FloatArray | None]


class CalibratedOrders:
    """Searches orders, and keeps those of the costs that come again.

    The calibrated model is read by `splits_of`, a plan's split model, `run_of`, the run that stands for it,
    and `limits_of`, the bytes of activations that each of its devices has room for.
    """

    def __init__(self, space: Space, *, splits_of: SplitsOf, run_of: RunOf, limits_of: LimitsOf) -> None:
        self._space = space
        self._splits_of, self._run_of, self._limits_of = splits_of, run_of, limits_of
        self._kept: dict[object, CustomSchedule | None] = {}

    def of(self, plan: Plan) -> CustomSchedule | None:
        """The best order for the split, placement and mapping of a custom plan; None where there is none."""
        calibrated = self._splits_of(plan)
        if calibrated is None:
            return None
        run = self._run_of(plan)
        placement = device_of_stages(run)
        times = simulated_times(calibrated, plan, slots=slot_indices(self._space.nodes, plan.mapping))
        costs = order_costs(run, times, memory_limit_bytes=self._limits_of(plan))
        return self._order_of(rounded(costs, placement), placement)

    def _order_of(self, costs: Costs, placement: Placement) -> CustomSchedule | None:
        key = (placement, _key_of(costs))
        if key not in self._kept:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            try:
                limits = self._space.search.family_limits
                best = best_order(costs, placement, seed=self._space.seed, limits=limits)
                self._kept[key] = best.custom
            except InfeasibleError:
                self._kept[key] = None
        return self._kept[key]


def simulated_times(calibrated: CalibratedSplits, plan: Plan, *, slots: SlotOrder) -> SimulatedTimes:
    """The calibrated times of the plan's stages on these slots, and its transfers."""
    times = calibrated.times(slots, plan.mapping)
    work = np.maximum(0.0, times.action_s(plan.split.transformer_layers_per_stage))
    forward_s, backward_s = both_ways(times.sends_s)
    stages = [Times(*stage) for stage in work.T.tolist()]
    return SimulatedTimes(stages=stages, forward_s=forward_s, backward_s=backward_s)


def rounded(costs: Costs, placement: Sequence[int]) -> Costs:
    """The cost table without units, rounded to steps.

    Where nothing limits activations, the limit is what ZB-H2 holds, about two pipelines of microbatches.
    """
    times = [(layer.forward_s, layer.input_grad_s, layer.weight_grad_s) for layer in costs.layers]
    unit_s = float(np.mean(times)) or 1.0
    held = np.bincount(
        np.asarray(placement),
        weights=[layer.activation_bytes for layer in costs.layers],
        minlength=costs.num_devices,
    )
    unit_bytes = float(held.max()) or 1.0
    most = min(costs.num_microbatches, 2 * costs.num_devices - 1)
    limits = np.full(costs.num_devices, float(most))
    if costs.memory_limit_bytes is not None:
        steps = np.floor(costs.memory_limit_bytes / (unit_bytes * MEMORY_STEP))
        limits = np.minimum(costs.num_microbatches, steps * MEMORY_STEP)
    return replace(
        costs,
        layers=tuple(
            replace(
                layer,
                forward_s=_rounded(layer.forward_s / unit_s),
                input_grad_s=_rounded(layer.input_grad_s / unit_s),
                weight_grad_s=_rounded(layer.weight_grad_s / unit_s),
                activation_bytes=round(layer.activation_bytes / unit_bytes, 6),
            )
            for layer in costs.layers
        ),
        transfer_s=np.vectorize(_rounded)(costs.transfer_s / unit_s),
        memory_limit_bytes=limits,
        weight_grad_held_fraction=round(costs.weight_grad_held_fraction, 3),
    )


def _rounded(time: float) -> float:
    """The time at the middle of its step: steps of the inverse hyperbolic sine, which ends as a logarithm."""
    return float(SMALL * np.sinh(STEP * round(float(np.arcsinh(time / SMALL)) / STEP)))


def _key_of(costs: Costs) -> object:
    assert costs.memory_limit_bytes is not None
    return (
        costs.layers,
        costs.num_microbatches,
        costs.transfer_s.tobytes(),
        costs.memory_limit_bytes.tobytes(),
        costs.weight_grad_held_fraction,
    )
