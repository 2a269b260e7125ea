"""The sequential test of the final rounds: its fit, its decisions, and how often it errs."""

import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from quartet_plugin.tuner.sequential_test import (
    BASELINE,
    CAREFUL_ROUNDS,
    SequentialTest,
    fit,
    level,
    replayed,
)

type Rows = dict[int, dict[int, float]]


def table(rows: Mapping[int, Sequence[float]]) -> Rows:
    return {number: dict(enumerate(values)) for number, values in rows.items()}


def run_of(
    gains: Sequence[float], *, seed: int, deviation: float = 0.05, slow: float = 0.0
) -> tuple[SequentialTest, Rows]:
    """A test of plans with these gains; one launch in ten takes `slow` longer."""
    generator = random.Random(seed)
    test = SequentialTest(finalists=range(1, len(gains) + 1), num_rounds=5, max_rounds=15)
    values: Rows = {number: {} for number in range(len(gains) + 1)}
    for index in itertools.count():
        if test.is_over:
            return test, values
        for number in (BASELINE, *test.live):
            noise = generator.gauss(0.0, deviation) - slow * (generator.random() < 0.1)
            values[number][index] = noise + (math.log(gains[number - 1]) if number else 0.0)
        test.decide(values, num_done=index + 1)
    raise AssertionError


def winner(test: SequentialTest) -> int | None:
    return test.leader if test.leader in test.live and test.leader in test.proven else None


def test_with_whole_rounds_the_fit_is_the_mean_of_the_pairs() -> None:
    generator = np.random.default_rng(0)
    rows = {number: generator.normal(0.1 * number, 0.05, 6).tolist() for number in range(4)}
    effects = fit(table(rows))
    assert effects is not None
    assert effects.freedom == 15
    for number in (1, 2, 3):
        gain, error = effects.difference(number, BASELINE)
        pairs = [a - b for a, b in zip(rows[number], rows[0], strict=True)]
        assert gain == pytest.approx(statistics.fmean(pairs))
        assert error == pytest.approx(effects.noise * math.sqrt(2 / 6))
        low, high = effects.interval(number, BASELINE)
        assert low < gain < high


def test_rounds_of_another_speed_and_plans_that_left_do_not_bias_the_fit() -> None:
    true = {0: 0.0, 1: 0.3, 2: 0.1}
    rounds = (0.0, 0.5, -0.4, 1.0, 0.2)
    values = {
        number: {index: gain + speed for index, speed in enumerate(rounds) if number != 2 or index < 3}
        for number, gain in true.items()
    }
    del values[1][1]
    effects = fit(values)
    assert effects is not None
    assert effects.difference(1, BASELINE)[0] == pytest.approx(0.3)
    assert effects.difference(2, BASELINE)[0] == pytest.approx(0.1)


@pytest.mark.parametrize("rows", [{}, {0: [1.0]}, {0: [1.0], 1: [2.0]}, {0: [], 1: [1.0, 2.0]}])
def test_too_few_launches_are_no_fit(rows: dict[int, list[float]]) -> None:
    assert fit(table(rows)) is None


def test_the_level_falls_and_adds_up_slowly() -> None:
    levels = [level(num) for num in range(3, 400)]
    assert levels == sorted(levels, reverse=True)
    assert sum(levels[20:]) < 0.5 * sum(levels)


@pytest.mark.parametrize("slow", [0.0, 0.15])
def test_equal_plans_are_seldom_proven_and_faster_ones_mostly(slow: float) -> None:
    """The rates of many runs are those of `python -m benchmarks.final_rounds`."""
    deviation = 0.05 if not slow else 0.022
    equal = [
        winner(run_of((1.0, 1.0, 1.0), seed=seed, deviation=deviation, slow=slow)[0]) for seed in range(100)
    ]
    assert sum(number is not None for number in equal) <= 0.05 * 100
    faster = [
        winner(run_of((1.1, 1.1, 1.1), seed=seed, deviation=deviation, slow=slow)[0]) for seed in range(30)
    ]
    assert sum(number is not None for number in faster) >= 0.9 * 30


def test_clear_losers_leave_and_a_clear_winner_ends_the_rounds() -> None:
    test, values = run_of((1.3, 1.0, 0.8), seed=1, deviation=0.02)
    assert winner(test) == 1
    assert set(test.dropped) == {2, 3}
    assert len(values[3]) == 2
    assert max(values[0]) + 1 == 3


def test_decisions_are_made_again_from_the_launches_alone() -> None:
    for seed in range(10):
        test, values = run_of((1.1, 1.0, 1.05), seed=seed)
        again = replayed(SequentialTest(finalists=(1, 2, 3), num_rounds=5, max_rounds=15), values, failed={})
        assert (again.proven, again.dropped, again.leader) == (test.proven, test.dropped, test.leader)
        assert again.is_over


def test_a_failed_finalist_leaves_and_cannot_lead() -> None:
    test = SequentialTest(finalists=(1, 2), num_rounds=5, max_rounds=15)
    values = table({0: [0.0, 0.01, -0.01], 1: [0.5, 0.51], 2: [0.3, 0.31, 0.29]})
    test.decide(values, num_done=3, failed={1})
    assert test.leader == 2
    assert winner(test) == 2
    test = SequentialTest(finalists=(1,), num_rounds=5, max_rounds=15)
    test.decide(table({0: [0.0]}), num_done=1, failed={1})
    assert test.is_over


def test_a_proven_finalist_that_fails_is_proven_no_more() -> None:
    values = table({0: [0.0, 0.01, -0.01, 0.0], 1: [0.5, 0.51, 0.49], 2: [0.45, 0.55, 0.5, 0.5]})
    test = SequentialTest(finalists=(1, 2), num_rounds=5, max_rounds=15)
    test.decide(values, num_done=3)
    assert 1 in test.proven
    test.decide(values, num_done=4, failed={1})
    assert 1 not in test.proven
    assert winner(test) == 2


def test_what_needs_a_gain_over_another_takes_rounds_enough_to_show_it() -> None:
    """Finalist 2 is another model: three rounds of a clear gain over 1, proven too, are not enough."""
    values = table({0: [0.0, 0.01] * 3, 1: [0.3, 0.31] * 3, 2: [0.5, 0.51] * 3})
    test = SequentialTest(
        finalists=(1, 2),
        num_rounds=5,
        max_rounds=15,
        least_gains={2: math.log(1.05)},
        departures={2: 2},
        careful_chance=0.1,
    )
    ends = []
    for num_done in range(1, CAREFUL_ROUNDS + 1):
        test.decide(values, num_done=num_done)
        ends.append(test.is_over)
    assert ends == [False] * (CAREFUL_ROUNDS - 1) + [True]
    assert winner(test) == 2
    # With too little gain over the baseline it leaves.
    test = SequentialTest(finalists=(2,), num_rounds=5, max_rounds=15, least_gains={2: math.log(1.05)})
    test.decide(table({0: [0.0, 0.001, 0.0], 2: [0.02, 0.021, 0.02]}), num_done=3)
    assert test.is_over
    assert winner(test) is None


@pytest.mark.parametrize(
    ("behind", "departures", "rounds"),
    [(0.025, {2: 1}, 5), (0.04, {}, 3), (0.3, {2: 1}, 3)],
    ids=["close", "neither departs", "clearly slower"],
)
def test_what_departs_less_than_the_leader_stays_until_five_rounds_compare_them(
    behind: float, departures: dict[int, int], rounds: int
) -> None:
    """The plugin's runtime executes finalist 2; two rounds that hardly differ say little of the noise."""
    noise = (0.009, -0.009, 0.02, -0.02, 0.02)
    values = table(
        {
            0: [-each for each in noise],
            1: [1.4 - behind - each for each in noise],
            2: [1.4 + each for each in noise],
        }
    )
    test = SequentialTest(
        finalists=(1, 2), num_rounds=5, max_rounds=15, departures=departures, careful_chance=0.1
    )
    replayed(test, values, failed={})
    assert winner(test) == 2
    assert test.proven[2] == 3
    assert test.dropped.get(1, 5) == (5 if rounds == 5 else 2)
    for num_done in range(2, 6):
        some = {number: {at: row[at] for at in range(num_done)} for number, row in values.items()}
        again = SequentialTest(
            finalists=(1, 2), num_rounds=5, max_rounds=15, departures=departures, careful_chance=0.1
        )
        assert replayed(again, some, failed={}).is_over == (num_done >= rounds)


@pytest.mark.parametrize(("lead", "is_over"), [(0.005, True), (0.03, False)])
def test_the_rounds_go_on_where_a_plan_that_departs_less_would_cost_a_gain(
    lead: float, is_over: bool
) -> None:
    """Finalist 1 would be chosen, since 2 is not clearly faster: that may cost a lead of 3 %."""
    noise = (0.05, -0.05, 0.06, -0.06, 0.0)
    values = table(
        {
            0: [0.0] * 5,
            1: [1.4 - each for each in noise],
            2: [1.4 + lead + each for each in noise],
        }
    )
    test = SequentialTest(
        finalists=(1, 2), num_rounds=5, max_rounds=15, departures={2: 1}, careful_chance=0.1
    )
    for num_done in range(1, 6):
        assert not test.is_over
        if num_done == 4:
            assert test.num_rounds_expected(num_done=3) >= CAREFUL_ROUNDS
        test.decide(values, num_done=num_done)
    assert (test.leader, test.live, test.is_over) == (2, [1, 2], is_over)


def test_the_rounds_to_come_are_those_that_the_lead_needs() -> None:
    test = SequentialTest(finalists=(1, 2, 3), num_rounds=5, max_rounds=15)
    assert test.num_rounds_expected(num_done=0) == 5
    test, _ = run_of((1.3, 1.0, 0.8), seed=1, deviation=0.02)
    assert test.num_rounds_expected(num_done=3) == 3
    undecided = SequentialTest(finalists=(1,), num_rounds=5, max_rounds=15)
    undecided.decide(table({0: [0.0, 0.05, -0.05], 1: [0.1, 0.05, 0.1]}), num_done=3)
    assert not undecided.is_over
    assert 3 < undecided.num_rounds_expected(num_done=3) <= 15


def test_a_finalist_that_joins_later_is_measured_before_anything_is_over() -> None:
    """It neither leads nor leaves after one round, and it has as many rounds as the others had."""
    test = SequentialTest(finalists=[1, 2], num_rounds=8, max_rounds=18, first_rounds={2: 3})
    values: Rows = {0: {}, 1: {}, 2: {}}
    for index in range(3):
        assert test.participants(index) == [1]
        values[0][index], values[1][index] = 0.001 * index, 0.2 + 0.002 * index
        test.decide(values, num_done=index + 1)
    assert test.proven == {1: 3}
    assert (test.leader, test.is_over, test.latest_first_round) == (1, False, 3)
    late = (0.9, -0.3, 0.1)
    for index in range(3, 6):
        assert not test.is_over
        assert test.participants(index) == [1, 2]
        values[0][index], values[1][index], values[2][index] = 0.0, 0.2, late[index - 3]
        test.decide(values, num_done=index + 1)
        if index == 3:
            assert (test.leader, test.live) == (1, [1, 2])
    again = SequentialTest(finalists=[1, 2], num_rounds=8, max_rounds=18, first_rounds={2: 3})
    replayed(again, values, failed={})
    assert (again.live, again.proven, again.dropped) == (test.live, test.proven, test.dropped)


def test_a_late_finalist_that_is_clearly_slower_ends_the_rounds_once_it_has_enough_of_them() -> None:
    test = SequentialTest(finalists=[1, 2], num_rounds=7, max_rounds=17, first_rounds={2: 2})
    values: Rows = {0: {}, 1: {}, 2: {}}
    for index in range(20):
        if test.is_over:
            break
        values[0][index], values[1][index] = 0.001 * (index % 2), 0.2
        if 2 in test.participants(index):
            values[2][index] = -0.1
        test.decide(values, num_done=index + 1)
    assert test.dropped == {2: 4}
    assert winner(test) == 1
    assert index == 4
