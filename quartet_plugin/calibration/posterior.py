"""What measured times leave possible of a few factors, and of what no factor explains: numpy alone.

A measured time's logarithm is what a physical model says under its factors, plus a residual that alike
plans share, plus noise. Factors have Gaussian priors, residuals are a Gaussian process (Rasmussen and
Williams 2006, section 2.7: explicit basis functions) whose size is learned by its marginal likelihood; a
lone measurement that is far off counts as the noisier. A pipeline's time has kinks: what is not on the
critical path is bounded by a measurement, not determined, and different causes may explain the same times.
So the posterior is a sample by randomized maximum likelihood (Oliver et al. 1996): priors and measurements
are drawn, and each draw's best explanation is a view of what may be.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quartet_plugin.model.costs import FloatArray

# Logarithms of times [n], and their slopes by the factors [n, k], at a point [k].
Model = Callable[[FloatArray], tuple[FloatArray, FloatArray]]

ROUNDS = 20
# A step that would go back is taken shorter and steeper, so many times; damping is in units of the prior.
DAMPING, LEAST_DAMPING, MAX_DAMPED = 0.0, 1.0, 6
# How far one step may go: a factor of about two.
TRUST = 0.7
CONVERGED = 1e-3
# Residuals may be so many times what is expected of them; how sure that expectation is, in logarithms.
SCALES = (0.3, 0.55, 1.0, 1.8, 3.2)
SCALE_SPREAD = 0.7
# Deviations beyond which a measurement is taken for noisier than said.
OUTLIER = 3.0
# Views: at most so many, fewer where measurements are many; those too light are left out.
MAX_VIEWS, LEAST_VIEWS, VIEWED_TIMES = 20, 6, 500
LEAST_WEIGHT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured [n]: logarithms of seconds, the deviation of the noise in each, and which of them
    share residuals: `covariance` [n, n] at scale 1, zero rows for those that have none."""

    log_s: FloatArray
    noise: FloatArray
    covariance: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PosteriorSample:
    """One explanation of the measurements: factors [k], and how plausible it is beside the others.

    `scale` multiplies residuals' deviations, `inverse` [n, n] is that of the measurements' covariance, and
    `weighted` [n] the inverse times what the factors leave unexplained.
    """

    weight: float
    point: FloatArray
    scale: float
    inverse: FloatArray
    weighted: FloatArray

    def correct(
        self, log_s: FloatArray, *, shared: FloatArray, own: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Corrected logarithms of seconds [m], and their deviations without a measurement's noise.

        `log_s` [m] are the model's at `point`, `shared` [m, n] the residuals' covariances with the
        measurements and `own` [m] their variances, both at scale 1.
        """
        shared = self.scale**2 * shared
        variance = self.scale**2 * own - np.einsum("mn,mn->m", shared @ self.inverse, shared)
        return log_s + shared @ self.weighted, np.sqrt(np.maximum(variance, 1e-8))


def fit(
    model: Model, measured: Measured, *, starts: Sequence[FloatArray], spreads: FloatArray
) -> list[PosteriorSample]:
    """The views, the likeliest point of all first; their weights sum to 1.

    The search for that begins at each of `starts` [k], of which the first is also where the priors' draws
    are put around; `spreads` [k] are the priors' deviations around 0. The same arguments, the same views.
    """
    likeliest = _Problem(model=model, measured=measured, spreads=spreads, scale=1.0)
    point, _ = min((likeliest.best(start) for start in starts), key=lambda one: one[1])
    problem = likeliest
    for _ in range(2):
        problem = problem.learned(point)
        point, loss = problem.best(point)
    generator = np.random.default_rng(len(measured.log_s))
    num = max(LEAST_VIEWS, min(MAX_VIEWS, VIEWED_TIMES // len(measured.log_s)))
    found = [(point, 0.0), *(problem.drawn(generator, around=starts[0], least=loss) for _ in range(num))]
    weights = np.exp([-excess for _, excess in found])
    weights = np.where(weights / weights.sum() < LEAST_WEIGHT, 0.0, weights)
    weights /= weights.sum()
    return [
        problem.view(one, weight=float(weight))
        for (one, _), weight in zip(found, weights, strict=True)
        if weight > 0.0
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Problem:
    """The measurements with what is learned of their noise and of the scale of residuals."""

    model: Model
    measured: Measured
    spreads: FloatArray
    scale: float

    @property
    def covariance(self) -> FloatArray:
        found: FloatArray = self.scale**2 * self.measured.covariance + np.diag(self.measured.noise**2)
        return found

    def best(
        self, start: FloatArray, *, centre: FloatArray | float = 0.0, log_s: FloatArray | None = None
    ) -> tuple[FloatArray, float]:
        """The likeliest point near `start` and its loss, for other measurements and priors where given."""
        return _maximum(
            self.model,
            self.measured.log_s if log_s is None else log_s,
            inverse=np.linalg.inv(self.covariance),
            start=start,
            centre=centre,
            spreads=self.spreads,
        )

    def learned(self, point: FloatArray) -> "_Problem":
        """The problem with the scale and the noise that fit best there."""
        log_s, slopes = self.model(point)
        left = self.measured.log_s - log_s
        by_factors = (slopes * self.spreads**2) @ slopes.T
        at_prior = left + slopes @ point

        def likelihood(scale: float) -> float:
            covariance = by_factors + replace(self, scale=scale).covariance
            fits = float(at_prior @ np.linalg.solve(covariance, at_prior))
            fits += float(np.linalg.slogdet(covariance)[1])
            return -0.5 * fits - 0.5 * float(np.log(scale) / SCALE_SPREAD) ** 2

        found = replace(self, scale=max(SCALES, key=likelihood))
        expected = np.sqrt(np.diag(found.covariance))
        noise = self.measured.noise * np.maximum(1.0, np.abs(left) / (OUTLIER * expected))
        return replace(found, measured=replace(self.measured, noise=noise))

    def drawn(
        self, generator: np.random.Generator, *, around: FloatArray, least: float
    ) -> tuple[FloatArray, float]:
        """The best explanation of drawn measurements under a drawn prior, and how much worse it is than due.

        `least` is the loss of the likeliest point. Losses of draws scatter by chance; only what is beyond
        that is an explanation that does not hold.
        """
        num = len(self.measured.log_s)
        centre = self.spreads * generator.normal(size=len(self.spreads))
        root = np.linalg.cholesky(self.covariance)
        log_s = self.measured.log_s + root @ generator.normal(size=num)
        # Where an assumption may be off by orders of magnitude, the search begins at what was measured.
        start = np.where(self.spreads > 1.0, around, around + centre)
        point, loss = self.best(start, centre=np.where(self.spreads > 1.0, 0.0, centre), log_s=log_s)
        return point, 0.5 * max(0.0, loss - least - num - 2.0 * np.sqrt(2.0 * num))

    def view(self, point: FloatArray, *, weight: float) -> PosteriorSample:
        inverse = np.linalg.inv(self.covariance)
        left = self.measured.log_s - self.model(point)[0]
        return PosteriorSample(
            weight=weight, point=point, scale=self.scale, inverse=inverse, weighted=inverse @ left
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

    def loss(point: FloatArray, left: FloatArray) -> float:
        return float(left @ inverse @ left + precision @ (point - centre) ** 2)

    point = start
    log_s, slopes = model(point)
    left = measured - log_s
    now = loss(point, left)
    damping = DAMPING
    for _ in range(ROUNDS):
        weighted = slopes.T @ inverse
        hessian = weighted @ slopes + np.diag(precision)
        gradient = weighted @ left - precision * (point - centre)
        for _ in range(MAX_DAMPED):
            step = np.linalg.solve(hessian + damping * np.diag(precision), gradient)
            step = step * min(1.0, TRUST / max(TRUST, float(np.abs(step).max(initial=0.0))))
            log_s, slopes_there = model(point + step)
            there = loss(point + step, measured - log_s)
            if there <= now:
                break
            damping = max(10.0 * damping, LEAST_DAMPING)
        else:
            return point, now
        damping = damping / 10.0 if damping > LEAST_DAMPING else DAMPING
        gained = now - there
        point, slopes, left, now = point + step, slopes_there, measured - log_s, there
        if np.abs(step).max(initial=0.0) < CONVERGED or gained < CONVERGED * (1.0 + now):
            break
    return point, now
