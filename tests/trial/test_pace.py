"""When an attempt is seen to be slow: after enough iterations, by its slowest rank."""

import pytest

from quartet_plugin.protocol.attempt_files import Beat
from quartet_plugin.trial.pace import MIN_ITERATIONS, Pace


def beat(rank: int, iteration: int, time: float, *, phase: str = "measure") -> Beat:
    return Beat(
        schema_version=1,
        attempt_id="0" * 32,
        rank=rank,
        pid=1,
        process_start=1.0,
        host="h",
        local_rank=rank,
        phase=phase,  # type: ignore[arg-type]
        iteration=iteration,
        time=time,
    )


def looks(pace: Pace, *, seconds: float, num_iterations: int, warmup: int = 2) -> list[bool]:
    return [
        pace.is_slow([beat(0, warmup + at, 100.0 + at * seconds), beat(1, warmup + at, 100.0 + at * seconds)])
        for at in range(num_iterations + 1)
    ]


def test_it_takes_some_iterations_above_the_limit() -> None:
    found = looks(Pace(warmup=2, slow_above_s=1.0), seconds=1.2, num_iterations=5)
    assert found == [False] * MIN_ITERATIONS + [True] * (6 - MIN_ITERATIONS)


@pytest.mark.parametrize("limit", [None, 1.0, 2.0])
def test_what_is_fast_enough_is_never_slow(limit: float | None) -> None:
    assert not any(looks(Pace(warmup=2, slow_above_s=limit), seconds=0.9, num_iterations=20))


def test_warm_up_does_not_count() -> None:
    pace = Pace(warmup=2, slow_above_s=1.0)
    for at in range(2):
        assert not pace.is_slow([beat(0, at, 10.0 * at, phase="warmup")])
    assert not any(looks(pace, seconds=0.5, num_iterations=10))


def test_the_slowest_rank_decides() -> None:
    pace = Pace(warmup=0, slow_above_s=1.0)
    found = [
        pace.is_slow([beat(0, 3 * at, 1.0 * at), beat(1, at, 2.0 * at)]) for at in range(MIN_ITERATIONS + 1)
    ]
    assert found[-1]
    assert not any(found[:-1])


def test_no_heartbeat_is_no_verdict() -> None:
    assert not Pace(warmup=0, slow_above_s=1.0).is_slow([])
