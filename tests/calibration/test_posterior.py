"""The posterior of coefficients and residuals, on models whose answer is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.calibration.posterior import Measured, Model, PosteriorSample, fit
from quartet_plugin.model.costs import FloatArray

NUM_COEFFICIENTS = 4
SPREADS = np.full(NUM_COEFFICIENTS, 1.0)


def sums(parts: FloatArray) -> Model:
    """Times that are sums of parts [n, k], each with a coefficient."""

    def model(point: FloatArray) -> tuple[FloatArray, FloatArray]:
        each = parts * np.exp(point)
        total = each.sum(axis=1)
        return np.log(total), each / total[:, None]

    return model


def samples_of(num: int, *, truth: FloatArray, seed: int, noise: float = 0.01) -> list[PosteriorSample]:
    generator = np.random.default_rng(seed)
    parts = np.exp(generator.normal(size=(num, NUM_COEFFICIENTS)))
    model = sums(parts)
    measured = Measured(
        log_s=model(truth)[0] + noise * generator.normal(size=num),
        noise=np.full(num, noise),
        covariance=np.zeros((num, num)),
    )
    return fit(model, measured, starts=[np.zeros(NUM_COEFFICIENTS)], spreads=SPREADS)


def moments(samples: list[PosteriorSample]) -> tuple[FloatArray, FloatArray]:
    """Mean and deviation of the coefficients over the samples."""
    weights, points = (
        np.array([sample.weight for sample in samples]),
        np.stack([sample.point for sample in samples]),
    )
    mean = weights @ points
    return mean, np.sqrt(weights @ (points - mean) ** 2)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**31),
    st.lists(st.floats(-1.2, 1.2), min_size=NUM_COEFFICIENTS, max_size=NUM_COEFFICIENTS),
)
def test_the_mean_converges_to_the_truth_and_the_samples_to_each_other(seed: int, wrong: list[float]) -> None:
    truth = np.array(wrong)
    _, few = moments(samples_of(3, truth=truth, seed=seed))
    mean, many = moments(samples_of(60, truth=truth, seed=seed))
    assert np.abs(mean - truth).max() < 0.1
    assert (many**2).sum() < (few**2).sum()


def test_the_weights_sum_to_one_and_the_same_arguments_give_the_same_samples() -> None:
    truth = np.array([1.0, -0.5, 0.2, 0.0])
    first, second = (samples_of(8, truth=truth, seed=4) for _ in range(2))
    assert sum(sample.weight for sample in first) == pytest.approx(1.0)
    assert [sample.point.tolist() for sample in first] == [sample.point.tolist() for sample in second]


def test_without_measurements_the_prior_is_what_is_left() -> None:
    _, deviation = moments(samples_of(1, truth=np.zeros(NUM_COEFFICIENTS), seed=0))
    assert deviation.max() > 0.6


def test_what_only_bounds_a_factor_leaves_it_open_on_that_side() -> None:
    """Of two stages the slower one is seen; how fast the other is stays open below it."""

    def model(point: FloatArray) -> tuple[FloatArray, FloatArray]:
        at = int(np.argmax(point))
        return point[at : at + 1], np.eye(2)[at : at + 1]

    measured = Measured(log_s=np.array([1.0]), noise=np.array([0.01]), covariance=np.zeros((1, 1)))
    samples = fit(model, measured, starts=[np.zeros(2), np.array([0.0, 1.0])], spreads=np.ones(2))
    points = np.stack([sample.point for sample in samples])
    assert points.max(axis=1) == pytest.approx(np.ones(len(samples)), abs=0.2)
    assert points.min(axis=1).min() < -0.5


def shared(deviation: float, *, ratio: float, others: int) -> tuple[FloatArray, FloatArray]:
    """The corrections of a plan like three that are off by `ratio`, and of a plan like no other.

    `others` plans take what is predicted; the one coefficient is known.
    """
    num = others + 3
    alike = np.zeros((num, num))
    alike[others:, others:] = deviation**2
    log_s = np.zeros(num)
    log_s[others:] = np.log(ratio)

    def model(point: FloatArray) -> tuple[FloatArray, FloatArray]:
        return np.repeat(point, num), np.ones((num, 1))

    samples = fit(
        model,
        Measured(log_s=log_s, noise=np.full(num, 0.02), covariance=alike),
        starts=[np.zeros(1)],
        spreads=np.array([0.05]),
    )
    rows = np.zeros((2, num))
    rows[0, others:] = deviation**2
    variance = np.full(2, deviation**2)
    each = [sample.correct(np.repeat(sample.point, 2), shared=rows, variance=variance) for sample in samples]
    weights = np.array([sample.weight for sample in samples])
    return weights @ np.stack([log_s for log_s, _ in each]), weights @ np.stack(
        [spread for _, spread in each]
    )


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

    samples = fit(
        model,
        Measured(log_s=log_s, noise=np.full(num, 0.02), covariance=np.zeros((num, num))),
        starts=[np.zeros(1)],
        spreads=np.array([1.0]),
    )
    assert abs(float(samples[0].point[0])) < 0.5 * np.log(3.0) / num


def predicted_spread(samples: list[PosteriorSample], at: int) -> float:
    """The deviation of a coefficient over the samples, by their weights."""
    return float(moments(samples)[1][at])


def noisy_sums(noise: float, *, stated: float, num: int = 24) -> tuple[Model, Measured]:
    """Launches of sums of two parts whose noise is `noise`, and is stated as `stated`."""
    generator = np.random.default_rng(5)
    model = sums(np.exp(generator.normal(size=(num, 2))))
    measured = Measured(
        log_s=model(np.zeros(2))[0] + noise * generator.normal(size=num),
        noise=np.full(num, stated),
        covariance=1e-8 * np.eye(num),
    )
    return model, measured


def test_launches_that_are_noisier_than_stated_leave_more_open() -> None:
    deviations = []
    for noise in (0.02, 0.05):
        model, measured = noisy_sums(noise, stated=0.02)
        samples = fit(model, measured, starts=[np.zeros(2)], spreads=np.ones(2))
        deviations.append(predicted_spread(samples, 0))
    assert deviations[1] > 1.8 * deviations[0]


@pytest.mark.parametrize(("slowdown", "is_alike"), [(0.0, True), (0.7, False)])
def test_devices_are_alike_until_times_tell_them_apart(slowdown: float, is_alike: bool) -> None:
    """The first coefficient is of both devices, the others of one each; a time is that of the slower one."""

    def model(point: FloatArray) -> tuple[FloatArray, FloatArray]:
        log_s, slopes = np.empty(8), np.zeros((8, 3))
        for row in range(8):
            of_devices = np.array([0.0, 0.4 * (row - 3.5)]) + point[1:]
            slowest = int(np.argmax(of_devices))
            log_s[row] = point[0] + of_devices[slowest]
            slopes[row, [0, 1 + slowest]] = 1.0
        return log_s, slopes

    truth = np.array([0.3, slowdown, 0.0])
    noise = 0.02 * np.random.default_rng(2).normal(size=8)
    measured = Measured(log_s=model(truth)[0] + noise, noise=np.full(8, 0.02), covariance=1e-8 * np.eye(8))
    spreads = np.array([3.0, 0.35, 0.35])
    samples = fit(model, measured, starts=[np.zeros(3)], spreads=spreads, slowdowns=slice(1, None))
    apart = samples[0].point[1] - samples[0].point[2]
    assert abs(apart) < 0.05 if is_alike else apart == pytest.approx(slowdown, abs=0.1)
    wide = fit(model, measured, starts=[np.zeros(3)], spreads=spreads)
    own = predicted_spread(samples, 1)
    assert (own < 0.5 * predicted_spread(wide, 1)) == is_alike
