"""The choice among finalists that beat the baseline: round by round, and the user's own model first."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.model.plan import Plan, ScheduleChoice, Split
from quartet_plugin.model.trial_record import FinishedTrial
from quartet_plugin.schedule.choice import choice_of as choice_of_order
from quartet_plugin.schedule.named import named
from quartet_plugin.tuner import winner_choice
from quartet_plugin.tuner.final_rounds import finalist_words, winner_of, with_own_model
from quartet_plugin.tuner.finalists import bootstrap_median, rank
from quartet_plugin.tuner.sequential_test import level
from quartet_plugin.tuner.winner_choice import (
    CLEAR_CHANCE,
    CLEAR_GAIN,
    FinalistResult,
    chance_better,
    choice_of,
    departure,
    in_order_of_choice,
    log_gain,
)
from tests.model.plans import PLAN, SHAPE
from tests.schedule.orders import unit_costs
from tests.tuner.test_finalists import launch, ranked, trial

OTHER_MODEL = replace(
    PLAN,
    shape=replace(SHAPE, num_layers=4, hidden_size=320, ffn_hidden_size=1280),
    split=Split(transformer_layers_per_stage=(2, 2)),
)
ZB_H1 = named("zb-h1", num_devices=2, num_microbatches=PLAN.num_microbatches)
OF_RUNTIME = ScheduleChoice(name="custom", custom=choice_of_order(ZB_H1, unit_costs(ZB_H1)))


def finished(number: int, *, is_other_model: bool = False, is_of_runtime: bool = False) -> FinishedTrial:
    made = trial(number, value=1.0)
    plan = OTHER_MODEL if is_other_model else made.plan
    return replace(made, plan=replace(plan, schedule=OF_RUNTIME) if is_of_runtime else plan)


def after_rounds(
    baseline_s: Sequence[float],
    times_s: Mapping[int, Sequence[float]],
    *,
    other_models: tuple[int, ...] = (),
    of_runtime: tuple[int, ...] = (),
    lost: tuple[tuple[int, int], ...] = (),
) -> list[FinalistResult]:
    """The finalists after rounds of these seconds; `lost` launches by trial and round."""
    baseline: Plan = trial(0, value=1.0, layers=4).plan
    times: Mapping[int, Sequence[float]] = {0: baseline_s, **times_s}
    return rank(
        [
            finished(number, is_other_model=number in other_models, is_of_runtime=number in of_runtime)
            for number in times_s
        ],
        baseline=baseline,
        launches={
            number: {index: launch(s) for index, s in enumerate(row) if (number, index) not in lost}
            for number, row in times.items()
        },
        objective="tokens_per_s",
        seed=0,
        num_asked=5,
        failed={},
    )


def result(
    number: int, ratios: Sequence[float], *, is_other_model: bool = False, is_of_runtime: bool = False
) -> FinalistResult:
    measured = ranked([1.0] * 3, [0.5] * 3)[0]
    speedup = bootstrap_median(ratios, seed=0, num_resamples=40)
    return replace(
        measured,
        trial=finished(number, is_other_model=is_other_model, is_of_runtime=is_of_runtime),
        comparison=replace(measured.comparison, speedup=speedup, round_ratios=tuple(ratios)),
        rounds=tuple(range(len(ratios))),
        proven_after=len(ratios) if speedup.low > 1.0 else None,
    )


SLOW_ONCE = (0.620, 0.625, 0.711, 0.625, 0.619)
EVEN = (0.699, 0.680, 0.692, 0.664, 0.676)


@pytest.mark.parametrize("other_models", [(), (9,)])
def test_the_faster_in_the_same_rounds_wins_though_a_slow_launch_lowers_its_interval(
    other_models: tuple[int, ...],
) -> None:
    results = after_rounds([0.960] * 5, {7: SLOW_ONCE, 9: EVEN}, other_models=other_models)
    first, second = results
    assert first.trial.number == 7
    assert winner_of(results) is first
    assert min(first.comparison.round_ratios) < min(second.comparison.round_ratios)
    choice = choice_of(results, seed=0)
    assert choice is not None
    assert (choice.runner_up, choice.num_rounds) == (9, 5)
    assert choice.gain == pytest.approx(0.680 / 0.625)
    assert choice.chance_better == pytest.approx(0.942, abs=0.01)
    assert choice.is_runner_up_win == second.is_win
    assert choice.is_runner_up_other_model == bool(other_models)


@pytest.mark.parametrize(
    ("other_s", "chosen"),
    [
        ([0.97] * 5, 1),
        ([0.96] * 5, 1),
        ([0.93] * 5, 2),
        ([0.93] * 4 + [1.05], 2),
        ([0.93] * 3 + [1.05] * 2, 1),
    ],
)
def test_another_model_wins_with_a_clear_gain_alone(other_s: list[float], chosen: int) -> None:
    results = after_rounds([2.0] * 5, {1: [1.0] * 5, 2: other_s}, other_models=(2,))
    assert [one.trial.number for one in results] == ([1, 2] if chosen == 1 else [2, 1])
    alike = after_rounds([2.0] * 5, {1: [1.0] * 5, 2: other_s})
    assert alike[0].trial.number == 2  # of one's own model the faster wins by any gain


@pytest.mark.parametrize(
    ("runtime_s", "chosen"),
    [
        ([0.99] * 5, 2),
        ([0.97] * 4 + [1.05], 2),
        ([1.05, 0.97, 0.97, 1.05, 0.97], 1),
        ([1.0] * 5, 1),
        ([0.985, 0.995, 0.97], 1),
        ([0.8, 0.805, 0.8], 2),
    ],
    ids=["in every round", "in four of five", "in three of five", "alike", "in three rounds", "by far"],
)
def test_a_schedule_of_the_plugin_wins_over_the_frameworks_own_where_it_is_likely_faster(
    runtime_s: list[float], chosen: int
) -> None:
    num_rounds = len(runtime_s)
    results = after_rounds([2.0] * num_rounds, {1: [1.0] * num_rounds, 2: runtime_s}, of_runtime=(2,))
    assert [one.trial.number for one in results] == ([1, 2] if chosen == 1 else [2, 1])
    choice = choice_of(results, seed=0)
    assert choice is not None
    assert "the plugin's runtime executes wins only if it is faster than every proven plan" in choice.rule
    alike = after_rounds([2.0] * num_rounds, {1: [1.0] * num_rounds, 2: runtime_s}, of_runtime=(1, 2))
    assert alike[0].trial.number == (1 if statistics.median(runtime_s) >= 1.0 else 2)
    assert "the plugin's runtime" not in choice_of(alike, seed=0).rule  # type: ignore[union-attr]


def test_three_rounds_are_no_clear_gain() -> None:
    results = after_rounds([2.0] * 3, {1: [1.0] * 3, 2: [0.8] * 3}, other_models=(2,))
    assert [one.trial.number for one in results] == [1, 2]


def test_another_model_that_is_hardly_faster_than_the_users_command_does_not_win() -> None:
    results = after_rounds([1.0] * 5, {2: [0.98] * 5, 3: [0.96] * 5}, other_models=(2, 3))
    assert winner_of(results) is None
    assert winner_of(after_rounds([1.0] * 5, {2: [0.98] * 5})) is not None


def test_without_a_plan_of_the_users_own_model_another_one_wins() -> None:
    results = after_rounds([1.0] * 5, {1: [1.1] * 5, 2: [0.94] * 5, 3: [0.93] * 5}, other_models=(2, 3))
    assert [one.trial.number for one in results] == [3, 2, 1]
    choice = choice_of(results[:1], seed=0)
    assert choice is not None
    assert choice.runner_up is None


def test_what_may_not_win_comes_last_and_is_no_rival_to_what_may() -> None:
    fast_but_unsure = result(1, [2.0, 2.0, 2.0, 2.0, 0.9])
    results = in_order_of_choice([fast_but_unsure, result(2, [1.1] * 5)], seed=0)
    assert [one.trial.number for one in results] == [2, 1]
    choice = choice_of(results, seed=0)
    assert choice is not None
    assert not choice.is_runner_up_win
    assert choice.gain is not None
    assert choice.gain < 1.0
    assert choice_of([fast_but_unsure], seed=0) is None
    assert choice_of([], seed=0) is None


def test_drift_between_rounds_does_not_count() -> None:
    drift = (1.0, 1.5, 2.0, 3.0, 1.2)
    times = {
        number: [by * seconds for by, seconds in zip(drift, row, strict=True)]
        for number, row in ((7, SLOW_ONCE), (9, EVEN))
    }
    results = after_rounds([0.96 * by for by in drift], times)
    assert [one.trial.number for one in results] == [7, 9]
    assert log_gain(results[0], results[1]) == pytest.approx(math.log(0.680 / 0.625))


def test_finalists_that_share_too_few_rounds_are_compared_by_their_speedups() -> None:
    lost = ((1, 0), (1, 1), (2, 3), (2, 4))
    results = after_rounds([2.0] * 6, {1: [1.0] * 6, 2: [0.9] * 6}, other_models=(2,), lost=lost)
    assert [one.trial.number for one in results] == [1, 2]
    choice = choice_of(results, seed=0)
    assert choice is not None
    assert choice.chance_better is None
    assert choice.num_rounds == 2
    assert choice.gain == pytest.approx(0.9)


def test_more_rounds_of_the_leader_alone_do_not_change_the_pairs() -> None:
    first, second = result(1, [1.5] * 5 + [1.0] * 5), result(2, [1.4] * 5)
    assert log_gain(first, second) == pytest.approx(math.log(1.5 / 1.4))


ratio_rows = st.integers(3, 6).flatmap(
    lambda num_rounds: st.lists(
        st.tuples(
            st.lists(st.floats(0.9, 1.6), min_size=num_rounds, max_size=num_rounds),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    )
)


def is_clear(first: FinalistResult, second: FinalistResult, *, seed: int) -> bool:
    least = CLEAR_GAIN if first.is_other_model and not second.is_other_model else 1.0
    return (
        log_gain(first, second) >= math.log(least)
        and (chance_better(first, second, seed=seed) or 0.0) >= CLEAR_CHANCE
    )


@settings(max_examples=60, deadline=None)
@given(ratio_rows, st.integers(0, 100))
def test_the_chosen_plan_is_never_the_slower(rows: list[tuple[list[float], bool, bool]], seed: int) -> None:
    """Of plans that depart as far; one that departs further than another is clearly faster than that."""
    results = [
        result(number, ratios, is_other_model=is_other, is_of_runtime=is_of_runtime)
        for number, (ratios, is_other, is_of_runtime) in enumerate(rows, 1)
    ]
    with patch.object(winner_choice, "NUM_RESAMPLES", 40):
        ordered = in_order_of_choice(results, seed=seed)
        assert in_order_of_choice(results[::-1], seed=seed) == ordered
        assert sorted(one.trial.number for one in ordered) == [one.trial.number for one in results]
        winners = [one for one in results if one.is_win]
        assert (winner_of(ordered) is None) == (not winners)
        if not winners:
            return
        winner = ordered[0]
        assert winner.is_win
        may_win = [
            one
            for one in winners
            if all(
                is_clear(one, other, seed=seed)
                for other in winners
                if departure(other.trial.plan) < departure(one.trial.plan)
            )
        ]
        assert winner in may_win
        unbeaten = [one for one in may_win if all(log_gain(one, other) >= 0 for other in may_win)]
        assert winner in (unbeaten or may_win)
        if len(may_win) < 3:
            assert unbeaten


@settings(max_examples=40, deadline=None)
@given(ratio_rows, st.integers(0, 100))
def test_chances_of_two_plans_make_one(rows: list[tuple[list[float], bool, bool]], seed: int) -> None:
    results = [result(number, ratios) for number, (ratios, *_) in enumerate(rows, 1)]
    with patch.object(winner_choice, "NUM_RESAMPLES", 40):
        for first, second in itertools.combinations(results, 2):
            chances = [chance_better(*pair, seed=seed) for pair in ((first, second), (second, first))]
            assert None not in chances
            assert sum(chance for chance in chances if chance is not None) == pytest.approx(1.0)
            assert log_gain(first, second) == -log_gain(second, first)


@pytest.mark.parametrize(
    ("count", "values", "expected"),
    [
        (2, (2.0, 1.9, 1.8), [1, 3]),
        (3, (2.0, 1.9, 1.8), [1, 2, 3]),
        (1, (2.0, 1.9, 1.8), [1]),
        (1, (2.0, 1.9, 1.95), [3]),
    ],
)
def test_a_plan_of_the_users_own_model_is_a_finalist(
    count: int, values: tuple[float, ...], expected: list[int]
) -> None:
    trials = [trial(number, value=value) for number, value in enumerate(values, start=1)]
    ordered = [*(replace(other, plan=OTHER_MODEL) for other in trials[:2]), trials[2]]
    assert [one.number for one in with_own_model(ordered, count=count)[:count]] == expected
    assert [one.number for one in with_own_model(ordered[:2], count=count)[:count]] == [1, 2][:count]


def test_the_finalists_their_rank_values_and_the_next_plan_are_said() -> None:
    first, second, third = (finished(number) for number in (1, 3, 2))
    speedups = {1: 1.95, 3: 1.4, 2: 1.38}
    words = finalist_words(
        [first, second, third], finalists=[first, second], speedups=speedups, rank_words="the speedup"
    )
    assert words == (
        "2 finalists (at most study.top_k) of 3 plans that are not clearly slower than your command, ranked "
        "by the speedup: trial 1 1.95x, trial 3 1.40x; first plan not included: trial 2 1.38x"
    )
    moved_up = finalist_words(
        [first, third, second], finalists=[first, second], speedups={}, rank_words="the speedup"
    )
    assert moved_up.endswith(
        "; first plan not included: trial 2; trial 3 is included as the best plan of your own model"
    )
    assert finalist_words([], finalists=[], speedups={}, rank_words="the speedup") == ""


def test_the_rule_names_other_models_only_where_one_was_a_finalist() -> None:
    times = {1: [0.5, 0.51, 0.5, 0.49], 2: [0.9, 1.3, 0.8, 1.1]}
    choice = choice_of(after_rounds([1.0] * 4, times), seed=0)
    assert choice is not None
    assert "a different model" not in choice.rule
    assert not choice.is_runner_up_win
    assert choice.proof_level == pytest.approx(level(4))
    with_other = choice_of(after_rounds([1.0] * 4, times, other_models=(2,)), seed=0)
    assert with_other is not None
    assert "; a different model wins only if it is at least 5 % faster" in with_other.rule
