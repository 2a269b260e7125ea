"""The time of a training at full size, from trials that had fewer replicas.

A trial keeps a replica as it is (its stages, its groups, its microbatches) and has fewer of them, so its
measured time holds all that happens inside of one. What it lacks is on the other side of a ratio: the
iteration model of the whole training over that of the trial, under the coefficients that the trials have
calibrated, and the wait for the slowest of more nodes. The model's errors that both sizes have in common
cancel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quartet_plugin.calibration.posterior import PosteriorSample
from quartet_plugin.cost.coefficients import MachineModel
from quartet_plugin.cost.iteration.cache import IterationModelCache
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.measurement import Interval
from quartet_plugin.model.plan import Plan

# The logarithm of the slowdown by waiting for the slowest of n nodes, over the root of n: the expected
# maximum of n delays whose tail falls with the square. Fitted to published pairs of runs that differ in the
# number of replicas alone (`benchmarks/weak_scaling.py`).
WAIT_A_ROOT_NODE = 0.0033
# The standard deviation of the logarithm that these pairs leave, over the root of the doublings.
SPREAD_A_ROOT_DOUBLING = 0.009
# What the prediction of one plan over another's keeps of it: most of it is the cluster's.
_SHARE_OF_ONE_PLAN = 0.5
_TWO_SIDED_95 = 1.96


def wait_for_nodes(num_nodes: float) -> float:
    """The logarithm of the slowdown of a training on `num_nodes` nodes over one on a single node."""
    return WAIT_A_ROOT_NODE * (math.sqrt(max(1.0, num_nodes)) - 1.0)


def scale_spread(factor: float) -> float:
    """The standard deviation of the logarithm of the time at `factor` times the nodes over the trial's."""
    return SPREAD_A_ROOT_DOUBLING * math.sqrt(max(0.0, math.log2(factor)))


def log_ratio(*, trial_s: float, full_s: float, num_nodes: float, num_full_nodes: float) -> float:
    """The logarithm of the time at full size over the trial's.

    `trial_s` and `full_s` are seconds by the model without any wait for the slowest node.
    """
    return math.log(full_s / trial_s) + wait_for_nodes(num_full_nodes) - wait_for_nodes(num_nodes)


def enlarged_machine(machine_model: MachineModel, *, factor: int) -> MachineModel:
    """The machine of `factor` times the nodes; the others are like the measured ones, in turns."""
    num_devices = machine_model.inter_node.num_devices * factor
    return replace(
        machine_model,
        nodes=machine_model.nodes * factor,
        intra_node=replace(
            machine_model.intra_node, num_devices=num_devices, scale_up_devices=max(num_devices, 1)
        ),
        inter_node=replace(machine_model.inter_node, num_devices=num_devices),
        slowdown_index_of_slot=np.tile(machine_model.slowdown_index_of_slot, factor),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """A trial's plan, the same with all replicas, and the trial's seconds an iteration.

    `spread` is the relative standard error of `iteration_s`.
    """

    plan: Plan
    full: Plan
    iteration_s: float
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSizePrediction:
    """Seconds an iteration of the whole training; `ratios` [samples] are logarithms of it over the trial's.

    `spread` is a standard deviation of the logarithm of `iteration_s`.
    """

    iteration_s: float
    spread: float
    ratios: FloatArray

    @property
    def interval(self) -> Interval:
        """The seconds with their 95 % interval."""
        return interval_of(math.log(self.iteration_s), self.spread)


class FullSizePredictor:
    """Predicts trainings of `factor` times the nodes that trials have, under the posterior of a study.

    Raises ConfigError for a machine whose nodes are of unequal size.
    """

    def __init__(
        self, machine_model: MachineModel, samples: Sequence[PosteriorSample], *, factor: int
    ) -> None:
        sizes = sorted({node.num_slots for node in machine_model.nodes})
        if len(sizes) > 1:
            raise ConfigError(f"nodes of {sizes[0]} and of {sizes[-1]} devices: must be equal at full size")
        self._trial = IterationModelCache(machine_model)
        self._full = IterationModelCache(enlarged_machine(machine_model, factor=factor))
        self._num_nodes, self._factor = len(machine_model.nodes), factor
        self._points = [sample.point for sample in samples]
        self._weights = np.array([sample.weight for sample in samples])

    def predict(self, measured: MeasuredPlan) -> FullSizePrediction:
        """The whole training's seconds. Raises QuartetError for an order that the model cannot predict."""
        trial, full = self._trial.of(measured.plan), self._full.of(measured.full)
        ratios = np.array(
            [
                log_ratio(
                    trial_s=trial.evaluate(point)[0] / trial.share,
                    full_s=full.evaluate(point)[0] / full.share,
                    num_nodes=self._num_nodes,
                    num_full_nodes=self._num_nodes * self._factor,
                )
                for point in self._points
            ]
        )
        mean, deviation = self._moments(ratios)
        return FullSizePrediction(
            iteration_s=measured.iteration_s * math.exp(mean),
            spread=math.hypot(deviation, scale_spread(self._factor), measured.spread),
            ratios=ratios,
        )

    def speedup(
        self, prediction: FullSizePrediction, *, baseline: FullSizePrediction, measured: Interval
    ) -> Interval:
        """The objective over the baseline's at full size, with its 95 % interval.

        `measured` is that of the trials. What both predictions have in common cancels.
        """
        mean, deviation = self._moments(baseline.ratios - prediction.ratios)
        in_trials = math.log(max(measured.high, measured.median) / min(measured.low, measured.median)) / (
            2 * _TWO_SIDED_95
        )
        spread = math.hypot(deviation, _SHARE_OF_ONE_PLAN * scale_spread(self._factor), in_trials)
        return interval_of(math.log(measured.median) + mean, spread)

    def _moments(self, values: FloatArray) -> tuple[float, float]:
        mean = float(self._weights @ values)
        return mean, math.sqrt(float(self._weights @ (values - mean) ** 2))


def interval_of(log_value: float, spread: float) -> Interval:
    """The 95 % interval of a value whose logarithm has the standard deviation `spread`."""
    low, median, high = (math.exp(log_value + k * spread) for k in (-_TWO_SIDED_95, 0.0, _TWO_SIDED_95))
    return Interval(median=median, low=low, high=high)
