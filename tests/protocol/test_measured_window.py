"""Which iterations of a trial are measured, and when they are enough."""

import random
import statistics
from collections.abc import Sequence

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.protocol.attempt_files import TrialSpec
from quartet_plugin.protocol.measured_window import EarlyEnd, first_measured, relative_error, why_enough

RULE = EarlyEnd(least=4, precision=0.02, slower_than_s=1.2)


def start(times: Sequence[float], *, least: int = 1, most: int = 10, num_measured: int = 4) -> int:
    """The start of the measured iterations."""
    return first_measured(times, least=least, most=most, num_measured=num_measured)


def noisy(num: int, *, median: float = 1.0, noise: float = 0.03, seed: int = 0) -> list[float]:
    """Seconds of steady iterations."""
    generator = random.Random(seed)
    return [median * generator.lognormvariate(0.0, noise) for _ in range(num)]


def spec(**changes: object) -> TrialSpec:
    """A trial that decides both."""
    values: dict[str, object] = {"warmup": 1, "measure": 10, "max_warmup": 10, "early_end": RULE, **changes}
    return TrialSpec(attempt_id="a" * 32, folder="/x", plan_key=None, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slow", "expected"),
    [
        ([60.0], 1),
        ([60.0, 9.0], 2),
        ([60.0, 1.5, 1.5, 4.0], 4),
        ([5.0, 3.0, 2.0, 1.6, 1.3], 5),
        ([60.0] + 9 * [1.4], 10),
    ],
    ids=["compile", "twice", "graphs captured", "decay", "ramp"],
)
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_slow_first_iterations_are_not_measured(slow: list[float], expected: int, noise: float) -> None:
    assert start([*slow, *noisy(10, noise=noise)]) == expected


def test_steady_iterations_are_all_measured() -> None:
    starts = [start([9.0, *noisy(11, noise=0.05, seed=seed)]) for seed in range(100)]
    assert statistics.mean(begin == 1 for begin in starts) > 0.9


def test_the_start_is_at_least_and_at_most_what_is_asked() -> None:
    assert start(noisy(12), least=5) == 5
    assert start([*([3.0] * 8), *noisy(10)], most=6) == 6
    assert start([9.0, 9.0, 1.0]) == 1


def test_one_slow_iteration_in_the_middle_is_measured() -> None:
    assert start([9.0, 1.0, 1.01, 0.99, 1.4, 1.0, 1.01, 1.0, 0.99]) == 1


def test_iterations_that_become_slower_are_measured_from_the_first_on() -> None:
    assert start([9.0, 1.0, 1.0, 1.0, 1.3, 1.3, 1.3, 1.3, 1.3, 1.3]) == 1


def test_a_median_that_is_known_well_is_enough() -> None:
    assert why_enough([1.0, 1.001, 0.999], RULE) is None
    assert why_enough([1.0, 1.001, 0.999, 1.0], RULE) == "precise"
    assert why_enough([1.0, 1.2, 0.8, 1.1], RULE) is None


def test_iterations_that_follow_anyway_count() -> None:
    assert why_enough([1.0, 1.001, 0.999], RULE, num_later=2) == "precise"
    assert why_enough([1.0, 1.001], RULE, num_later=2) is None


def test_a_median_that_is_surely_above_the_limit_is_enough() -> None:
    assert why_enough([1.4, 1.45, 1.38, 1.41], RULE) == "slower"
    assert why_enough([1.4, 1.45, 1.38], RULE, num_later=2) == "precise"
    assert why_enough([1.22, 1.23, 1.22, 1.22], RULE) == "precise"
    assert why_enough([1.9, 1.9, 1.9, 1.9, 1.9, 1.0], RULE) != "slower"
    never = EarlyEnd(least=4, precision=0.02)
    assert why_enough([1.4, 1.45, 1.38, 1.41], never) == "precise"


def ended(times: Sequence[float], rule: EarlyEnd) -> tuple[int, str | None]:
    """After how many iterations, and why, a trial that looks after each of them ends."""
    for count in range(1, len(times) + 1):
        reason = why_enough(times[:count], rule)
        if reason is not None:
            return count, reason
    return len(times), None


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
def test_a_plan_as_fast_as_the_best_is_never_slower_for_certain(noise: float) -> None:
    """The limit is 1.1 times the best's seconds or more, by which no lucky plan wins and few unlucky end."""
    rule = EarlyEnd(least=4, precision=0.001, slower_than_s=1.1)
    reasons = [ended(noisy(10, noise=noise, seed=seed), rule)[1] for seed in range(300)]
    assert reasons.count("slower") <= 6


def test_the_number_of_iterations_favours_no_plan() -> None:
    """A trial that stops where its scatter is small has the median of one with a fixed number, on average."""
    rule = EarlyEnd(least=4, precision=0.02)
    medians = []
    counts = []
    for seed in range(600):
        times = noisy(10, noise=0.05, seed=seed)
        count, _ = ended(times, rule)
        counts.append(count)
        medians.append(statistics.median(times[:count]))
    assert min(counts) < statistics.mean(counts) < 10
    assert statistics.mean(medians) == pytest.approx(1.0, abs=0.006)


def test_the_error_is_that_of_a_median() -> None:
    errors = [relative_error(noisy(9, noise=0.05, seed=seed)) for seed in range(200)]
    medians = [statistics.median(noisy(9, noise=0.05, seed=seed)) for seed in range(200)]
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(medians), rel=0.2)
    assert relative_error([1.0]) == float("inf")
    assert relative_error([0.0, 0.0]) == float("inf")


def test_a_fixed_window_is_what_was_asked() -> None:
    fixed = spec(warmup=2, measure=3, max_warmup=None, early_end=None)
    times = [9.0, 9.0, 9.0, 1.0, 1.0, 1.0]
    assert fixed.measured(times) == range(2, 5)
    assert (fixed.num_iterations, fixed.least_measured) == (5, 3)
    assert [fixed.why_enough(times[:n], num_later=0) for n in (4, 5)] == [None, "complete"]


def test_a_trial_measures_the_steady_iterations_alone() -> None:
    times = [30.0, 2.0, 2.0, 1.0, 1.001, 0.999, 1.0]
    trial = spec()
    assert trial.measured(times) == range(3, 7)
    assert trial.why_enough(times[:4], num_later=2) is None
    assert trial.why_enough(times, num_later=2) == "precise"
    assert trial.num_iterations == 20


def test_a_fixed_number_is_measured_from_a_steady_start_on() -> None:
    trial = spec(measure=6, early_end=None)
    times = [30.0, 2.0, 2.0, *noisy(20, noise=0.01)]
    ends = next(n for n in range(1, len(times)) if trial.why_enough(times[:n], num_later=2)) + 2
    assert trial.measured(times[:ends]) == range(3, 9)


@pytest.mark.parametrize("slow", [0, 2, 4, 8])
@pytest.mark.parametrize("noise", [0.0, 0.03, 0.3])
def test_a_trial_ends_by_itself_and_has_measured_enough(slow: int, noise: float) -> None:
    trial = spec(early_end=EarlyEnd(least=4, precision=0.02))
    times = [*(3.0 for _ in range(slow)), *noisy(40, noise=noise, seed=slow)]
    ends = next(n for n in range(1, len(times)) if trial.why_enough(times[:n], num_later=2)) + 2
    assert ends <= trial.num_iterations
    assert trial.least_measured <= len(trial.measured(times[:ends])) <= trial.measure


def test_a_most_below_the_least_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_warmup: 1; must be at least warmup"):
        spec(warmup=2, max_warmup=1)
