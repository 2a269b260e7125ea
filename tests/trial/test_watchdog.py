"""Deadlines, by a clock that the test sets, and the detection of slow attempts."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.protocol.rank_files import Heartbeat
from quartet_plugin.trial.request import FIRST_STEP_CAP_S, Timeouts
from quartet_plugin.trial.watchdog import MIN_ITERATIONS, SlowdownDetector, Watchdog
from tests.trial.factory import beat

LIMITS = Timeouts(init_s=100, first_step_s=50, step_s=10, shutdown_s=5)


@dataclass
class Clock:
    """A clock."""

    now: float = 1e6

    def __call__(self) -> float:
        """The time."""
        return self.now


def watchdog(clock: Clock, **changes: Any) -> Watchdog:
    """Of two ranks."""
    options: dict[str, Any] = {"deadline_s": 600.0, "predicted_s": None, "num_processes": 2}
    return Watchdog(LIMITS, clock=clock, **{**options, **changes})


@pytest.mark.parametrize(
    ("phase", "iteration", "limit_s"),
    [
        ("import", 0, 100.0),
        ("init", 0, 100.0),
        ("warmup", 0, 51.0),
        ("warmup", 1, 11.0),
        ("measure", 9, 11.0),
        ("done", 9, 15.0),
    ],
)
def test_each_phase_has_its_own_limit(phase: str, iteration: int, limit_s: float) -> None:
    clock = Clock()
    dog = watchdog(clock)
    beats = [beat(0, phase=phase, iteration=iteration), beat(1, phase=phase, iteration=iteration)]
    dog.observe(beats)
    clock.now += limit_s
    dog.observe(beats)
    assert dog.expired() is None
    clock.now += 0.1
    dog.observe(beats)
    expiry = dog.expired()
    assert expiry is not None
    assert (expiry.phase, expiry.rank, expiry.is_wall) == (phase, 0, False)


def test_a_rank_that_moves_is_left_alone_and_one_that_does_not_is_named() -> None:
    clock = Clock()
    dog = watchdog(clock, predicted_s=1.0)
    dog.observe([beat(0, iteration=1), beat(1, iteration=1)])
    for step in range(2, 4):
        clock.now += 9.0
        dog.observe([beat(0, iteration=step), beat(1, iteration=1)])
    expiry = dog.expired()
    assert expiry is not None
    assert expiry.rank == 1
    assert "rank 1" in str(expiry)


def test_a_rank_that_never_shows_up() -> None:
    clock = Clock()
    dog = watchdog(clock)
    dog.observe([beat(0, phase="init", iteration=0)])
    clock.now += 100.1
    expiry = dog.expired()
    assert expiry is not None
    assert (expiry.phase, expiry.rank) == ("launch", 1)
    quiet = watchdog(clock, num_processes=None)
    clock.now += 100.1
    expiry = quiet.expired()
    assert expiry is not None
    assert expiry.rank is None


def test_the_deadline_of_the_whole_trial() -> None:
    clock = Clock()
    dog = watchdog(clock, deadline_s=20.0)
    clock.now += 20.1
    dog.observe([beat(0), beat(1)])
    expiry = dog.expired()
    assert expiry is not None
    assert expiry.is_wall


def test_clocks_of_ranks_may_jump() -> None:
    """Row 34: only our own monotonic clock counts; the beat's own time is not read."""
    clock = Clock()
    dog = watchdog(clock)
    dog.observe([beat(0, time=1e9), beat(1, time=0.0)])
    clock.now += 5
    dog.observe([beat(0, time=0.0), beat(1, time=1e9)])
    assert dog.expired() is None
    clock.now += 6.5
    dog.observe([beat(0, time=2e9), beat(1, time=3e9)])
    assert dog.expired() is not None


def test_slow_steps_that_are_predicted_are_allowed() -> None:
    clock = Clock()
    dog = watchdog(clock, predicted_s=20.0)
    dog.observe([beat(0), beat(1)])
    clock.now += 100.0
    assert dog.expired() is None
    assert LIMITS.first_step_limit_s(20.0) == 200.0


def test_steps_that_nobody_predicted_are_learned() -> None:
    """Row 6: the user's command on a large model; what its longest step took is no hang."""
    clock = Clock()
    dog = watchdog(clock)
    dog.observe([beat(0, phase="warmup", iteration=0), beat(1, phase="warmup", iteration=0)])
    clock.now += 40.0
    dog.observe([beat(0, iteration=1), beat(1, iteration=1)])
    clock.now += 5 * 40.0
    dog.observe([beat(0, iteration=1), beat(1, iteration=1)])
    assert dog.expired() is None
    clock.now += 1.5
    assert dog.expired() is not None


def test_several_steps_between_two_looks_are_not_one_long_one() -> None:
    clock = Clock()
    dog = watchdog(clock)
    dog.observe([beat(0, iteration=1), beat(1, iteration=1)])
    clock.now += 10.0
    dog.observe([beat(0, iteration=11), beat(1, iteration=11)])
    clock.now += 11.5
    assert dog.expired() is not None


def test_a_prediction_goes_before_what_was_seen() -> None:
    clock = Clock()
    dog = watchdog(clock, predicted_s=1.0)
    dog.observe([beat(0, iteration=1), beat(1, iteration=1)])
    clock.now += 9.0
    dog.observe([beat(0, iteration=2), beat(1, iteration=2)])
    clock.now += 11.5
    assert dog.expired() is not None


def test_time_in_which_nothing_could_be_seen_does_not_count() -> None:
    clock = Clock()
    dog = watchdog(clock)
    dog.observe([beat(0), beat(1)])
    clock.now += 30.0
    dog.forgive(25.0)
    assert dog.expired() is None
    clock.now += 6.5
    assert dog.expired() is not None


def test_a_longer_deadline_gives_the_start_longer_and_a_shorter_one_takes_nothing() -> None:
    assert Timeouts.within(30.0) == Timeouts()
    assert Timeouts.within(600.0) == replace(Timeouts(), first_step_cap_s=FIRST_STEP_CAP_S)
    longer = Timeouts.within(3000.0)
    assert (longer.init_s, longer.first_step_s, longer.step_s) == (1500.0, 600.0, Timeouts().step_s)
    cold = Timeouts.cold(3000.0)
    assert (cold.init_s, cold.first_step_s) == (4500.0, 3000.0)


def test_starts_are_learned_from_earlier_trials() -> None:
    learned = Timeouts().learned(start_s=200.0, first_step_s=70.0)
    assert (learned.init_s, learned.first_step_s) == (600.0, 210.0)
    assert learned.learned(start_s=1.0, first_step_s=1.0) == learned
    assert Timeouts().learned(start_s=0.0, first_step_s=900.0).init_s == 2700.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"shutdown_s": 0.0},
        {"step_s": 5.0},
        {"first_step_s": 20.0},
        {"init_s": 100.0},
        {"step_s": float("nan")},
        {"init_s": float("inf")},
        {"step_factor": 0.5},
        {"first_step_cap_s": -1.0},
    ],
)
def test_limits_that_are_out_of_order_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="timeouts"):
        Timeouts(**wrong)


def first_step(seconds: float, *, quiet_from_s: float, cap_s: float = 3600.0) -> float | None:
    """When a first step of so many seconds is ended as a hang; one rank of two progresses for a while."""
    clock = Clock()
    limits = replace(LIMITS, first_step_cap_s=cap_s)
    dog = Watchdog(limits, clock=clock, deadline_s=600.0, predicted_s=None, num_processes=2)
    for now in range(int(seconds)):
        busy = beat(0, phase="warmup", iteration=0, progress=min(now, int(quiet_from_s)))
        dog.observe([busy, beat(1, phase="warmup", iteration=0, progress=1)])
        if dog.expired() is not None:
            return now
        clock.now += 1.0
    for step in range(1, 8):
        dog.observe([beat(rank, phase="measure", iteration=step) for rank in (0, 1)])
        if dog.expired() is not None:
            return seconds + step
        clock.now += 5.0
    return None


def test_a_first_step_of_24_minutes_in_which_a_rank_progresses_is_no_hang() -> None:
    """Its deadline of ten minutes is later by what it took."""
    assert first_step(24 * 60, quiet_from_s=24 * 60) is None


def test_a_first_step_is_a_hang_once_no_rank_progresses() -> None:
    assert first_step(24 * 60, quiet_from_s=300) == pytest.approx(300 + 51, abs=2)


def test_a_first_step_that_goes_on_for_ever_is_ended_at_the_cap() -> None:
    assert first_step(7000, quiet_from_s=7000) == pytest.approx(3600, abs=3)


def test_without_a_cap_progress_gives_no_more_time() -> None:
    assert first_step(24 * 60, quiet_from_s=24 * 60, cap_s=0.0) == pytest.approx(51, abs=2)


def detector_of(limit_s: float | None, *, warmup: int = 2) -> SlowdownDetector:
    return SlowdownDetector(warmup=warmup, slow_above_s=limit_s, clock=Clock())


def look(detector: SlowdownDetector, *beats: Heartbeat, seconds: float) -> bool:
    """Whether it is slow, `seconds` after the look before."""
    assert isinstance(detector.clock, Clock)
    detector.clock.now += seconds
    return detector.is_slow(beats)


def looks(detector: SlowdownDetector, *, seconds: float, num_iterations: int, warmup: int = 2) -> list[bool]:
    return [
        look(detector, *(beat(rank, iteration=warmup + step) for rank in (0, 1)), seconds=seconds)
        for step in range(num_iterations + 1)
    ]


def test_some_iterations_above_the_limit_are_slow() -> None:
    verdicts = looks(detector_of(1.0), seconds=1.5, num_iterations=5)
    assert verdicts == [False] * MIN_ITERATIONS + [True] * (6 - MIN_ITERATIONS)


@pytest.mark.parametrize("limit", [None, 1.0, 2.0])
def test_iterations_below_the_limit_are_never_slow(limit: float | None) -> None:
    assert not any(looks(detector_of(limit), seconds=0.9, num_iterations=20))


def test_warm_up_does_not_count_as_slow() -> None:
    detector = detector_of(1.0)
    for step in range(2):
        assert not look(detector, beat(0, iteration=step, phase="warmup"), seconds=10.0)
    assert not any(looks(detector, seconds=0.5, num_iterations=10))


def test_the_slowest_rank_is_compared_with_the_limit() -> None:
    detector = detector_of(1.0, warmup=0)
    verdicts = [
        look(detector, beat(0, iteration=3 * step), beat(1, iteration=step), seconds=2.0)
        for step in range(MIN_ITERATIONS + 1)
    ]
    assert verdicts[-1]
    assert not any(verdicts[:-1])


@pytest.mark.parametrize("ahead_s", [-30.0, 0.0, 30.0])
def test_clocks_of_two_hosts_are_never_compared(ahead_s: float) -> None:
    """The slowest rank is on the first host before, on the second after."""
    for seconds in (0.9, 2.0):
        detector, verdicts = detector_of(1.0), []
        for step in range(8):
            now_s = step * seconds
            first = beat(0, iteration=3 + step + (step > 2), time=now_s)
            second = beat(1, iteration=3 + step + (step <= 2), time=now_s + ahead_s)
            verdicts.append(look(detector, first, second, seconds=seconds))
        assert any(verdicts) is (seconds > 1.0)


def test_an_iteration_that_goes_on_is_not_yet_slow() -> None:
    detector = detector_of(1.0)
    assert not any(looks(detector, seconds=1.0, num_iterations=4))
    assert not look(detector, beat(0, iteration=6), seconds=60.0)


def test_no_heartbeat_is_not_slow() -> None:
    assert not detector_of(1.0, warmup=0).is_slow([])
