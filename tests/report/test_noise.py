"""The spread of launches of one plan, and what is said of it."""

from dataclasses import replace

import pytest

from quartet_plugin.model.history import DriftMeasurement, Finalist, RunHistory
from quartet_plugin.model.measurement import Measurement
from quartet_plugin.report.noise import launches_s, noise_words
from quartet_plugin.report.page import Extras, page
from quartet_plugin.report.search_expense import expense_lines
from tests.report.histories import comparison, history


def ranging(side: Measurement, low: float, high: float) -> Measurement:
    """The measurement of launches from `low` to `high` seconds."""
    return replace(side, iteration_s=replace(side.iteration_s, low=low, high=high))


def with_rounds(own: tuple[float, float], plan: tuple[float, float] = (0.4, 0.4)) -> RunHistory:
    """A run whose final rounds took from the first to the second seconds, of the command and of trial 2."""
    measured = comparison(1.2)
    measured = replace(
        measured, baseline=ranging(measured.baseline, *own), plan=ranging(measured.plan, *plan)
    )
    return history(finalists=(Finalist(number=2, comparison=measured),), drift_checks=())


def first_s() -> float:
    """The seconds of the command in trial 0."""
    row = history().baseline
    assert row is not None
    assert row.iteration_s is not None
    return row.iteration_s


def test_launches_of_trial_drift_checks_and_final_rounds_count() -> None:
    run = replace(with_rounds((0.45, 0.55)), drift_checks=(DriftMeasurement(num_tried=10, ratio=0.8),))
    seconds = launches_s(run)
    assert seconds["your command"] == pytest.approx([first_s(), first_s() / 0.8, 0.45, 0.55])
    assert seconds["trial 2"] == [0.4, 0.4]


def test_a_quiet_machine_and_a_busy_one_are_said() -> None:
    quiet = with_rounds((0.99 * first_s(), 1.05 * first_s()))
    words = "1.06x apart, the widest spread of any plan: the machine was quiet"
    assert noise_words(quiet).endswith(words)
    busy = with_rounds((0.9 * first_s(), 1.8 * first_s()))
    assert "2.00x apart, the widest spread of any plan: the machine was busy." in noise_words(busy)
    assert expense_lines(replace(busy, launch_s=10.0))[-1] == f"noise     {noise_words(busy)}"
    assert noise_words(busy)[1:] in page(busy, Extras())


def test_a_finalist_whose_launches_lie_furthest_apart_is_named() -> None:
    run = with_rounds((first_s(), first_s()), (0.36, 0.5))
    assert noise_words(run).startswith("launches of trial 2 took 0.360 to 0.500 s/iteration, 1.39x apart")
    assert "busy" in noise_words(run)


def test_a_stand_in_and_single_launches_say_nothing_of_the_command() -> None:
    run = with_rounds((0.1, 0.9))
    assert "your command" not in noise_words(replace(run, baseline_note="a stand-in"))
    assert noise_words(replace(run, finalists=())) == ""
