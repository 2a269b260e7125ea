"""How far launches of a plan lie apart, as their iterations have it."""

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_plugin.calibration.observations import LEAST_NOISE, launch_noise, spread_of
from quartet_plugin.model.trial_record import TrialRecord

PLAIN = TrialRecord(verdict="measured", outcome="OK", reason="", attempt_id="", value=1.0, iteration_s=1.0)


def scattered(deviation: float, *, count: int, seed: int = 0) -> TrialRecord:
    generator = random.Random(seed)
    times = [generator.gauss(1.0, deviation) for _ in range(count)]
    return replace(PLAIN, num_iterations=count, spread=spread_of(times))


def test_without_iterations_it_is_what_is_assumed() -> None:
    assert launch_noise([]) == LEAST_NOISE
    assert launch_noise([PLAIN, replace(PLAIN, spread=0.3)]) == LEAST_NOISE


def test_it_is_the_scatter_of_iterations_however_many_a_launch_has() -> None:
    for count in (6, 60):
        found = launch_noise([scattered(0.1, count=count, seed=at) for at in range(400)])
        assert found == pytest.approx(0.1, rel=0.2)


def test_one_launch_of_few_iterations_is_not_believed_at_its_word() -> None:
    alone = [launch_noise([scattered(0.1, count=5, seed=at)]) for at in range(200)]
    assert LEAST_NOISE < statistics.mean(alone) < 0.09


@given(st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(1, 50)), max_size=20))
def test_it_is_never_below_what_two_quiet_launches_differ_by(rows: list[tuple[float, int]]) -> None:
    trials = [replace(PLAIN, spread=spread, num_iterations=count) for spread, count in rows]
    most = max((spread * count**0.5 for spread, count in rows), default=0.0)
    assert LEAST_NOISE <= launch_noise(trials) <= max(LEAST_NOISE, most) + 1e-12
