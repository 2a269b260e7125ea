"""The end of a search after so many trials without a gain."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord
from quartet_plugin.tuner.config import parse_config
from quartet_plugin.tuner.patience import num_without_gain, patience_words
from quartet_plugin.tuner.tune_result import TuneResult
from tests.model.plans import PLAN
from tests.tuner.fakes import FakeMachine, Killed, Watching, by_formula, resume, tune
from tests.tuner.fakes import begin_with_journal as begin
from tests.tuner.workers.test_parallel_search import Shop, run_shared

STUDY: dict[str, Any] = {"trials": 30, "rounds": 3, "top_k": 1, "patience": 5, "starts": "none"}


def finished(values: Sequence[float | None], **changes: Any) -> list[FinishedTrial]:
    """Trials with these objectives from number 0 on; None did not fit."""
    return [
        FinishedTrial(
            number=number,
            plan=PLAN,
            record=TrialRecord(
                verdict="infeasible" if value is None else "measured",
                outcome="OK",
                reason="",
                attempt_id="",
                value=value,
                **changes,
            ),
        )
        for number, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("values", "count"),
    [
        ([1.0], 0),
        ([1.0, 0.9, None, 1.01], 3),
        ([1.0, 1.03], 0),
        ([1.0, 1.03, 1.04, 0.5], 2),
        # Gains of 1 % each: the third is more than noise above what the count began with.
        ([1.0, 1.01, 1.02, 1.03, 1.031], 1),
    ],
)
def test_only_what_exceeds_the_noise_is_a_gain(values: list[float | None], count: int) -> None:
    assert num_without_gain(finished(values)) == count


def test_where_launches_scatter_a_gain_must_be_larger() -> None:
    noisy = {"spread": 0.05, "num_iterations": 10}
    assert num_without_gain(finished([1.0, 1.1], **noisy)) == 1
    assert num_without_gain(finished([1.0, 1.3], **noisy)) == 0


def test_repeats_and_another_runs_measurements_do_not_count() -> None:
    assert num_without_gain(finished([1.0, 1.0, 1.0], repeats=0)) == 0
    assert num_without_gain(finished([1.0, 1.0, 1.0], source="other:1")) == 0
    # A repeat does not raise what the next gain is counted from.
    trials = finished([1.0, 1.015, 1.015, 1.03])
    assert num_without_gain([*trials[:2], *finished([0.0, 0.0, 1.015], repeats=1)[2:], trials[3]]) == 0


def test_without_patience_nothing_ends() -> None:
    assert parse_config({}, where="q").study.patience == 0
    assert patience_words(finished([1.0] * 50), patience=0) is None
    assert patience_words(finished([1.0] * 50), patience=49) is not None


def equally_fast(plan: Plan) -> float:
    """Every plan needs as long as the baseline does."""
    return by_formula(PLAN) + 0.0 * by_formula(plan)


def num_spent(result: TuneResult) -> int:
    return sum(trial.is_spent for trial in result.trials)


def test_a_search_ends_after_so_many_trials_without_a_gain_and_says_so(tmp_path: Path) -> None:
    watching = Watching()
    result = tune(
        begin(tmp_path / "r", study=STUDY), FakeMachine(seconds=equally_fast, noise=0.0), observer=watching
    )
    assert num_spent(result) == 5
    assert any(
        "5 plans were tried; the last 5 gained no more than the noise (2 %)" in text
        for text in watching.messages
    )
    assert result.rankings, "the final rounds follow"


def test_a_killed_search_ends_where_it_would_have(tmp_path: Path) -> None:
    expected = tune(begin(tmp_path / "a" / "r", study=STUDY), FakeMachine())
    machine = FakeMachine(dies_at=3, dies_before_result=False)
    with pytest.raises(Killed):
        tune(begin(tmp_path / "r", study=STUDY), machine)
    again = tune(resume(tmp_path / "r"), machine)
    assert 5 <= num_spent(expected) < 30
    assert [trial.plan.key for trial in again.trials] == [trial.plan.key for trial in expected.trials]


def test_with_workers_what_is_under_way_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(seconds=equally_fast, noise=0.0)
    result = run_shared(monkeypatch, tmp_path / "r", shop, study=STUDY)
    assert 5 <= num_spent(result) <= 5 + shop.num_workers
    assert not shop.holding
