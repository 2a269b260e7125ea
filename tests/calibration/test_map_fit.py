"""Planted parameters come back, with intervals that hold them as often as they say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.calibration.map_fit import LEAST_ERROR, Array, Model, fit

NUM_MEASUREMENTS, NUM_PARAMETERS = 60, 4


def shares(seed: int) -> Array:
    """What each measurement spends on each term, at the prior."""
    return np.random.default_rng(seed).uniform(0.05, 1.0, (NUM_MEASUREMENTS, NUM_PARAMETERS))


def model_of(table: Array) -> Model:
    """Sums of terms, each multiplied by its parameter."""
    return lambda point: np.log(table @ np.exp(point))


@given(
    seed=st.integers(0, 10_000),
    planted=st.lists(st.floats(-1.0, 1.0), min_size=NUM_PARAMETERS, max_size=NUM_PARAMETERS),
)
@settings(max_examples=30, deadline=None)
def test_planted_parameters_come_back(seed: int, planted: list[float]) -> None:
    table, true = shares(seed), np.array(planted)
    noise = np.random.default_rng(seed + 1).normal(0.0, 0.02, NUM_MEASUREMENTS)

    found = fit(
        model_of(table),
        measured=np.log(table @ np.exp(true)) + noise,
        spread=np.full(NUM_MEASUREMENTS, 0.02),
        prior_spread=np.full(NUM_PARAMETERS, 1.0),
    )

    off = np.abs(found.mean - true) / np.sqrt(np.diag(found.covariance))
    assert off.max() < 5.0
    assert np.abs(found.mean - true).max() < 0.5


def test_intervals_hold_what_they_promise() -> None:
    """The planted value lies inside the 95 % interval in about 95 of 100 draws."""
    inside, draws = 0, 60
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        table, true = shares(seed), rng.normal(0.0, 0.5, NUM_PARAMETERS)
        found = fit(
            model_of(table),
            measured=np.log(table @ np.exp(true)) + rng.normal(0.0, 0.03, NUM_MEASUREMENTS),
            spread=np.full(NUM_MEASUREMENTS, 0.03),
            prior_spread=np.full(NUM_PARAMETERS, 1.0),
        )
        width = 1.96 * np.sqrt(np.diag(found.covariance))
        inside += int(np.sum(np.abs(found.mean - true) <= width))
    assert 0.88 <= inside / (draws * NUM_PARAMETERS) <= 1.0


def test_what_nothing_depends_on_keeps_its_prior() -> None:
    table = shares(3)
    table[:, 2] = 0.0
    found = fit(
        model_of(table),
        measured=np.log(2 * table.sum(axis=1)),
        spread=np.full(NUM_MEASUREMENTS, 0.02),
        prior_spread=np.full(NUM_PARAMETERS, 0.7),
    )
    assert found.mean[2] == pytest.approx(0.0, abs=1e-6)
    assert np.sqrt(found.covariance[2, 2]) == pytest.approx(0.7, rel=1e-6)


def test_an_outlier_moves_little() -> None:
    table = shares(5)
    clean = np.log(table.sum(axis=1))
    spoiled = clean.copy()
    spoiled[7] += 3.0

    def mean(measured: Array) -> Array:
        found = fit(
            model_of(table),
            measured=measured,
            spread=np.full(NUM_MEASUREMENTS, 0.02),
            prior_spread=np.full(NUM_PARAMETERS, 1.0),
        )
        return found.mean

    assert np.abs(mean(spoiled) - mean(clean)).max() < 0.03


@pytest.mark.parametrize("error", [0.02, 0.1])
def test_the_models_own_error_is_estimated(error: float) -> None:
    rng, table = np.random.default_rng(1), shares(1)
    found = fit(
        model_of(table),
        measured=np.log(table.sum(axis=1)) + rng.normal(0.0, error, NUM_MEASUREMENTS),
        spread=np.full(NUM_MEASUREMENTS, 0.002),
        prior_spread=np.full(NUM_PARAMETERS, 1.0),
    )
    assert found.error[0] == pytest.approx(error, rel=0.35)


def test_groups_have_errors_of_their_own() -> None:
    rng, table = np.random.default_rng(2), shares(2)
    groups = [at % 2 for at in range(NUM_MEASUREMENTS)]
    noise = np.where(np.array(groups) == 1, rng.normal(0.0, 0.1, NUM_MEASUREMENTS), 0.0)
    found = fit(
        model_of(table),
        measured=np.log(table.sum(axis=1)) + noise,
        spread=np.full(NUM_MEASUREMENTS, 0.002),
        prior_spread=np.full(NUM_PARAMETERS, 1.0),
        groups=groups,
    )
    assert found.error[0] < 0.03
    assert found.error[1] > 0.06
    assert found.error[0] >= LEAST_ERROR


def test_one_measurement_that_fits_does_not_make_the_model_exact() -> None:
    found = fit(
        model_of(np.ones((1, 1))),
        measured=np.array([0.3]),
        spread=np.array([0.01]),
        prior_spread=np.array([1.0]),
    )
    assert found.mean[0] == pytest.approx(0.3, abs=0.01)
    assert found.error[0] > 0.03
