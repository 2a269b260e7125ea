"""Gaussian processes over plans: the covariance of residuals, and draws of plans' speeds.

`Residuals` gives the covariance of the ratios of measured to predicted times: a sum of independent parts, one
for each group of features that two plans may share, and one that fades as their splits differ.

`draw` samples the logarithms of plans' objectives over the baseline's. Such a logarithm is what the cost
model predicts, times a slope, plus a Gaussian process over features that plans share, plus an independent
part of each plan (Rasmussen and Williams 2006, section 2.7). The marginal likelihood of the measurements
weighs how large these parts are, so that few trials leave wide draws. Numpy alone.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.plan import Plan

# One standard deviation of a residual's part, relative, for each group of features that plans may share.
RESIDUAL_SPREADS = {
    "shape": 0.04,
    "degrees": 0.08,
    "micro_batch": 0.05,
    "schedule": 0.03,
    "mapping": 0.04,
    "layout and schedule": 0.04,
}
SPLIT_SPREAD = 0.03
# The difference of splits, as a share of a stage's layers, at which that part's covariance has faded to 0.6.
RESIDUAL_SPLIT_REACH = 0.5

# Candidates for deviations of the logarithm in `draw`: of the part that similar plans share (larger ones less
# likely than USUAL_SHARED), of a plan's independent part, and of one launch where no plan was launched twice;
# and for the reach of similarity.
SHARED = (0.02, 0.05, 0.1, 0.2, 0.4)
USUAL_SHARED = 0.15
INDEPENDENT = (0.005, 0.02, 0.06)
NOISE = (0.01, 0.03, 0.08)
REACHES = (0.5, 1.0, 3.0)
# The reach where means and deviations are given.
JOINT_REACH = 1.0
# Priors of the cost model's offset (around 0) and slope (around 1).
OFFSET, SLOPE = 0.3, 0.5
# The distance between plans by a difference in the shape, the degrees, the micro-batch, the schedule, the
# mapping; a third of a stage's even share of layers more or less at an end counts as 1.
WEIGHTS = np.array([1.0, 1.0, 0.4, 0.5, 0.5])
SPLIT_REACH = 1.0 / 3.0
# The same for whether plans fit in memory.
FIT_WEIGHTS = np.array([1.0, 2.0, 1.0, 0.5, 0.0])
# The logarithm of the slowdown against the best from which a plan says little about the best ones.
FAR = float(np.log(1.5))
_LEAST_WEIGHT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Plans by their groups: `codes` [n, groups], and `counts` [n] their layers a stage over the mean."""

    codes: FloatArray
    counts: tuple[FloatArray, ...]

    def __len__(self) -> int:
        return len(self.counts)


@dataclass(slots=True)
class Residuals:
    """Numbers the groups of plans, and gives the covariance of their residuals."""

    _numbers: dict[object, int] = field(default_factory=dict)

    def groups(self, plans: Sequence[Plan]) -> Groups:
        """The plans' groups."""
        codes = [_codes(self._group_keys(plan), self._numbers) for plan in plans]
        return Groups(
            codes=np.array(codes, dtype=np.float64).reshape(len(plans), len(RESIDUAL_SPREADS) + 1),
            counts=tuple(_layers_over_mean(plan) for plan in plans),
        )

    def covariance(self, rows: Groups, columns: Groups) -> FloatArray:
        """The covariance of the residuals of `rows` with those of `columns` [rows, columns]."""
        same = rows.codes[:, None, :] == columns.codes[None, :, :]
        variances = np.array([spread**2 for spread in RESIDUAL_SPREADS.values()])
        covariance: FloatArray = same[:, :, :-1] @ variances
        for row, column in zip(*np.nonzero(same[:, :, -1]), strict=True):
            apart = float(np.abs(rows.counts[row] - columns.counts[column]).mean())
            covariance[row, column] += SPLIT_SPREAD**2 * np.exp(-0.5 * (apart / RESIDUAL_SPLIT_REACH) ** 2)
        return covariance

    def variance(self, rows: Groups) -> FloatArray:
        """The variance of each plan's residual [rows]."""
        total = sum(spread**2 for spread in RESIDUAL_SPREADS.values()) + SPLIT_SPREAD**2
        return np.full(len(rows), total)

    @staticmethod
    def _group_keys(plan: Plan) -> Sequence[object]:
        layout = plan.layout
        degrees, order = layout.degrees, plan.mapping.key
        return (
            plan.shape,
            degrees,
            (degrees, layout.micro_batch_size),
            "stock" if plan.schedule.custom is None else plan.schedule.label,
            (degrees, order),
            (layout, plan.schedule.label),
            (plan.shape, layout, plan.schedule.label, order),
        )


def _codes(keys: Iterable[object], numbers: dict[object, int]) -> list[int]:
    """A number for each key, equal for equal keys at the same position; `numbers` remembers them."""
    return [numbers.setdefault(position_and_key, len(numbers)) for position_and_key in enumerate(keys)]


def _layers_over_mean(plan: Plan) -> FloatArray:
    counts = np.array(plan.split.transformer_layers_per_stage, dtype=np.float64)
    return counts * len(counts) / max(1.0, counts.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanFeatures:
    """The features of n plans: `codes` [n, kinds] are categories, `end_layers` [n, 2] the first and the last
    stage's layers beyond an even share, in even shares."""

    codes: FloatArray
    end_layers: FloatArray

    def similarity(self, other: "PlanFeatures", *, reach: float) -> FloatArray:
        """The covariance of plans [n, m], from 1 for equal ones towards 0.

        A product of Laplacian kernels, so it is positive definite.
        """
        differs = self.codes[:, None, :] != other.codes[None, :, :]
        apart = differs @ WEIGHTS
        apart += np.abs(self.end_layers[:, None, :] - other.end_layers[None, :, :]).sum(axis=2) / SPLIT_REACH
        similarity: FloatArray = np.exp(-apart / reach)
        return similarity

    def fit_similarity(self, other: "PlanFeatures") -> FloatArray:
        """The similarity of plans in whether they fit in memory [n, m]: that is mostly the layout's."""
        differs = self.codes[:, None, :] != other.codes[None, :, :]
        similarity: FloatArray = np.exp(-(differs @ FIT_WEIGHTS))
        return similarity


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GpObservations:
    """Measurements [n]: the plan's index, the logarithm over the baseline, and the variance of its noise.

    Values with `in_search` [n] of 1 were divided by one measurement of the baseline and share its noise; all
    values have the noise of a launch too. `noise` is a launch's deviation, None where it is not known.
    """

    plan: Sequence[int]
    value: FloatArray
    variance: FloatArray
    in_search: FloatArray
    noise: float | None


def features_of(plans: Sequence[Plan]) -> PlanFeatures:
    """The features of `plans`."""
    numbers: dict[object, int] = {}
    rows, end_layers = [], []
    for plan in plans:
        layout, counts = plan.layout, plan.split.transformer_layers_per_stage
        keys = (
            plan.shape,
            (
                layout.degrees,
                layout.distributed_optimizer,
                layout.sequence_parallel,
                layout.tensor_partition,
            ),
            (
                layout.micro_batch_size,
                layout.recompute,
                layout.reduce_bucket_size,
                layout.allgather_bucket_size,
                layout.settings,
            ),
            (plan.schedule.label, plan.split.mtp_before_last),
            plan.mapping,
        )
        rows.append(_codes(keys, numbers))
        even = max(1.0, sum(counts) / len(counts))
        beyond = [(counts[0] - even) / even, (counts[-1] - even) / even]
        end_layers.append(beyond if len(counts) > 1 else [0.0, 0.0])
    return PlanFeatures(
        codes=np.array(rows, dtype=np.float64).reshape(len(rows), len(WEIGHTS)),
        end_layers=np.array(end_layers, dtype=np.float64).reshape(len(end_layers), 2),
    )


def draw(
    features: PlanFeatures,
    predicted: FloatArray,
    observations: GpObservations,
    *,
    count: int,
    generator: np.random.Generator,
) -> FloatArray:
    """`count` draws of every plan's logarithm over the baseline [count, plans], given the observations.

    `predicted` [plans] is the cost model's prediction of that logarithm, 0 where it has none.
    """
    options = []
    for reach in REACHES:
        similarity = features.similarity(features, reach=reach)
        noises = NOISE if observations.noise is None else (observations.noise,)
        for shared, independent, noise in itertools.product(SHARED, INDEPENDENT, noises):
            prior = _prior(similarity, predicted, shared=shared, independent=independent)
            likelihood = _likelihood(prior, predicted, observations, noise=noise)
            options.append((likelihood - 0.5 * (shared / USUAL_SHARED) ** 2, prior, noise))
    log_weights = np.array([log_weight for log_weight, _, _ in options])
    weights = np.exp(log_weights - log_weights.max())
    weights[weights < _LEAST_WEIGHT * weights.sum()] = 0.0
    chosen = generator.multinomial(count, weights / weights.sum())
    draws = [
        _posterior(prior, predicted, observations, noise=noise, count=int(times), generator=generator)
        for (_, prior, noise), times in zip(options, chosen, strict=True)
        if times
    ]
    return np.concatenate(draws)


def joint(
    mean: FloatArray,
    spread: FloatArray,
    features: PlanFeatures,
    *,
    count: int,
    generator: np.random.Generator,
) -> FloatArray:
    """Joint draws [count, plans] of plans with known means and deviations, correlated by their similarity."""
    similarity = features.similarity(features, reach=JOINT_REACH)
    return _normal(mean, similarity * spread[:, None] * spread[None, :], count=count, generator=generator)


def _prior(similarity: FloatArray, predicted: FloatArray, *, shared: float, independent: float) -> FloatArray:
    prior: FloatArray = shared**2 * similarity + OFFSET**2 + SLOPE**2 * np.outer(predicted, predicted)
    prior[np.diag_indices_from(prior)] += independent**2
    return prior


def _observed(prior: FloatArray, observations: GpObservations, *, noise: float) -> FloatArray:
    """The covariance of the measurements."""
    index = np.asarray(observations.plan)
    variance = observations.variance + noise**2 * observations.in_search
    covariance: FloatArray = prior[np.ix_(index, index)] + np.diag(variance)
    return covariance + noise**2 * np.outer(observations.in_search, observations.in_search)


def _likelihood(
    prior: FloatArray, predicted: FloatArray, observations: GpObservations, *, noise: float
) -> float:
    root = _root(_observed(prior, observations, noise=noise))
    whitened = np.linalg.solve(root, observations.value - predicted[np.asarray(observations.plan)])
    return float(-0.5 * whitened @ whitened - np.log(np.diag(root)).sum())


def _posterior(
    prior: FloatArray,
    predicted: FloatArray,
    observations: GpObservations,
    *,
    noise: float,
    count: int,
    generator: np.random.Generator,
) -> FloatArray:
    index = np.asarray(observations.plan)
    root = _root(_observed(prior, observations, noise=noise))
    across = np.linalg.solve(root, prior[index])
    mean = predicted + across.T @ np.linalg.solve(root, observations.value - predicted[index])
    return _normal(mean, prior - across.T @ across, count=count, generator=generator)


def _normal(
    mean: FloatArray, covariance: FloatArray, *, count: int, generator: np.random.Generator
) -> FloatArray:
    draws: FloatArray = mean + generator.standard_normal((count, len(mean))) @ _root(covariance).T
    return draws


def _root(matrix: FloatArray) -> FloatArray:
    """A lower triangular root of a covariance that rounding may have made a little indefinite."""
    size = max(1e-12, float(np.trace(matrix)) / len(matrix))
    for jitter in (1e-10, 1e-8, 1e-6, 1e-4):
        try:
            root: FloatArray = np.linalg.cholesky(matrix + jitter * size * np.eye(len(matrix)))
        except np.linalg.LinAlgError:
            continue
        return root
    raise AssertionError("a covariance is positive definite but for rounding")
