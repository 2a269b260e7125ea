"""The posterior of the coefficients and the residuals, given measured times: numpy alone.

The logarithm of a measured time is what a model predicts under its coefficients, plus a residual that similar
plans share, plus noise. Coefficients have Gaussian priors, residuals are a Gaussian process (Rasmussen and
Williams 2006, section 2.7: explicit basis functions). The marginal likelihood (the same, section 5.4.1) sets
the scale of residuals, how much noisier launches are than stated, and how unlike the devices are; a lone
measurement that is far off counts as noisier. A pipeline's time has kinks: a measurement bounds what is
not on the critical path but does not determine it, and different causes may explain the same times. So the
posterior is a sample by randomized maximum likelihood (Oliver et al. 1996): priors and measurements are
drawn, and the best explanation of each draw is a sample.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quartet_plugin.model.costs import FloatArray

# Logarithms of times [n], and their slopes by the coefficients [n, k], at a point [k] of logarithms.
Model = Callable[[FloatArray], tuple[FloatArray, FloatArray]]

ROUNDS = 20
# A step that raises the loss is repeated shorter and steeper; damping is in units of the prior.
DAMPING, LEAST_DAMPING, MAX_DAMPED = 0.0, 1.0, 6
# The longest step: a ratio of about two.
TRUST = 0.7
CONVERGED = 1e-3
# Candidates for the scale of residuals over their expected size; the spread of that expectation's logarithm.
SCALES = (0.3, 0.55, 1.0, 1.8, 3.2)
SCALE_SPREAD = 0.7
# Candidates for the deviation of launches over the stated one, and the spread of its expected logarithm: two
# launches of one plan may lie further apart than the iterations inside of each.
LAUNCH_NOISES = (1.0, 1.6, 2.5)
LAUNCH_NOISE_SPREAD = 0.5
# Candidates for the deviations of slowdowns over their priors': for alike devices, and for unlike ones.
ALIKE, UNLIKE = 0.2, 1.0
# The prior odds that devices are unlike. With even odds, unlike devices explain what slow links cause.
UNLIKE_ODDS = 0.1
# Standard deviations beyond which a measurement counts as noisier than stated.
OUTLIER = 3.0
# The number of samples, fewer where measurements are many; samples below the least weight are left out.
MAX_SAMPLES, MIN_SAMPLES, SAMPLES_TIMES_MEASUREMENTS = 20, 6, 500
LEAST_WEIGHT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured times [n]: logarithms of seconds, deviations of their noise, and the residuals' covariance.

    `covariance` [n, n] is at scale 1, with zero rows for times that have no residual: those of actions.
    """

    log_s: FloatArray
    noise: FloatArray
    covariance: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PosteriorSample:
    """One sample: the logarithms of the coefficients, `point` [k], and its weight among the samples.

    `scale` multiplies the residuals' deviations, `inverse` [n, n] is the inverse of the measurements'
    covariance, and `weighted` [n] the inverse times what the coefficients leave unexplained.
    """

    weight: float
    point: FloatArray
    scale: float
    inverse: FloatArray
    weighted: FloatArray

    def correct(
        self, log_s: FloatArray, *, shared: FloatArray, variance: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Corrected logarithms of seconds [m], and their deviations without a measurement's noise.

        `log_s` [m] are the model's at `point`, `shared` [m, n] the residuals' covariances with the
        measurements and `variance` [m] the residuals' variances, both at scale 1.
        """
        shared = self.scale**2 * shared
        variance = self.scale**2 * variance - np.einsum("mn,mn->m", shared @ self.inverse, shared)
        return log_s + shared @ self.weighted, np.sqrt(np.maximum(variance, 1e-8))


def fit(
    model: Model,
    measured: Measured,
    *,
    starts: Sequence[FloatArray],
    spreads: FloatArray,
    slowdowns: slice = slice(0),
    unlike_odds: float = UNLIKE_ODDS,
) -> list[PosteriorSample]:
    """The samples, the most likely point first; their weights sum to 1.

    The search for that point starts at each of `starts` [k]; the priors' draws are centred on the first
    start. `spreads` [k] are the priors' deviations around 0. `slowdowns` is where the coefficients are that
    tell devices apart, and `unlike_odds` are the prior odds that devices differ. The same arguments give the
    same samples.
    """
    stated = _Problem(
        model=model,
        measured=measured,
        spreads=spreads,
        scale=1.0,
        slowdowns=slowdowns,
        unlike_odds=unlike_odds,
    )
    problem = stated
    point, _ = min((problem.best(start) for start in starts), key=lambda point_and_loss: point_and_loss[1])
    for _ in range(2):
        problem = stated.learned(point)
        point, loss = problem.best(point)
    generator = np.random.default_rng(len(measured.log_s))
    num = max(MIN_SAMPLES, min(MAX_SAMPLES, SAMPLES_TIMES_MEASUREMENTS // len(measured.log_s)))
    points = [(point, 0.0), *(problem.drawn(generator, around=starts[0], least=loss) for _ in range(num))]
    weights = np.exp([-excess for _, excess in points])
    weights = np.where(weights / weights.sum() < LEAST_WEIGHT, 0.0, weights)
    weights /= weights.sum()
    return [
        problem.sample(point, weight=float(weight))
        for (point, _), weight in zip(points, weights, strict=True)
        if weight > 0.0
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Problem:
    """The measurements, with their noise and the scale of residuals as learned so far."""

    model: Model
    measured: Measured
    spreads: FloatArray
    scale: float
    slowdowns: slice
    unlike_odds: float

    @property
    def covariance(self) -> FloatArray:
        covariance: FloatArray = self.scale**2 * self.measured.covariance + np.diag(self.measured.noise**2)
        return covariance

    def best(
        self, start: FloatArray, *, centre: FloatArray | float = 0.0, log_s: FloatArray | None = None
    ) -> tuple[FloatArray, float]:
        """The most likely point near `start` and its loss; `log_s` and `centre` replace data and priors."""
        return _maximum(
            self.model,
            self.measured.log_s if log_s is None else log_s,
            inverse=np.linalg.inv(self.covariance),
            start=start,
            centre=centre,
            spreads=self.spreads,
        )

    def scaled(self, scale: float, *, noise: float, slowdown: float) -> "_Problem":
        """The problem with another scale of residuals, and with the noise of launches and the deviations of
        slowdowns multiplied."""
        spreads = self.spreads.copy()
        spreads[self.slowdowns] *= slowdown
        is_launch = np.diag(self.measured.covariance) > 0.0
        measured = replace(self.measured, noise=self.measured.noise * np.where(is_launch, noise, 1.0))
        return replace(self, scale=scale, spreads=spreads, measured=measured)

    def learned(self, point: FloatArray) -> "_Problem":
        """The problem with the scales of residuals, noise and slowdowns, and the noise, that fit `point`."""
        log_s, slopes = self.model(point)
        unexplained = self.measured.log_s - log_s
        at_prior = unexplained + slopes @ point

        def likelihood(option: tuple[float, float, float]) -> float:
            scale, noise, slowdown = option
            problem = self.scaled(scale, noise=noise, slowdown=slowdown)
            covariance = (slopes * problem.spreads**2) @ slopes.T + problem.covariance
            fits = float(at_prior @ np.linalg.solve(covariance, at_prior))
            fits += float(np.linalg.slogdet(covariance)[1])
            unusual = (np.log(scale) / SCALE_SPREAD) ** 2 + (np.log(noise) / LAUNCH_NOISE_SPREAD) ** 2
            odds = self.unlike_odds if slowdown == UNLIKE else 1.0
            return -0.5 * (fits + float(unusual)) + float(np.log(odds))

        options = itertools.product(SCALES, LAUNCH_NOISES, (ALIKE, UNLIKE))
        scale, noise_scale, slowdown = max(options, key=likelihood)
        scaled = self.scaled(scale, noise=noise_scale, slowdown=slowdown)
        expected = np.sqrt(np.diag(scaled.covariance))
        noise = scaled.measured.noise * np.maximum(1.0, np.abs(unexplained) / (OUTLIER * expected))
        return replace(scaled, measured=replace(scaled.measured, noise=noise))

    def drawn(
        self, generator: np.random.Generator, *, around: FloatArray, least: float
    ) -> tuple[FloatArray, float]:
        """The best explanation of drawn measurements under a drawn prior, and half its excess loss.

        `least` is the loss of the most likely point. Losses of draws scatter by chance; only the loss beyond
        that scatter is excess.
        """
        num = len(self.measured.log_s)
        centre = self.spreads * generator.normal(size=len(self.spreads))
        root = np.linalg.cholesky(self.covariance)
        log_s = self.measured.log_s + root @ generator.normal(size=num)
        # Where an assumption may be off by orders of magnitude, the search starts at what was measured.
        start = np.where(self.spreads > 1.0, around, around + centre)
        point, loss = self.best(start, centre=np.where(self.spreads > 1.0, 0.0, centre), log_s=log_s)
        return point, 0.5 * max(0.0, loss - least - num - 2.0 * np.sqrt(2.0 * num))

    def sample(self, point: FloatArray, *, weight: float) -> PosteriorSample:
        inverse = np.linalg.inv(self.covariance)
        weighted = inverse @ (self.measured.log_s - self.model(point)[0])
        return PosteriorSample(
            weight=weight, point=point, scale=self.scale, inverse=inverse, weighted=weighted
        )


def _maximum(
    model: Model,
    measured: FloatArray,
    *,
    inverse: FloatArray,
    start: FloatArray,
    centre: FloatArray | float,
    spreads: FloatArray,
) -> tuple[FloatArray, float]:
    """The maximum near `start` and its loss: Levenberg-Marquardt, since the model may have kinks."""
    precision = spreads**-2.0

    def loss_of(point: FloatArray, unexplained: FloatArray) -> float:
        return float(unexplained @ inverse @ unexplained + precision @ (point - centre) ** 2)

    point = start
    log_s, slopes = model(point)
    unexplained = measured - log_s
    loss = loss_of(point, unexplained)
    damping = DAMPING
    for _ in range(ROUNDS):
        weighted = slopes.T @ inverse
        hessian = weighted @ slopes + np.diag(precision)
        gradient = weighted @ unexplained - precision * (point - centre)
        for _ in range(MAX_DAMPED):
            step = np.linalg.solve(hessian + damping * np.diag(precision), gradient)
            step = step * min(1.0, TRUST / max(TRUST, float(np.abs(step).max(initial=0.0))))
            log_s, next_slopes = model(point + step)
            next_loss = loss_of(point + step, measured - log_s)
            if next_loss <= loss:
                break
            damping = max(10.0 * damping, LEAST_DAMPING)
        else:
            return point, loss
        damping = damping / 10.0 if damping > LEAST_DAMPING else DAMPING
        gained = loss - next_loss
        point, slopes, unexplained, loss = point + step, next_slopes, measured - log_s, next_loss
        if np.abs(step).max(initial=0.0) < CONVERGED or gained < CONVERGED * (1.0 + loss):
            break
    return point, loss
