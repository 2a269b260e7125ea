"""The maximum a posteriori of a few positive parameters, and its covariance: numpy alone.

All quantities are logarithms: a parameter's deviation from its prior value, and a measured time. The model
may be any function of the parameters (a simulated pipeline is one). It is linearized by differences and
solved with Gaussian priors, Student-t weights against outliers, and a model error that is estimated too, one
for each group of measurements (Gelman et al., Bayesian Data Analysis, chapters 14 and 17). The covariance is
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
# The longest step: a ratio of about two.
TRUST = 0.7
FREEDOM = 4.0
CONVERGED = 1e-4
# The least error of a model, relative; the prior error, which weighs as many measurements.
LEAST_ERROR = 0.003
PRIOR_ERROR, PRIOR_WEIGHT = 0.05, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """`mean` and `covariance` of the parameters' logarithms over their priors [k], [k, k].

    `error` [num_groups] is a standard deviation of the model's error, relative. `slopes` [n, k] are the
    slopes of the predictions by the parameters.
    """

    mean: Array
    covariance: Array
    error: Array
    slopes: Array


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
        newton = np.linalg.solve(hessian, slopes.T @ (weights * residuals) - precision @ point)
        step = _accepted(model, point, np.clip(newton, -TRUST, TRUST), measured, variance, prior_spread)
        point = point + step
        leverage = np.einsum("ij,jk,ik->i", slopes, np.linalg.inv(hessian), slopes) * weights
        before, error = error, _errors(residuals - slopes @ step, spread, leverage, which, len(error))
        if np.abs(step).max(initial=0.0) < CONVERGED and np.abs(error - before).max() < CONVERGED:
            break
    base, slopes = linearized(model, point)
    weights = _weights(measured - base, spread**2 + error[which] ** 2)
    covariance = np.linalg.inv(slopes.T @ (weights[:, None] * slopes) + precision)
    return Posterior(mean=point, covariance=covariance, error=error, slopes=slopes)


def linearized(model: Model, point: Array) -> tuple[Array, Array]:
    """The model's values at `point` [n], and their slopes [n, k] by central differences."""
    base = model(point)
    slopes = np.empty((len(base), len(point)))
    for index in range(len(point)):
        moved = point.copy()
        moved[index] += DIFFERENCE
        upper = model(moved)
        moved[index] -= 2 * DIFFERENCE
        slopes[:, index] = (upper - model(moved)) / (2 * DIFFERENCE)
    return base, slopes


def _weights(residuals: Array, variance: Array) -> Array:
    """The weights of Student's t distribution: residuals count less the larger they are."""
    weights: Array = (FREEDOM + 1) / (FREEDOM + residuals**2 / variance) / variance
    return weights


def _loss(residuals: Array, variance: Array, point: Array, prior_spread: Array) -> float:
    distance = (FREEDOM + 1) / 2 * np.log1p(residuals**2 / variance / FREEDOM)
    return float(distance.sum() + 0.5 * np.sum((point / prior_spread) ** 2))


def _accepted(
    model: Model, point: Array, step: Array, measured: Array, variance: Array, prior_spread: Array
) -> Array:
    """The step, halved until the loss does not rise."""
    before = _loss(measured - model(point), variance, point, prior_spread)
    for _ in range(6):
        if _loss(measured - model(point + step), variance, point + step, prior_spread) <= before + 1e-9:
            return step
        step = step / 2
    return np.zeros_like(step)


def _errors(residuals: Array, spread: Array, leverage: Array, which: NDArray[np.int64], count: int) -> Array:
    """The model's error in each group: the scatter beyond the noise, over the degrees of freedom left.

    A few measurements that fit do not make a model exact: the prior error counts as some more of them.
    Residuals are cut off by their median, so that an outlier does not widen every interval.
    """
    errors = np.full(count, LEAST_ERROR)
    for group in range(count):
        members = which == group
        num = int(members.sum())
        if num == 0:
            continue
        freedom = max(1.0, num - float(leverage[members].sum()))
        size = np.abs(residuals[members])
        robust = np.minimum(size, 3 * 1.4826 * np.median(size) + 1e-12)
        excess = max(0.0, float((robust**2).sum()) - freedom * float((spread[members] ** 2).mean()))
        variance = (PRIOR_WEIGHT * PRIOR_ERROR**2 + excess) / (PRIOR_WEIGHT + freedom)
        errors[group] = max(LEAST_ERROR, float(np.sqrt(variance)))
    return errors
