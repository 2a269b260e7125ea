"""The spread of launches of the user's own command, and what is said of it."""

from dataclasses import replace

import pytest

from quartet_plugin.model.history import DriftMeasurement, Finalist, RunHistory
from quartet_plugin.report.noise import noise_words, own_launches_s
from quartet_plugin.report.search_expense import expense_lines
from tests.report.histories import comparison, history


def with_rounds(low: float, high: float) -> RunHistory:
    """A run whose own command took 0.5 s in its trial and from `low` to `high` in the final rounds."""
    measured = comparison(1.2)
    seconds = replace(measured.baseline.iteration_s, low=low, high=high)
    measured = replace(measured, baseline=replace(measured.baseline, iteration_s=seconds))
    return history(finalists=(Finalist(number=2, comparison=measured),), controls=())


def test_launches_of_trial_drift_checks_and_final_rounds_count() -> None:
    check = DriftMeasurement(num_tried=10, ratio=0.8)
    run = replace(with_rounds(0.45, 0.55), controls=(check,))
    first = run.trials[0].iteration_s
    assert first is not None
    assert own_launches_s(run) == pytest.approx([first, first / 0.8, 0.45, 0.55])


def test_a_quiet_machine_and_a_busy_one_are_said() -> None:
    run = with_rounds(0.49, 0.52)
    first = run.trials[0].iteration_s or 0.0
    assert noise_words(with_rounds(0.99 * first, 1.05 * first)).endswith("1.06x apart: the machine was quiet")
    busy = with_rounds(0.9 * first, 1.8 * first)
    assert "2.00x apart: the machine was busy. The final rounds compare in turns and stand" in noise_words(
        busy
    )
    assert expense_lines(replace(busy, launch_s=10.0))[-1] == f"noise     {noise_words(busy)}"


def test_a_stand_in_and_a_single_launch_say_nothing() -> None:
    run = with_rounds(0.49, 0.52)
    assert noise_words(replace(run, baseline_note="a stand-in")) == ""
    assert noise_words(replace(run, finalists=())) == ""
