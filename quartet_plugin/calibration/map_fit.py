"""Maximum a posteriori of a few positive parameters, and how sure it is: numpy alone.

Everything is a logarithm: a parameter's deviation from its prior value, and a measured time. The model may
be any function of the parameters (a simulated pipeline is), is linearized by differences, and solved with
Gaussian priors, Student-t weights against outliers, and a model error that is estimated with it, one for
each group of measurements (Gelman et al., Bayesian Data Analysis, chapters 14 and 17). The covariance is
Laplace's approximation at the solution.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Model = Callable[[Array], Array]

DIFFERENCE = 0.02
ROUNDS = 25
# How far one step may go: a factor of about two.
TRUST = 0.7
FREEDOM = 4.0
CONVERGED = 1e-4
# No model of a machine is exact to less than this; the error to expect, as if seen in so many measurements.
LEAST_ERROR = 0.003
PRIOR_ERROR, PRIOR_WEIGHT = 0.05, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """`mean` and `covariance` of the parameters' logarithms over their priors [k], [k, k].

    `error`: a standard deviation of the model's own error, relative, by group [num_groups]. `slopes` [n, k]:
    by how much each measurement depends on each parameter. `residuals` [n]: measured less predicted.
    """

    mean: Array
    covariance: Array
    error: Array
    slopes: Array
    residuals: Array

    def deviation(self, slopes: Array, *, group: int) -> float:
        """A standard deviation of the logarithm of a new time that depends on the parameters like that."""
        variance = float(slopes @ self.covariance @ slopes) + float(self.error[group]) ** 2
        return float(np.sqrt(variance))


def fit(
    model: Model,
    *,
    measured: Array,
    spread: Array,
    prior_spread: Array,
    groups: Sequence[int] | None = None,
) -> Posterior:
    """The posterior of the parameters of `model`, which gives logarithms of times [n] for deviations [k].

    `measured` [n] are logarithms, `spread` [n] the relative noise to expect in each, `prior_spread` [k] one
    standard deviation of each parameter's logarithm. `groups` [n] numbers measurements that share an error.
    """
    which = np.zeros(len(measured), dtype=np.int64) if groups is None else np.asarray(groups, dtype=np.int64)
    precision = np.diag(prior_spread**-2.0)
    point = np.zeros(len(prior_spread))
    error = np.full(int(which.max(initial=0)) + 1, PRIOR_ERROR)
    for _ in range(ROUNDS):
        base, slopes = linearized(model, point)
        residuals = measured - base
        variance = spread**2 + error[which] ** 2
        weights = _weights(residuals, variance)
        hessian = slopes.T @ (weights[:, None] * slopes) + precision
        wanted = np.linalg.solve(hessian, slopes.T @ (weights * residuals) - precision @ point)
        step = _accepted(model, point, np.clip(wanted, -TRUST, TRUST), measured, variance, prior_spread)
        point = point + step
        known = np.einsum("ij,jk,ik->i", slopes, np.linalg.inv(hessian), slopes) * weights
        before, error = error, _errors(residuals - slopes @ step, spread, known, which, len(error))
        if np.abs(step).max(initial=0.0) < CONVERGED and np.abs(error - before).max() < CONVERGED:
            break
    base, slopes = linearized(model, point)
    weights = _weights(measured - base, spread**2 + error[which] ** 2)
    covariance = np.linalg.inv(slopes.T @ (weights[:, None] * slopes) + precision)
    return Posterior(mean=point, covariance=covariance, error=error, slopes=slopes, residuals=measured - base)


def linearized(model: Model, point: Array) -> tuple[Array, Array]:
    """The model's values at `point` [n], and their slopes [n, k] by central differences."""
    base = model(point)
    slopes = np.empty((len(base), len(point)))
    for at in range(len(point)):
        moved = point.copy()
        moved[at] += DIFFERENCE
        upper = model(moved)
        moved[at] -= 2 * DIFFERENCE
        slopes[:, at] = (upper - model(moved)) / (2 * DIFFERENCE)
    return base, slopes


def _weights(residuals: Array, variance: Array) -> Array:
    """Of Student's t: what is far off counts less, and what is off beyond reason hardly."""
    weights: Array = (FREEDOM + 1) / (FREEDOM + residuals**2 / variance) / variance
    return weights


def _loss(residuals: Array, variance: Array, point: Array, prior_spread: Array) -> float:
    distance = (FREEDOM + 1) / 2 * np.log1p(residuals**2 / variance / FREEDOM)
    return float(distance.sum() + 0.5 * np.sum((point / prior_spread) ** 2))


def _accepted(
    model: Model, point: Array, step: Array, measured: Array, variance: Array, prior_spread: Array
) -> Array:
    """The step, halved until it is no step back."""
    before = _loss(measured - model(point), variance, point, prior_spread)
    for _ in range(6):
        if _loss(measured - model(point + step), variance, point + step, prior_spread) <= before + 1e-9:
            return step
        step = step / 2
    return np.zeros_like(step)


def _errors(residuals: Array, spread: Array, known: Array, which: NDArray[np.int64], count: int) -> Array:
    """The model's error in each group: what scatters beyond the noise, for the freedom that is left.

    A few measurements that fit do not make a model exact: a prior error counts as some more of them. Cut off
    by the median, so that an outlier does not widen every interval.
    """
    found = np.full(count, LEAST_ERROR)
    for group in range(count):
        own = which == group
        num = int(own.sum())
        if num == 0:
            continue
        freedom = max(1.0, num - float(known[own].sum()))
        robust = np.minimum(np.abs(residuals[own]), 3 * 1.4826 * np.median(np.abs(residuals[own])) + 1e-12)
        excess = max(0.0, float((robust**2).sum()) - freedom * float((spread[own] ** 2).mean()))
        variance = (PRIOR_WEIGHT * PRIOR_ERROR**2 + excess) / (PRIOR_WEIGHT + freedom)
        found[group] = max(LEAST_ERROR, float(np.sqrt(variance)))
    return found
