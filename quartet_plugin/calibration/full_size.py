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
from quartet_plugin.mapping.orders import coordinates, rank_of, slot_indices
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
    """The machine of `factor` times the nodes; the others are like the measured ones, in turns.

    Slots have the slowdowns of the trial's slots in turns, which `with_slowdowns` gives to the ranks that had
    them.
    """
    num_devices = machine_model.inter_node.num_devices * factor
    domains = machine_model.domain_of_slot
    copies = np.arange(factor)[:, None] * (domains.max() + 1)
    return replace(
        machine_model,
        nodes=machine_model.nodes * factor,
        domain_of_slot=(copies + domains).ravel(),
        intra_node=replace(
            machine_model.intra_node, num_devices=num_devices, scale_up_devices=max(num_devices, 1)
        ),
        inter_node=replace(machine_model.inter_node, num_devices=num_devices),
        slowdown_index_of_slot=np.tile(machine_model.slowdown_index_of_slot, factor),
    )


def with_slowdowns(
    machine_model: MachineModel, plan: Plan, full: Plan, *, of_trial: MachineModel
) -> MachineModel:
    """The machine of `full`, each rank as slow as the rank of the trial's `plan` that it is like.

    A slot's slowdown is learned with the stage that it had in trials, and so includes the model's error for
    that stage. Applied to another stage, that error would be counted for both.
    """
    indices = of_trial.slowdown_index_of_slot
    if (indices < 0).any():
        return machine_model
    tp, cp, dp, pp = coordinates(np.arange(full.layout.world_size), layout=full.layout)
    stage = pp * plan.layout.pipeline_parallel // full.layout.pipeline_parallel
    like = rank_of(tp, cp=cp, dp=dp % plan.layout.data_parallel, pp=stage, layout=plan.layout)
    of_rank = indices[slot_indices(of_trial.nodes, plan.mapping)][like]
    of_slot = np.empty_like(of_rank)
    of_slot[slot_indices(machine_model.nodes, full.mapping)] = of_rank
    return replace(machine_model, slowdown_index_of_slot=of_slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """A trial's plan, the same with all replicas, and the trial's seconds per iteration.

    `spread` is the relative standard error of `iteration_s`.
    """

    plan: Plan
    full: Plan
    iteration_s: float
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSizePrediction:
    """Seconds an iteration of the whole training; `ratios` [samples] are logarithms of it over the trial's.

    `spread` is a standard deviation of the logarithm of `iteration_s`. `slopes` [k] are those of the ratio's
    logarithm by the coefficients'.
    """

    iteration_s: float
    spread: float
    ratios: FloatArray
    slopes: FloatArray

    @property
    def interval(self) -> Interval:
        """The seconds with their 95 % interval."""
        return interval_of(math.log(self.iteration_s), self.spread)


class FullSizePredictor:
    """Predicts trainings of `factor` times the nodes that trials have, under the posterior of a study.

    The posterior is `samples`, and `covariance` [k, k] of the coefficients about the first of them. Raises
    ConfigError for a machine whose nodes are of unequal size.
    """

    def __init__(
        self,
        machine_model: MachineModel,
        samples: Sequence[PosteriorSample],
        *,
        covariance: FloatArray,
        factor: int,
    ) -> None:
        sizes = sorted({node.num_slots for node in machine_model.nodes})
        if len(sizes) > 1:
            raise ConfigError(f"nodes of {sizes[0]} and of {sizes[-1]} devices: must be equal at full size")
        self._trial = IterationModelCache(machine_model)
        self._full_machine = enlarged_machine(machine_model, factor=factor)
        self._num_nodes, self._factor = len(machine_model.nodes), factor
        self._covariance = covariance
        self._points = [sample.point for sample in samples]
        self._weights = np.array([sample.weight for sample in samples])

    def predict(self, measured: MeasuredPlan) -> FullSizePrediction:
        """The whole training's seconds. Raises QuartetError for an order that the model cannot predict."""
        machine_model = with_slowdowns(
            self._full_machine, measured.plan, measured.full, of_trial=self._trial.machine_model
        )
        trial = self._trial.of(measured.plan)
        full = IterationModelCache(machine_model).of(measured.full)
        times = [(trial.evaluate(point), full.evaluate(point)) for point in self._points]
        ratios = np.array(
            [
                log_ratio(
                    trial_s=trial_s / trial.share,
                    full_s=full_s / full.share,
                    num_nodes=self._num_nodes,
                    num_full_nodes=self._num_nodes * self._factor,
                )
                for (trial_s, _), (full_s, _) in times
            ]
        )
        (trial_s, of_trial), (full_s, of_full) = times[0]
        slopes = of_full / full_s - of_trial / trial_s
        mean, deviation = self._moments(ratios, slopes)
        return FullSizePrediction(
            iteration_s=measured.iteration_s * math.exp(mean),
            spread=math.hypot(deviation, scale_spread(self._factor), measured.spread),
            ratios=ratios,
            slopes=slopes,
        )

    def speedup(
        self, prediction: FullSizePrediction, *, baseline: FullSizePrediction, measured: Interval
    ) -> Interval:
        """The objective over the baseline's at full size, with its 95 % interval.

        `measured` is that of the trials. What both predictions have in common cancels.
        """
        mean, deviation = self._moments(
            baseline.ratios - prediction.ratios, baseline.slopes - prediction.slopes
        )
        in_trials = math.log(max(measured.high, measured.median) / min(measured.low, measured.median)) / (
            2 * _TWO_SIDED_95
        )
        spread = math.hypot(deviation, _SHARE_OF_ONE_PLAN * scale_spread(self._factor), in_trials)
        return interval_of(math.log(measured.median) + mean, spread)

    def _moments(self, values: FloatArray, slopes: FloatArray) -> tuple[float, float]:
        """Mean and standard deviation of `values` [samples] with these `slopes` by the coefficients."""
        mean = float(self._weights @ values)
        among_samples = math.sqrt(float(self._weights @ (values - mean) ** 2))
        return mean, max(among_samples, math.sqrt(float(slopes @ self._covariance @ slopes)))


def interval_of(log_value: float, spread: float) -> Interval:
    """The 95 % interval of a value whose logarithm has the standard deviation `spread`."""
    low, median, high = (math.exp(log_value + k * spread) for k in (-_TWO_SIDED_95, 0.0, _TWO_SIDED_95))
    return Interval(median=median, low=low, high=high)
