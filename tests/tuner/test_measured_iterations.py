"""How many iterations a run's launches measure, and what a trial that ended early comes to."""

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.trial.request import TrialRequest, TrialResult
from quartet_plugin.tuner.config import AUTO_MEASURE, AUTO_WARMUP, PRECISION
from tests.tuner.fakes import FakeMachine, tune
from tests.tuner.fakes import begin_with_journal as begin

STUDY = {"trials": 6, "top_k": 2, "rounds": 3}


class EndingEarly(FakeMachine):
    """Its trials end after some measured iterations; one that is slower than its limit is cut short."""

    def _result(self, request: TrialRequest) -> TrialResult:
        self.requests[request.folder] = request
        result = super()._result(request)
        rule = request.early_end
        if rule is None:
            return result
        times = result.iteration_s[: rule.least + (1 if request.plan is None else 3)]
        is_cut = rule.slower_than_s is not None and statistics.median(times) > rule.slower_than_s
        return replace(result, iteration_s=times, is_cut=is_cut)


@pytest.fixture
def machine() -> EndingEarly:
    """Noisy by 1 %."""
    return EndingEarly()


def test_trials_decide_by_themselves_and_final_launches_measure_alike(
    tmp_path: Path, machine: EndingEarly
) -> None:
    run = begin(tmp_path / "r", study=STUDY)
    result = tune(run, machine)
    baseline = machine.requests[run.folder.trial(0)]
    assert (baseline.warmup, baseline.max_warmup) == (AUTO_WARMUP[0] + 5, AUTO_WARMUP[1] + 5)
    assert baseline.early_end is not None
    assert baseline.early_end.slower_than_s is None
    assert (baseline.early_end.least, baseline.measure) == AUTO_MEASURE
    assert baseline.early_end.precision == PRECISION
    trials = [trial for trial in result.trials[1:] if trial.record.repeats is None]
    for trial in trials:
        request = machine.requests[run.folder.trial(trial.number)]
        assert request.slow_above_s is None
        assert request.early_end is not None
        assert request.early_end.slower_than_s is not None
    final = [x for folder, x in machine.requests.items() if folder.parent == run.folder.final]
    assert len({request.plan_key for request in final}) > 1
    assert {(request.measure, request.early_end) for request in final} == {(AUTO_MEASURE[0] + 3, None)}
    assert {request.max_warmup for request in final} == {AUTO_WARMUP[1]}


def test_what_is_clearly_slower_than_the_best_is_no_finalist(tmp_path: Path, machine: EndingEarly) -> None:
    """Where the command is slow, plans that beat it and are far behind the best would be finalists."""
    run = begin(tmp_path / "r", study={**STUDY, "trials": 12, "top_k": 5})
    seconds = machine.seconds
    machine.seconds = lambda plan: seconds(plan) * (1.0 + 2.0 * (int(plan.key[:4], 16) % 7) / 7)
    result = tune(run, machine)
    cut = {trial.number for trial in result.trials if trial.record.is_cut}
    assert cut
    assert all(trial.record.value is not None for trial in result.trials if trial.number in cut)
    assert not cut & {ranking.trial.number for ranking in result.rankings}


def test_fixed_numbers_are_measured_as_asked(tmp_path: Path, machine: EndingEarly) -> None:
    run = begin(tmp_path / "r", study=STUDY, trial={"warmup": 2, "measure": 7})
    tune(run, machine)
    assert {(x.measure, x.max_warmup, x.early_end) for x in machine.requests.values()} == {(7, None, None)}
    searched = [x for folder, x in machine.requests.items() if folder.parent == run.folder.trials]
    assert {x.slow_above_s is None for x in searched if x.plan is not None} == {False}
