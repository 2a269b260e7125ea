"""The fit of the shared constants to published runs: robust, and pulled towards physical defaults.

Constants that are not `is_fitted` keep their default.

Gauss-Newton steps on the logarithm of the time: every step is a bounded, robust least-squares problem in the
linearized model, with the priors among its residuals. One thread, deterministic.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import TrainingRun

Array = NDArray[np.float64]

STEP = 0.02
# The longest step in the logarithm of a constant.
TRUST = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A published run and its measured iteration; `spread` is the expected relative error."""

    run: TrainingRun
    seconds: float
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prior:
    centre: Array
    low: Array
    high: Array
    spread: Array
    is_fitted: NDArray[np.bool_]

    @classmethod
    def of_constants(cls) -> "_Prior":
        constants = fields(Constants)
        return cls(
            centre=_to_log(Constants()),
            low=np.log([f.metadata["low"] for f in constants]),
            high=np.log([f.metadata["high"] for f in constants]),
            spread=np.array([f.metadata["spread"] for f in constants]),
            is_fitted=np.array([f.metadata["is_fitted"] for f in constants]),
        )


def fit(
    observations: Sequence[PublishedRun], *, start: Constants | None = None, rounds: int = 4
) -> Constants:
    """The constants that explain `observations` best, starting from `start` (the defaults)."""
    prior = _Prior.of_constants()
    point = prior.centre if start is None else _to_log(start)
    measured = np.log([o.seconds for o in observations])
    weight = 1.0 / np.array([o.spread for o in observations])
    for _ in range(rounds):
        base, slopes = _linearize(observations, point, prior)
        solution = _solve(base - measured, slopes, weight, point, prior)
        point = np.clip(point + np.clip(solution - point, -TRUST, TRUST), prior.low, prior.high)
    return _of_log(point, prior)


def log_times(runs: Sequence[TrainingRun], constants: Constants) -> Array:
    """Logarithms of the predicted iteration times."""
    return np.log([predict(run, constants).iter_time_s for run in runs])


def _linearize(observations: Sequence[PublishedRun], point: Array, prior: _Prior) -> tuple[Array, Array]:
    runs = [o.run for o in observations]
    base = log_times(runs, _of_log(point, prior))
    slopes = np.zeros((len(runs), len(point)))
    for index in np.flatnonzero(prior.is_fitted):
        step = STEP if point[index] + STEP <= prior.high[index] else -STEP
        moved = point.copy()
        moved[index] += step
        slopes[:, index] = (log_times(runs, _of_log(moved, prior)) - base) / step
    return base, slopes


def _solve(error: Array, slopes: Array, weight: Array, point: Array, prior: _Prior) -> Array:
    """The bounded minimum of the linearized problem, outliers counted linearly, priors quadratically."""
    from scipy.optimize import least_squares

    chosen = prior.is_fitted
    centre, spread = prior.centre[chosen], prior.spread[chosen]

    def residuals(candidate: Array) -> Array:
        scaled = (error + slopes[:, chosen] @ (candidate - point[chosen])) * weight
        robust = np.sign(scaled) * np.sqrt(2.0 * (np.sqrt(1.0 + scaled**2) - 1.0))
        return np.concatenate([robust, (candidate - centre) / spread])

    inside = np.clip(point, prior.low, prior.high)[chosen]
    bounds = (prior.low[chosen] - 1e-9, prior.high[chosen] + 1e-9)
    solution = point.copy()
    solution[chosen] = least_squares(residuals, inside, bounds=bounds, max_nfev=60).x
    return solution


def _to_log(constants: Constants) -> Array:
    values: list[float] = [getattr(constants, f.name) for f in fields(Constants)]
    return np.log(values)


def _of_log(point: Array, prior: _Prior) -> Constants:
    values = np.exp(np.clip(point, prior.low, prior.high))
    # exp(log(bound)) may miss the bound by a rounding.
    return Constants(
        **{
            f.name: min(max(float(value), f.metadata["low"]), f.metadata["high"])
            for value, f in zip(values, fields(Constants), strict=True)
        }
    )
