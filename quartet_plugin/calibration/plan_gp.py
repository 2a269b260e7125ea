"""What is believed of plans together: how their speeds vary from what was measured, and drawn from that.

The logarithm of a plan's objective over the baseline's is what the cost model says of it, times a slope,
plus a Gaussian process over what plans have in common, plus a part of each plan's own (Rasmussen and Williams
2006, section 2.7). How large these are is not chosen but weighed by the marginal likelihood of what was
measured, so few trials leave a wide outlook. Numpy alone.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.plan import Plan

# Deviations of the logarithm that are weighed: of what alike plans share (larger ones less likely than
# USUAL_SHARED), of each plan's own part, and of one launch where no plan was launched several times; and how
# far alike reaches.
SHARED = (0.02, 0.05, 0.1, 0.2, 0.4)
USUAL_SHARED = 0.15
OWN = (0.005, 0.02, 0.06)
NOISE = (0.01, 0.03, 0.08)
REACHES = (0.5, 1.0, 3.0)
# The same where means and deviations are given.
JOINT_REACH = 1.0
# Priors of the cost model's offset (around 0) and slope (around 1).
OFFSET, SLOPE = 0.3, 0.5
# How much plans part by a difference in the shape, the degrees, the micro-batch, the schedule, the mapping;
# a third of a stage's even share of layers more or less at an end counts as one.
WEIGHTS = np.array([1.0, 1.0, 0.4, 0.5, 0.5])
SPLIT_REACH = 1.0 / 3.0
# The same for whether they fit.
FIT_WEIGHTS = np.array([1.0, 2.0, 1.0, 0.5, 0.0])
# What is this much slower than the best says little about the top.
FAR = float(np.log(1.5))
_LEAST_WEIGHT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanFeatures:
    """What plans have in common: `codes` [n, kinds] are equal or not, `ends` [n, 2] differ by so much."""

    codes: FloatArray
    ends: FloatArray

    def alike(self, other: "PlanFeatures", *, reach: float) -> FloatArray:
        """1 for equal plans, towards 0 [n, m]: a product of Laplacian kernels, so positive definite."""
        differs = self.codes[:, None, :] != other.codes[None, :, :]
        apart = differs @ WEIGHTS
        apart += np.abs(self.ends[:, None, :] - other.ends[None, :, :]).sum(axis=2) / SPLIT_REACH
        found: FloatArray = np.exp(-apart / reach)
        return found

    def fits_alike(self, other: "PlanFeatures") -> FloatArray:
        """How much it says that one can run of whether the other can [n, m]: memory is the layout's."""
        differs = self.codes[:, None, :] != other.codes[None, :, :]
        found: FloatArray = np.exp(-(differs @ FIT_WEIGHTS))
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GpObservations:
    """What was measured [n]: the plan's index, the logarithm over the baseline, its own noise's variance.

    `in_search` [n] values were divided by one measurement of the baseline and share its noise; all of them
    have a launch's noise beside their own. `noise` is a launch's deviation, None where it is not known.
    """

    plan: Sequence[int]
    value: FloatArray
    variance: FloatArray
    in_search: FloatArray
    noise: float | None


def features_of(plans: Sequence[Plan]) -> PlanFeatures:
    """The features of `plans`."""
    known: dict[object, int] = {}
    rows, ends = [], []
    for plan in plans:
        layout, counts = plan.layout, plan.split.transformer_layers_per_stage
        keys = (
            plan.shape,
            (layout.degrees, layout.distributed_optimizer),
            (layout.micro_batch_size, layout.reduce_bucket_size, layout.allgather_bucket_size),
            plan.schedule.label,
            plan.mapping,
        )
        rows.append([known.setdefault((at, key), len(known)) for at, key in enumerate(keys)])
        even = max(1.0, sum(counts) / len(counts))
        ends.append([(counts[0] - even) / even, (counts[-1] - even) / even] if len(counts) > 1 else [0, 0])
    return PlanFeatures(
        codes=np.array(rows, dtype=np.float64).reshape(len(rows), len(WEIGHTS)),
        ends=np.array(ends, dtype=np.float64).reshape(len(ends), 2),
    )


def draw(
    features: PlanFeatures,
    predicted: FloatArray,
    evidence: GpObservations,
    *,
    count: int,
    generator: np.random.Generator,
) -> FloatArray:
    """`count` draws of every plan's logarithm over the baseline [count, plans], given the evidence.

    `predicted` [plans] is what the cost model says of it, 0 where it says nothing.
    """
    options = []
    for reach in REACHES:
        alike = features.alike(features, reach=reach)
        noises = NOISE if evidence.noise is None else (evidence.noise,)
        for shared, own, noise in itertools.product(SHARED, OWN, noises):
            prior = _prior(alike, predicted, shared=shared, own=own)
            likelihood = _likelihood(prior, predicted, evidence, noise=noise)
            options.append((likelihood - 0.5 * (shared / USUAL_SHARED) ** 2, prior, noise))
    weights = np.exp(np.array([one[0] for one in options]) - max(one[0] for one in options))
    weights[weights < _LEAST_WEIGHT * weights.sum()] = 0.0
    chosen = generator.multinomial(count, weights / weights.sum())
    found = [
        _posterior(prior, predicted, evidence, noise=noise, count=int(times), generator=generator)
        for (_, prior, noise), times in zip(options, chosen, strict=True)
        if times
    ]
    return np.concatenate(found)


def joint(
    mean: FloatArray,
    spread: FloatArray,
    features: PlanFeatures,
    *,
    count: int,
    generator: np.random.Generator,
) -> FloatArray:
    """Draws of plans whose means and deviations [plans] are known, as much together as they are alike."""
    alike = features.alike(features, reach=JOINT_REACH)
    root = _root(alike * spread[:, None] * spread[None, :])
    found: FloatArray = mean + generator.standard_normal((count, len(mean))) @ root.T
    return found


def _prior(alike: FloatArray, predicted: FloatArray, *, shared: float, own: float) -> FloatArray:
    found: FloatArray = shared**2 * alike + OFFSET**2 + SLOPE**2 * np.outer(predicted, predicted)
    found[np.diag_indices_from(found)] += own**2
    return found


def _observed(prior: FloatArray, evidence: GpObservations, *, noise: float) -> FloatArray:
    """The covariance of what was measured."""
    at = np.asarray(evidence.plan)
    found: FloatArray = prior[np.ix_(at, at)] + np.diag(evidence.variance + noise**2 * evidence.in_search)
    return found + noise**2 * np.outer(evidence.in_search, evidence.in_search)


def _likelihood(prior: FloatArray, predicted: FloatArray, evidence: GpObservations, *, noise: float) -> float:
    root = _root(_observed(prior, evidence, noise=noise))
    left = np.linalg.solve(root, evidence.value - predicted[np.asarray(evidence.plan)])
    return float(-0.5 * left @ left - np.log(np.diag(root)).sum())


def _posterior(
    prior: FloatArray,
    predicted: FloatArray,
    evidence: GpObservations,
    *,
    noise: float,
    count: int,
    generator: np.random.Generator,
) -> FloatArray:
    at = np.asarray(evidence.plan)
    root = _root(_observed(prior, evidence, noise=noise))
    across = np.linalg.solve(root, prior[at])
    mean = predicted + across.T @ np.linalg.solve(root, evidence.value - predicted[at])
    spread = _root(prior - across.T @ across)
    found: FloatArray = mean + generator.standard_normal((count, len(mean))) @ spread.T
    return found


def _root(matrix: FloatArray) -> FloatArray:
    """A lower triangular root of a covariance that rounding may have made a little indefinite."""
    size = max(1e-12, float(np.trace(matrix)) / len(matrix))
    for jitter in (1e-10, 1e-8, 1e-6, 1e-4):
        try:
            found: FloatArray = np.linalg.cholesky(matrix + jitter * size * np.eye(len(matrix)))
        except np.linalg.LinAlgError:
            continue
        return found
    raise AssertionError("a covariance is positive definite but for rounding")
