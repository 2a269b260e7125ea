"""The cost model's constants as one cluster's own measurements correct them, with their uncertainty.

Shared constants are the prior, wide where the cluster is of another kind than what they were fitted to;
measured layers, actions, optimizer steps and whole iterations pull each towards what it really is here.
Every term stays visible: a correction is a constant's new value, and what no constant explains is the
residual, a term of its own. See docs/calibration.md.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum

import numpy as np

from quartet_plugin.calibration.map_fit import Array, Posterior, fit
from quartet_plugin.cost import communication, compute
from quartet_plugin.cost.compute import Rates, Times
from quartet_plugin.cost.constants import ClusterConstants, Constants, fitted
from quartet_plugin.cost.predict import (
    clearing_s,
    held_layers,
    held_weights,
    layer_parts,
    optimizer_s,
    predict,
    stage_parts,
)
from quartet_plugin.cost.run import ON_CPU, TrainingRun
from quartet_plugin.errors import ConfigError

# Priors of what the shared constants lack: seconds, and one standard deviation of the logarithm.
ACTION_S, ACTION_SPREAD = 2e-4, 1.5
RUNTIME_S, RUNTIME_SPREAD = 1e-4, 1.5
SKEW, SKEW_SPREAD = 0.02, 1.5
CONTENTION, CONTENTION_SPREAD = 0.1, 1.0
RESIDUAL_SPREAD = 0.03
RATIO_SPREAD = 0.1
# Sockets between processes are of another order than links of accelerators, and messages than collectives.
SOCKET_SPREAD, MESSAGE_SPREAD = 3.0, 2.0
# How much wider than among published runs a constant may lie on one cluster of a known, of an unknown kind.
KNOWN_SPREAD, UNKNOWN_SPREAD = 0.15, 1.0
# Generations of devices that the shared constants were not fitted to.
UNKNOWN = ("cpu", "plain")
# Causes of a layer's time that a rank without others does not have.
COMMUNICATION = ("tp_comm", "cp_comm", "ep_comm")
# What a probe of the links says.
LINKS = ("scale_up", "scale_out", "hop_s")
# A measurement counts for a term that makes up at least this share of it.
LEAST_SHARE = 0.03
NORMAL_95 = 1.96


class Quantity(StrEnum):
    """What was measured: an iteration, a stage's action, a part of the model for one microbatch or of a step.

    `gradients`: reducing them at the end of a step, where nothing hides it; `overhead`: what a step takes
    beside its forwards and backwards and the optimizer.
    """

    ITERATION = "iteration"
    STAGE = "stage"
    LAYER = "layer"
    EMBEDDING = "embedding"
    HEAD = "head"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    OVERHEAD = "overhead"

    @property
    def has_direction(self) -> bool:
        """Whether it is a part of the model, computed forwards and backwards."""
        return self in (Quantity.STAGE, Quantity.LAYER, Quantity.EMBEDDING, Quantity.HEAD)


class Direction(StrEnum):
    """Which of a part's computations."""

    FORWARD = "forward"
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Measured seconds of a run, or of one part of it; `spread` is their relative noise.

    `index`: the stage of a `stage`, the pipeline rank of an `optimizer` or an `overhead`. `is_alone`: a rank
    of a larger world was run by itself, communication left out. Raises ConfigError for what cannot have been
    measured.
    """

    run: TrainingRun
    seconds: float
    spread: float
    quantity: Quantity = Quantity.ITERATION
    direction: Direction | None = None
    index: int = 0
    is_alone: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ConfigError(f"measured {self.quantity}: {self.seconds} s; must be above 0")
        if not (math.isfinite(self.spread) and self.spread > 0):
            raise ConfigError(f"measured {self.quantity}: spread {self.spread}; must be above 0")
        if self.quantity.has_direction != (self.direction is not None):
            raise ConfigError(
                f"measured {self.quantity}: direction {self.direction}; parts have one, steps have none"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A constant on this cluster: its value, 95 % interval and prior, and how much was measured of it.

    `num_measurements`: how many depend on it for at least 3 % of their time. `learned`: the share of the
    prior's uncertainty that is gone, 0 where nothing is known beyond the prior.
    """

    name: str
    value: float
    low: float
    high: float
    prior: float
    num_measurements: int
    learned: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondsInterval:
    """A prediction in seconds and its 95 % interval."""

    seconds: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a cluster's measurements made of the constants.

    `covariance` is of the logarithms, in the order of `terms`. `iteration_error` is a standard deviation of
    the model's own error in whole iterations, relative; `num_iterations` how many were measured.
    """

    constants: ClusterConstants
    terms: tuple[Term, ...]
    covariance: Array
    iteration_error: float
    num_iterations: int
    num_parts: int

    def interval(self, run: TrainingRun) -> SecondsInterval:
        """The run's predicted iteration with the interval that covers 95 % of runs like those measured."""
        seconds = predict(run, self.constants).iter_time_s
        slopes = np.array([_slope(run, self.constants, term.name) for term in self.terms])
        variance = float(slopes @ self.covariance @ slopes) + self.iteration_error**2
        width = NORMAL_95 * math.sqrt(variance)
        return SecondsInterval(
            seconds=seconds, low=seconds * math.exp(-width), high=seconds * math.exp(width)
        )


def calibrate(
    observations: Sequence[Observation],
    *,
    prior: Constants | None = None,
    fixed: Collection[str] = (),
) -> Calibration:
    """Correct `prior` (the fitted constants) by one cluster's measurements.

    `fixed` constants stay as they are: what was measured on its own. Raises ConfigError where there are no
    measurements.
    """
    if not observations:
        raise ConfigError("calibration: no measurement; profile a command or run trials first")
    start = prior or fitted()
    centre = _centre(start)
    names = tuple(name for name in _names(observations, centre) if name not in fixed)
    spreads = _prior_spreads(observations, names)
    measured = np.log([one.seconds for one in observations])

    def model(point: Array) -> Array:
        moved = _moved(centre, names, point)
        return np.log([max(seconds_of(one, moved), 1e-12) for one in observations])

    found = fit(
        model,
        measured=measured,
        spread=np.array([one.spread for one in observations]),
        prior_spread=spreads,
        groups=[int(one.quantity is not Quantity.ITERATION) for one in observations],
    )
    iterations = sum(one.quantity is Quantity.ITERATION for one in observations)
    return Calibration(
        constants=_moved(centre, names, found.mean),
        terms=_terms(names, centre, found, spreads),
        covariance=found.covariance,
        iteration_error=float(found.error[0]) if iterations else UNKNOWN_SPREAD,
        num_iterations=iterations,
        num_parts=len(observations) - iterations,
    )


def fixed_by_probe(observations: Sequence[Observation]) -> tuple[str, ...]:
    """The constants that a cluster file with measured links has settled, for `calibrate(fixed=...)`.

    None on processors: there the cores that compute carry the messages too, and a probe finds them idle.
    """
    if any(one.run.software == ON_CPU for one in observations):
        return ()
    return LINKS


def seconds_of(observation: Observation, constants: Constants) -> float:
    """What the model says about a measured quantity."""
    run, quantity = observation.run, observation.quantity
    if quantity is Quantity.ITERATION:
        return predict(run, constants).iter_time_s
    if quantity in (Quantity.OPTIMIZER, Quantity.OVERHEAD):
        held, layers = held_weights(run, observation.index), held_layers(run, observation.index)
        clearing = clearing_s(run, constants, held)
        if quantity is Quantity.OVERHEAD:
            return constants.step_s + clearing
        return optimizer_s(run, constants, held, num_layers=layers) - clearing
    if quantity is Quantity.GRADIENTS:
        terms = predict(run, constants).terms
        return terms["dp_comm_s"] + terms.get("ends_comm_s", 0.0)
    if quantity is Quantity.STAGE:
        if not 0 <= observation.index < run.layout.num_stages:
            raise ConfigError(
                f"measured stage {observation.index}: the run has {run.layout.num_stages} stages"
            )
        times = Times.sum_of(stage_parts(run, constants)[observation.index].values())
    else:
        times = _part(run, constants, quantity, is_alone=observation.is_alone)
    return _directed(times, observation.direction)


def _part(run: TrainingRun, constants: Constants, quantity: Quantity, *, is_alone: bool) -> Times:
    rates = Rates(run, constants)
    if quantity is Quantity.LAYER:
        parts = layer_parts(run, constants, rates)
        left_out = COMMUNICATION if is_alone else ()
        return Times.sum_of(times for name, times in parts.items() if name not in left_out)
    is_first = quantity is Quantity.EMBEDDING
    part = compute.embedding_times(run, rates) if is_first else compute.head_times(run, constants, rates)
    ends = communication.tensor_parallel_ends(run, constants)
    return part.total if is_alone else part.total.plus(ends[0] if is_first else ends[1])


def _directed(times: Times, direction: Direction | None) -> float:
    if direction is Direction.FORWARD:
        return times.forward
    if direction is Direction.INPUT_GRAD:
        return times.input_grad
    if direction is Direction.WEIGHT_GRAD:
        return times.weight_grad
    return times.input_grad + times.weight_grad


def _centre(start: Constants) -> ClusterConstants:
    if isinstance(start, ClusterConstants):
        return replace(
            start,
            action_s=start.action_s or ACTION_S,
            skew=start.skew or SKEW,
            contention=start.contention or CONTENTION,
            runtime_s=start.runtime_s or RUNTIME_S,
        )
    values = {known.name: getattr(start, known.name) for known in fields(Constants)}
    return ClusterConstants(
        **values, action_s=ACTION_S, skew=SKEW, contention=CONTENTION, runtime_s=RUNTIME_S
    )


def _moved(centre: ClusterConstants, names: Sequence[str], point: Array) -> ClusterConstants:
    values = {name: getattr(centre, name) * math.exp(by) for name, by in zip(names, point, strict=True)}
    return replace(centre, **values)


def _names(observations: Sequence[Observation], centre: ClusterConstants) -> tuple[str, ...]:
    """The constants that at least one measurement depends on; the others stay as they are."""
    base = [seconds_of(one, centre) for one in observations]
    found = []
    for known in fields(ClusterConstants):
        for by in (0.5, -0.5):
            moved = _moved(centre, (known.name,), np.array([by]))
            if any(seconds_of(one, moved) != was for one, was in zip(observations, base, strict=True)):
                found.append(known.name)
                break
    return tuple(found)


def _prior_spreads(observations: Sequence[Observation], names: Sequence[str]) -> Array:
    is_known = all(one.run.machines.device.generation not in UNKNOWN for one in observations)
    more = KNOWN_SPREAD if is_known else UNKNOWN_SPREAD
    shared = {known.name: float(known.metadata["spread"]) for known in fields(Constants)}
    own = {
        "action_s": ACTION_SPREAD,
        "runtime_s": RUNTIME_SPREAD,
        "skew": SKEW_SPREAD,
        "contention": CONTENTION_SPREAD,
        "residual": RESIDUAL_SPREAD,
    }
    if not is_known:
        own |= {"hop_s": SOCKET_SPREAD, "peer_hop": MESSAGE_SPREAD}
    wide = {name: math.hypot(shared.get(name, RATIO_SPREAD), more) for name in names}
    return np.array([own.get(name, wide[name]) for name in names])


def _slope(run: TrainingRun, constants: ClusterConstants, name: str) -> float:
    step = 0.02
    ends = [predict(run, _moved(constants, (name,), np.array([by]))).iter_time_s for by in (step, -step)]
    return math.log(ends[0] / ends[1]) / (2 * step)


def _terms(
    names: Sequence[str], centre: ClusterConstants, found: Posterior, spreads: Array
) -> tuple[Term, ...]:
    deviations = np.sqrt(np.diag(found.covariance))
    counts = (np.abs(found.slopes) >= LEAST_SHARE).sum(axis=0)
    terms = []
    for at, name in enumerate(names):
        prior = getattr(centre, name)
        mean, width = float(found.mean[at]), NORMAL_95 * float(deviations[at])
        terms.append(
            Term(
                name=name,
                value=prior * math.exp(mean),
                low=prior * math.exp(mean - width),
                high=prior * math.exp(mean + width),
                prior=prior,
                num_measurements=int(counts[at]),
                learned=max(0.0, 1.0 - float(deviations[at]) / float(spreads[at])),
            )
        )
    return tuple(terms)
