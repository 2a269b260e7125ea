"""The calibration: the cost model's constants as one cluster's measurements correct them, with intervals.

The shared constants are the prior, wide where the cluster is of another kind than the runs that they were
fitted to; measured layers, actions, optimizer steps and iterations correct them. Every correction is the new
value of a named constant; the residual that no constant explains is a term of its own. See
docs/calibration.md, and docs/formats.md for `calibration.json`.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from quartet_plugin.calibration.map_fit import Array, Posterior, fit
from quartet_plugin.calibration.observations import Direction, Observation, Quantity
from quartet_plugin.cost import communication, compute
from quartet_plugin.cost.compute import Rates
from quartet_plugin.cost.constants import ClusterConstants, Constants, fitted
from quartet_plugin.cost.iteration.step import (
    clearing_s,
    held_layers,
    held_weights,
    optimizer_s,
)
from quartet_plugin.cost.iteration.terms import layer_parts, stage_parts, unit_parts
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import ON_CPU, TrainingRun
from quartet_plugin.cost.times import Times
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.cluster import Positive
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import Bounds, Length, read_record, record

# Priors of the constants that only a cluster has: the assumed value where the shared constants have none, and
# one standard deviation of the logarithm.
ASSUMED = {"action_s": 2e-4, "runtime_s": 1e-4, "skew": 0.02, "contention": 0.1}
SPREADS = {
    "action_s": 1.5,
    "runtime_s": 1.5,
    "skew": 1.5,
    "contention": 1.0,
    "residual": 0.03,
    # No published run has a scan: its error must not move the constants that dense layers have, too.
    "scan": 1.0,
}
RATIO_SPREAD = 0.1
# Sockets between processes are of another order than links of accelerators, and messages than collectives.
UNKNOWN_HOP_S = 2.5e-5
UNKNOWN_LINK_SPREADS = {"hop_s": 3.0, "peer_hop": 2.0}
# The spread that a constant has on one cluster beyond the prior: of a known, of an unknown kind of device.
KNOWN_SPREAD, UNKNOWN_SPREAD = 0.15, 1.0
# Generations of devices that the shared constants were not fitted to.
UNKNOWN = ("cpu", "plain")
# Causes of a layer's time that a rank alone does not have.
COMMUNICATION = ("tp_comm", "cp_comm", "ep_comm")
# The constants that a probe of the links measures.
LINKS = ("scale_up", "scale_out", "hop_s")
# A measurement counts for a term if its slope by the term is at least this.
LEAST_SHARE = 0.03
NORMAL_95 = 1.96


Count = Annotated[int, Bounds(ge=0, le=2**31)]


@record
class Term:
    """A constant on this cluster: its value, its 95 % interval and its prior.

    `num_measurements` counts the measurements that depend on it for at least 3 % of their time. `learned` is
    the share of the prior's standard deviation that is gone, 0 where nothing was learned.
    """

    name: str
    value: Positive
    low: Positive
    high: Positive
    prior: Positive
    num_measurements: Count
    learned: Annotated[float, Bounds(ge=0, le=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondsInterval:
    """A prediction in seconds and its 95 % interval."""

    seconds: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The constants of one cluster, with the covariance of their logarithms in the order of `terms`.

    `iteration_error` is a standard deviation of the model's relative error in iterations; `num_iterations`
    and `num_parts` count the measured iterations and parts.
    """

    constants: ClusterConstants
    terms: tuple[Term, ...]
    covariance: Array
    iteration_error: float
    num_iterations: int
    num_parts: int

    def interval(self, run: TrainingRun) -> SecondsInterval:
        """The run's predicted iteration; its interval covers 95 % of runs like the measured ones."""
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
    """Correct `prior` (by default the fitted constants) by one cluster's measurements.

    `fixed` constants were measured on their own and stay as they are. Raises ConfigError without
    measurements.
    """
    if not observations:
        raise ConfigError("calibration: no measurement; profile a command or run trials first")
    is_known = _is_known(observations)
    start = prior or (fitted() if is_known else replace(fitted(), hop_s=UNKNOWN_HOP_S))
    centre = _centre(start)
    names = tuple(name for name in _names(observations, centre) if name not in fixed)
    spreads = _prior_spreads(observations, names)
    measured = np.log([observation.seconds for observation in observations])

    def model(point: Array) -> Array:
        moved = _moved(centre, names, point)
        return np.log([max(seconds_of(observation, moved), 1e-12) for observation in observations])

    is_part = [observation.quantity is not Quantity.ITERATION for observation in observations]
    posterior = fit(
        model,
        measured=measured,
        spread=np.array([observation.spread for observation in observations]),
        prior_spread=spreads,
        groups=[int(part) for part in is_part],
    )
    num_parts = sum(is_part)
    return Calibration(
        constants=_moved(centre, names, posterior.mean),
        terms=_terms(names, centre, posterior, spreads),
        covariance=posterior.covariance,
        iteration_error=UNKNOWN_SPREAD if all(is_part) else float(posterior.error[0]),
        num_iterations=len(observations) - num_parts,
        num_parts=num_parts,
    )


def fixed_by_probe(observations: Sequence[Observation]) -> tuple[str, ...]:
    """The constants that a cluster file with measured links fixes, for `calibrate(fixed=...)`.

    On processors it fixes none: the cores that compute carry the messages too, but a probe measures idle
    cores.
    """
    if any(observation.run.software == ON_CPU for observation in observations):
        return ()
    return LINKS


def seconds_of(observation: Observation, constants: Constants) -> float:
    """The predicted seconds of a measured quantity; raises ConfigError for a stage that the run lacks."""
    run, quantity = observation.run, observation.quantity
    if quantity is Quantity.ITERATION:
        return predict(run, constants).iter_time_s
    if quantity in (Quantity.OPTIMIZER, Quantity.OVERHEAD):
        held = held_weights(run, observation.index)
        counts = held_layers(run, observation.index)
        clearing = clearing_s(run, constants, held)
        if quantity is Quantity.OVERHEAD:
            return constants.step_s + clearing
        return optimizer_s(run, constants, held, counts=counts) - clearing
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
        times = _part(run, constants, quantity, is_single_rank=observation.is_single_rank)
    return _directed(times, observation.direction)


def _part(run: TrainingRun, constants: Constants, quantity: Quantity, *, is_single_rank: bool) -> Times:
    rates = Rates(run, constants)
    left_out = COMMUNICATION if is_single_rank else ()
    if quantity in (Quantity.LAYER, Quantity.EXPERT_LAYER):
        experts = run.experts if quantity is Quantity.EXPERT_LAYER else None
        parts = layer_parts(run, constants, rates, experts=experts)
        return Times.sum_of(times for name, times in parts.items() if name not in left_out)
    if quantity is Quantity.HEAD and run.mtp_layers:
        # Its layers come between the last layer and the head, where a profile has no mark.
        parts = unit_parts(run, constants).head
        return Times.sum_of(times for name, times in parts.items() if name not in left_out)
    is_first = quantity is Quantity.EMBEDDING
    part = compute.embedding_times(run, rates) if is_first else compute.head_times(run, constants, rates)
    embedding_comm, head_comm = communication.tensor_parallel_ends(run, constants)
    return part.total if is_single_rank else part.total.plus(embedding_comm if is_first else head_comm)


def _directed(times: Times, direction: Direction | None) -> float:
    if direction is None or direction is Direction.BACKWARD:
        return times.input_grad_s + times.weight_grad_s
    return float(getattr(times, f"{direction}_s"))


def _centre(start: Constants) -> ClusterConstants:
    centre = ClusterConstants.of(start)
    return replace(centre, **{name: getattr(centre, name) or value for name, value in ASSUMED.items()})


def _moved(centre: ClusterConstants, names: Sequence[str], point: Array) -> ClusterConstants:
    ratios = zip(names, point, strict=True)
    return replace(centre, **{name: getattr(centre, name) * math.exp(ratio) for name, ratio in ratios})


def _names(observations: Sequence[Observation], centre: ClusterConstants) -> tuple[str, ...]:
    """The constants that at least one measurement depends on; the others stay as they are."""
    base = [seconds_of(observation, centre) for observation in observations]

    def matters(name: str) -> bool:
        return any(
            seconds_of(observation, moved) != seconds
            for moved in (_moved(centre, (name,), np.array([by])) for by in (0.5, -0.5))
            for observation, seconds in zip(observations, base, strict=True)
        )

    return tuple(constant.name for constant in fields(ClusterConstants) if matters(constant.name))


def _is_known(observations: Sequence[Observation]) -> bool:
    """Whether the shared constants were fitted to devices of these generations."""
    devices = [observation.run.cluster.device for observation in observations]
    return all(device.generation not in UNKNOWN for device in devices)


def _prior_spreads(observations: Sequence[Observation], names: Sequence[str]) -> Array:
    is_known = _is_known(observations)
    beyond = KNOWN_SPREAD if is_known else UNKNOWN_SPREAD
    shared = {constant.name: float(constant.metadata["spread"]) for constant in fields(Constants)}
    fixed = SPREADS if is_known else SPREADS | UNKNOWN_LINK_SPREADS
    wide = {name: math.hypot(shared.get(name, RATIO_SPREAD), beyond) for name in names}
    return np.array([fixed.get(name, wide[name]) for name in names])


def _slope(run: TrainingRun, constants: ClusterConstants, name: str) -> float:
    step = 0.02
    upper, lower = (
        predict(run, _moved(constants, (name,), np.array([by]))).iter_time_s for by in (step, -step)
    )
    return math.log(upper / lower) / (2 * step)


def _terms(
    names: Sequence[str], centre: ClusterConstants, posterior: Posterior, spreads: Array
) -> tuple[Term, ...]:
    deviations = np.sqrt(np.diag(posterior.covariance))
    counts = (np.abs(posterior.slopes) >= LEAST_SHARE).sum(axis=0)
    terms = []
    for index, name in enumerate(names):
        prior = getattr(centre, name)
        mean, width = float(posterior.mean[index]), NORMAL_95 * float(deviations[index])
        terms.append(
            Term(
                name=name,
                value=prior * math.exp(mean),
                low=prior * math.exp(mean - width),
                high=prior * math.exp(mean + width),
                prior=prior,
                num_measurements=int(counts[index]),
                learned=max(0.0, 1.0 - float(deviations[index]) / float(spreads[index])),
            )
        )
    return tuple(terms)


_NAMES = frozenset(constant.name for constant in fields(ClusterConstants))
# Every file has these; a constant that was added later is neutral where a file lacks it.
_REQUIRED = frozenset(constant.name for constant in fields(Constants))


@record
class _File:
    schema_version: Literal[1]
    source: Annotated[str, Length(most=500)]
    constants: dict[str, Annotated[float, Bounds(ge=0, lt=1e20)]]
    terms: Annotated[tuple[Term, ...], Length(most=len(_NAMES))]
    covariance: tuple[tuple[float, ...], ...]
    iteration_error: Annotated[float, Bounds(ge=0, le=10)]
    num_iterations: Count
    num_parts: Count

    def __post_init__(self) -> None:
        unknown = sorted((set(self.constants) | {term.name for term in self.terms}) - _NAMES)
        if unknown:
            raise ConfigError(f"constants: {unknown[0]}: unknown constant; remove it")
        size = len(self.terms)
        if len(self.covariance) != size or any(len(row) != size for row in self.covariance):
            raise ConfigError(f"covariance: must have {size} rows and columns, one a term")


def write_calibration(calibration: Calibration, *, path: Path, source: str) -> None:
    """Write `calibration.json`, complete or not at all; `source` says in words what was measured."""
    content = {"schema_version": 1, "source": source[:500], **asdict(calibration)}
    write_json_atomic(path, {**content, "covariance": calibration.covariance.tolist()})


def read_calibration(path: Path) -> Calibration:
    """The calibration in `path`. Raises ConfigError in one line: the field, the value and the rule."""
    file = read_record(_File, path)
    missing = sorted(_REQUIRED - set(file.constants))
    if missing:
        raise ConfigError(f"{path}: constants.{missing[0]}: missing; the key is required")
    return Calibration(
        constants=ClusterConstants(**file.constants),
        terms=file.terms,
        covariance=np.array(file.covariance, dtype=np.float64).reshape(len(file.terms), len(file.terms)),
        iteration_error=file.iteration_error,
        num_iterations=file.num_iterations,
        num_parts=file.num_parts,
    )
