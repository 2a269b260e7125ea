"""The posterior of factors and residuals, on models whose answer is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.calibration.posterior import Measured, Model, PosteriorSample, fit
from quartet_plugin.model.costs import FloatArray

NUM_FACTORS = 4
SPREADS = np.full(NUM_FACTORS, 1.0)


def sums(parts: FloatArray) -> Model:
    """Times that are sums of parts [n, k], each with a factor."""

    def model(point: FloatArray) -> tuple[FloatArray, FloatArray]:
        each = parts * np.exp(point)
        total = each.sum(axis=1)
        return np.log(total), each / total[:, None]

    return model


def views_of(num: int, *, truth: FloatArray, seed: int, noise: float = 0.01) -> list[PosteriorSample]:
    generator = np.random.default_rng(seed)
    parts = np.exp(generator.normal(size=(num, NUM_FACTORS)))
    model = sums(parts)
    measured = Measured(
        log_s=model(truth)[0] + noise * generator.normal(size=num),
        noise=np.full(num, noise),
        covariance=np.zeros((num, num)),
    )
    return fit(model, measured, starts=[np.zeros(NUM_FACTORS)], spreads=SPREADS)


def moments(views: list[PosteriorSample]) -> tuple[FloatArray, FloatArray]:
    """Mean and deviation of the factors over the views."""
    weights, points = np.array([view.weight for view in views]), np.stack([view.point for view in views])
    mean = weights @ points
    return mean, np.sqrt(weights @ (points - mean) ** 2)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.floats(-1.2, 1.2), min_size=NUM_FACTORS, max_size=NUM_FACTORS))
def test_the_mean_converges_to_the_truth_and_the_views_to_each_other(seed: int, wrong: list[float]) -> None:
    truth = np.array(wrong)
    _, few = moments(views_of(3, truth=truth, seed=seed))
    mean, many = moments(views_of(60, truth=truth, seed=seed))
    assert np.abs(mean - truth).max() < 0.1
    assert (many**2).sum() < (few**2).sum()


def test_the_weights_sum_to_one_and_the_same_arguments_give_the_same_views() -> None:
    truth = np.array([1.0, -0.5, 0.2, 0.0])
    one, other = (views_of(8, truth=truth, seed=4) for _ in range(2))
    assert sum(view.weight for view in one) == pytest.approx(1.0)
    assert [view.point.tolist() for view in one] == [view.point.tolist() for view in other]


def test_without_measurements_the_prior_is_what_is_left() -> None:
    _, deviation = moments(views_of(1, truth=np.zeros(NUM_FACTORS), seed=0))
    assert deviation.max() > 0.6


def test_what_only_bounds_a_factor_leaves_it_open_on_that_side() -> None:
    """Of two stages the slower one is seen; how fast the other is stays open below it."""

    def model(point: FloatArray) -> tuple[FloatArray, FloatArray]:
        at = int(np.argmax(point))
        return point[at : at + 1], np.eye(2)[at : at + 1]

    measured = Measured(log_s=np.array([1.0]), noise=np.array([0.01]), covariance=np.zeros((1, 1)))
    views = fit(model, measured, starts=[np.zeros(2), np.array([0.0, 1.0])], spreads=np.ones(2))
    points = np.stack([view.point for view in views])
    assert points.max(axis=1) == pytest.approx(np.ones(len(views)), abs=0.2)
    assert points.min(axis=1).min() < -0.5


def shared(deviation: float, *, ratio: float, others: int) -> tuple[FloatArray, FloatArray]:
    """One known factor; `others` plans as predicted, three alike ones off by `ratio`: a fourth alike, and one
    that is like none."""
    num = others + 3
    alike = np.zeros((num, num))
    alike[others:, others:] = deviation**2
    log_s = np.zeros(num)
    log_s[others:] = np.log(ratio)

    def model(point: FloatArray) -> tuple[FloatArray, FloatArray]:
        return np.repeat(point, num), np.ones((num, 1))

    views = fit(
        model,
        Measured(log_s=log_s, noise=np.full(num, 0.02), covariance=alike),
        starts=[np.zeros(1)],
        spreads=np.array([0.05]),
    )
    rows = np.zeros((2, num))
    rows[0, others:] = deviation**2
    own = np.full(2, deviation**2)
    each = [view.correct(np.repeat(view.point, 2), shared=rows, own=own) for view in views]
    weights = np.array([view.weight for view in views])
    return weights @ np.stack([one for one, _ in each]), weights @ np.stack([wide for _, wide in each])


def test_alike_plans_share_what_the_model_cannot_explain_and_others_do_not() -> None:
    log_s, spread = shared(0.1, ratio=1.2, others=6)
    assert 0.1 < log_s[0] < np.log(1.2)
    assert abs(log_s[1]) < 0.04
    assert spread[0] < spread[1]


def test_what_is_shared_is_shrunk_the_more_the_smaller_it_is_expected_to_be() -> None:
    little, _ = shared(0.01, ratio=1.2, others=6)
    much, _ = shared(0.1, ratio=1.2, others=6)
    assert little[0] < much[0]


def test_one_measurement_that_is_far_off_does_not_carry_the_others_away() -> None:
    num = 12
    log_s = np.zeros(num)
    log_s[-1] = np.log(3.0)

    def model(point: FloatArray) -> tuple[FloatArray, FloatArray]:
        return np.repeat(point, num), np.ones((num, 1))

    views = fit(
        model,
        Measured(log_s=log_s, noise=np.full(num, 0.02), covariance=np.zeros((num, num))),
        starts=[np.zeros(1)],
        spreads=np.array([1.0]),
    )
    assert abs(float(views[0].point[0])) < 0.5 * np.log(3.0) / num
