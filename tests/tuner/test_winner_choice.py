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
from quartet_plugin.tuner.sequential_test import fit, level
from quartet_plugin.tuner.winner_choice import (
    CLEAR_CHANCE,
    CLEAR_GAIN,
    FinalistResult,
    chance_better,
    choice_of,
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
CUSTOM = ScheduleChoice(name="custom", custom=choice_of_order(ZB_H1, unit_costs(ZB_H1)))


def finished(number: int, *, is_other_model: bool = False, is_custom: bool = False) -> FinishedTrial:
    made = trial(number, value=1.0)
    plan = OTHER_MODEL if is_other_model else made.plan
    return replace(made, plan=replace(plan, schedule=CUSTOM) if is_custom else plan)


def after_rounds(
    baseline_s: Sequence[float],
    times_s: Mapping[int, Sequence[float]],
    *,
    other_models: tuple[int, ...] = (),
    custom: tuple[int, ...] = (),
    lost: tuple[tuple[int, int], ...] = (),
) -> list[FinalistResult]:
    """The finalists after rounds of these seconds; `lost` launches by trial and round."""
    baseline: Plan = trial(0, value=1.0, layers=4).plan
    times: Mapping[int, Sequence[float]] = {0: baseline_s, **times_s}
    return rank(
        [
            finished(number, is_other_model=number in other_models, is_custom=number in custom)
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


def results_of(
    rows: Mapping[int, Sequence[float]],
    *,
    other_models: tuple[int, ...] = (),
    custom: tuple[int, ...] = (),
    dropped: tuple[int, ...] = (),
) -> list[FinalistResult]:
    """Finalists with these speedups, round by round; proven where the lower end says so."""
    measured = ranked([1.0] * 3, [0.5] * 3)[0]
    values = {number: dict(enumerate(map(math.log, ratios))) for number, ratios in rows.items()}
    effects = fit({0: dict.fromkeys(range(max(map(len, rows.values()))), 0.0), **values})
    assert effects is not None
    return [
        replace(
            measured,
            trial=finished(number, is_other_model=number in other_models, is_custom=number in custom),
            comparison=replace(
                measured.comparison,
                speedup=bootstrap_median(ratios, seed=0, num_resamples=40),
                round_ratios=tuple(ratios),
            ),
            rounds=tuple(range(len(ratios))),
            proven_after=len(ratios)
            if bootstrap_median(ratios, seed=0, num_resamples=40).low > 1.0
            else None,
            is_live=number not in dropped,
            effects=effects,
        )
        for number, ratios in rows.items()
    ]


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
        ([0.98, 0.975, 0.985, 0.98, 0.98], 2),
        ([0.97, 0.97, 0.97, 0.99, 0.97], 2),
        ([1.05, 0.97, 0.97, 1.05, 0.97], 1),
        ([1.0] * 5, 1),
        ([0.985, 1.02, 0.985], 1),
        ([0.9, 0.94, 0.92], 2),
        ([0.8, 0.805, 0.8], 2),
    ],
    ids=["in every round", "mostly", "in three of five", "alike", "unsure", "in three rounds", "by far"],
)
def test_a_schedule_of_the_plugin_wins_over_the_frameworks_own_where_it_is_likely_faster(
    runtime_s: list[float], chosen: int
) -> None:
    num_rounds = len(runtime_s)
    stock_s = [1.0, 1.003, 0.997, 1.002, 0.998][:num_rounds]
    results = after_rounds([2.0] * num_rounds, {1: stock_s, 2: runtime_s}, custom=(2,))
    assert [one.trial.number for one in results] == ([1, 2] if chosen == 1 else [2, 1])
    choice = choice_of(results, seed=0)
    assert choice is not None
    assert "the plugin's runtime executes wins only if it is faster" in choice.rule
    assert choice.is_only_runner_up_custom == (chosen == 1)
    if choice.chance_better is not None:
        assert (choice.chance_better >= CLEAR_CHANCE) == (chosen == 2)
    alike = after_rounds([2.0] * num_rounds, {1: stock_s, 2: runtime_s}, custom=(1, 2))
    assert alike[0].trial.number == (1 if statistics.median(runtime_s) >= 0.998 else 2)
    choice = choice_of(alike, seed=0)
    assert choice is not None
    assert "the plugin's runtime" not in choice.rule
    assert not choice.is_only_runner_up_custom


@pytest.mark.parametrize(("dropped", "winner"), [((), 1), ((1,), 3)])
def test_a_plan_that_left_the_rounds_does_not_keep_another_from_winning(
    dropped: tuple[int, ...], winner: int
) -> None:
    """A new finalist of a resumed run shares no round with one that left in an earlier session."""
    rounds = {1: [1.2, 1.21, 1.22], 2: [1.25, 1.26, 1.24], 3: [1.8, 1.82, 1.81]}
    results = results_of(rounds, custom=(2, 3), dropped=dropped)
    unsure = replace(results[0].effects, covariance=results[0].effects.covariance * 1e4)
    apart = [replace(one, effects=unsure) for one in results]
    assert in_order_of_choice(apart, seed=0)[0].trial.number == winner


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
    unordered = results_of({1: [2.0, 2.0, 2.0, 2.0, 0.9], 2: [1.1] * 5})
    results = in_order_of_choice(unordered, seed=0)
    assert [one.trial.number for one in results] == [2, 1]
    choice = choice_of(results, seed=0)
    assert choice is not None
    assert not choice.is_runner_up_win
    assert choice.gain is not None
    assert choice.gain < 1.0
    assert choice_of(unordered[:1], seed=0) is None
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
    first, second = results_of({1: [1.5] * 5 + [1.0] * 5, 2: [1.4] * 5})
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


def results_of_rows(rows: list[tuple[list[float], bool, bool]]) -> list[FinalistResult]:
    numbered = dict(enumerate(rows, 1))
    return results_of(
        {number: ratios for number, (ratios, _, _) in numbered.items()},
        other_models=tuple(number for number, (_, is_other, _) in numbered.items() if is_other),
        custom=tuple(number for number, (_, _, is_custom) in numbered.items() if is_custom),
    )


def mean_gain(first: FinalistResult, second: FinalistResult) -> float:
    pairs = zip(first.comparison.round_ratios, second.comparison.round_ratios, strict=True)
    return statistics.fmean(math.log(one) - math.log(other) for one, other in pairs)


@settings(max_examples=60, deadline=None)
@given(ratio_rows, st.integers(0, 100))
def test_the_chosen_plan_is_never_the_slower(rows: list[tuple[list[float], bool, bool]], seed: int) -> None:
    """Than a plan that departs as far and may win, nor than one that departs less, all of which may win."""
    results = results_of_rows(rows)
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
        nearer = [one for one in winners if one.departure < winner.departure]
        for rival in nearer:
            if winner.is_other_model and not rival.is_other_model:
                chance = chance_better(winner, rival, seed=seed)
                assert log_gain(winner, rival) >= math.log(CLEAR_GAIN)
                assert chance is not None
                assert chance >= CLEAR_CHANCE
            else:
                assert mean_gain(winner, rival) > 0.0
        alike = [one for one in winners if one.departure == winner.departure]
        unbeaten = [one for one in alike if all(log_gain(one, other) >= 0 for other in alike)]
        if not nearer:
            assert winner in (unbeaten or alike)
        if len(alike) < 3:
            assert unbeaten


@settings(max_examples=40, deadline=None)
@given(ratio_rows, st.integers(0, 100))
def test_chances_of_two_plans_make_one(rows: list[tuple[list[float], bool, bool]], seed: int) -> None:
    results = results_of_rows(rows)
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
