"""A study that begins with what another run has measured."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import score_of_median
from quartet_plugin.study.view import read_study
from quartet_plugin.trial.request import Outcome
from quartet_plugin.tuner.earlier_run import read_earlier_measurements
from quartet_plugin.tuner.history import read_history
from quartet_plugin.tuner.tune_result import TuneResult
from tests.cli.runs import kept_run
from tests.space.jobs import make_job, make_nodes, make_shape
from tests.tuner.fakes import FakeMachine, Killed, Watching, by_formula, resume, tune
from tests.tuner.fakes import begin_with_journal as begin
from tests.tuner.run_folders import WritingMachine, no_data_parallel, write_run

GOLDEN = Path(__file__).parents[1] / "golden" / "run_0.1.0"
STUDY = {"trials": 4, "rounds": 3, "top_k": 2}


@pytest.fixture(scope="module")
def earlier() -> Iterator[Path]:
    with kept_run(run="earlier", study={"trials": 10, "rounds": 3}) as path:
        yield path


def test_the_same_cluster_is_told_what_was_measured(tmp_path: Path, earlier: Path) -> None:
    """It costs no budget, carries its source, and is launched again in the final rounds alone."""
    machine, watching = FakeMachine(outcome=no_data_parallel), Watching()
    result = tune(begin(tmp_path / "r", study=STUDY), machine, earlier_run=earlier, observer=watching)
    taken = [r for r in result.trials if r.record.source and r.record.repeats is None]
    assert len(taken) >= 6
    assert {trial.record.verdict for trial in taken} == {"measured", "infeasible"}
    assert all((trial.record.source or "").startswith("earlier:") for trial in taken)
    own = [r for r in result.trials if r.number and r.record.source is None and r.record.repeats is None]
    assert len(own) == 4
    searched = {key for name, key in machine.launched if "round" not in name}
    assert not searched & {trial.plan.key for trial in taken}
    assert any(f"from earlier: {len(taken)} of its measurements" in text for text in watching.messages)
    assert result.winner is not None
    assert result.winner.comparison.plan.num_launches >= 3


def test_a_machine_that_became_slower_does_not_count(tmp_path: Path, earlier: Path) -> None:
    def slower(plan: Plan) -> float:
        return 3.0 * by_formula(plan)

    machine = FakeMachine(outcome=no_data_parallel, seconds=slower, noise=0.0)
    result = tune(begin(tmp_path / "r", study=STUDY), machine, earlier_run=earlier)
    for trial in result.trials:
        if trial.record.source and trial.record.iteration_s is not None:
            assert trial.record.iteration_s == pytest.approx(slower(trial.plan), rel=0.15)


def test_what_the_other_run_measured_on_a_slower_machine_counts_as_it_would_have_before(
    tmp_path: Path,
) -> None:
    drifting = WritingMachine(noise=0.0)
    drifting.seconds = lambda plan: by_formula(plan) * (1.5 if len(drifting.launched) > 4 else 1.0)
    run, result = write_run(tmp_path / "drifted", drifting, study={"trials": 8, "rounds": 3, "control": 3})
    drifts = {r.number: r.record.drift for r in result.trials if r.record.repeats is None}
    assert min(drifts.values()) == pytest.approx(1.0 / 1.5)
    for study in (None, read_study(run.storage)):
        rows = read_history(tmp_path / "drifted", study=study).trials
        assert {row.number: row.drift for row in rows if row.repeats is None} == drifts
    found = tune(begin(tmp_path / "r", study=STUDY), FakeMachine(noise=0.0), earlier_run=tmp_path / "drifted")
    record = [r for r in found.trials if r.record.source and r.record.iteration_s is not None]
    assert len(record) >= 6
    for trial in record:
        assert trial.record.iteration_s == pytest.approx(by_formula(trial.plan))


def test_the_best_are_taken_and_what_was_cut_short_stays_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quartet_plugin.tuner.earlier_run.MAX_TRIALS", 2)
    run = Path(shutil.copytree(GOLDEN, tmp_path / "r"))
    result = run / "trials" / "000005" / "attempt-1" / "result.json"
    write_json_atomic(result, {**read_json(result), "is_cut": True})
    baseline = read_history(run).baseline
    assert baseline is not None
    assert baseline.plan is not None
    assert baseline.iteration_s is not None

    class AnyPlan:
        def __init__(self, plan: Plan) -> None:
            self.baseline = plan

        def refusal_of(self, plan: Plan) -> None: ...

        def params_of(self, plan: Plan) -> dict[str, str]:
            return {"split.plan": plan.key}

    space: Any = AnyPlan(baseline.plan)
    measured = read_earlier_measurements(
        run,
        space=space,
        baseline=score_of_median(baseline.plan, iteration_s=baseline.iteration_s),
        objective="tokens_per_s",
    )
    taken = [(record.source, record.is_cut) for _, record in measured.trials]
    assert taken == [("r:6", False), ("r:5", True)]
    assert "no more than the best 2 are taken" in measured.words
    limited = read_earlier_measurements(
        run,
        space=space,
        baseline=score_of_median(baseline.plan, iteration_s=baseline.iteration_s),
        objective="tokens_per_s",
        limit_bytes=1,
    )
    assert limited.trials
    for _, record in limited.trials:
        assert (record.verdict, record.value) == ("infeasible", None)
        assert record.excess == record.peak_memory_bytes - 1
        assert "above the 0 MiB of machine.cluster" in record.reason


def measured_times(result: TuneResult) -> dict[str, tuple[str, float]]:
    """The source and the seconds of an iteration of what a run was begun with, by plan."""
    return {
        trial.plan.key: (trial.record.source, trial.record.iteration_s)
        for trial in result.trials
        if trial.record.source and trial.record.repeats is None and trial.record.iteration_s is not None
    }


def test_what_a_run_was_begun_with_is_passed_on(tmp_path: Path) -> None:
    """Also where the first run is gone, and through a run that measured on a slower machine."""
    first, second = tmp_path / "first", tmp_path / "second"
    machine = WritingMachine(outcome=no_data_parallel, noise=0.0)
    write_run(first, machine, run="first", study={"trials": 10, "rounds": 3, "storage": "journal"})
    slower = WritingMachine(outcome=no_data_parallel, noise=0.0, seconds=lambda plan: 3.0 * by_formula(plan))
    begun = begin(second, run="second", study=STUDY)
    middle = tune(begun, slower, earlier_run=first)
    shutil.rmtree(first)
    watching = Watching()
    last = tune(
        begin(tmp_path / "last", study=STUDY),
        FakeMachine(outcome=no_data_parallel, noise=0.0),
        earlier_run=second,
        observer=watching,
    )
    passed_on = {key: of for key, of in measured_times(last).items() if of[0].startswith("first:")}
    assert {key: source for key, (source, _) in passed_on.items()} == {
        key: source for key, (source, _) in measured_times(middle).items()
    }
    assert len(passed_on) >= 3
    for trial in last.trials:
        if trial.plan.key in passed_on and trial.record.repeats is None:
            assert trial.record.iteration_s == pytest.approx(by_formula(trial.plan))
    infeasible = [r.record for r in last.trials if r.record.source and r.record.verdict == "infeasible"]
    sources = {(record.source or "").partition(":")[0] for record in infeasible}
    assert "first" in sources
    assert all(record.reason.count("(in ") == 1 for record in infeasible)
    num_passed_on = sum((r.record.source or "").startswith("first:") for r in last.trials)
    assert any(f", {num_passed_on} of them of runs before it" in text for text in watching.messages)


def test_what_was_passed_on_to_another_cluster_is_tried_first(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    machine = WritingMachine(outcome=no_data_parallel, noise=0.0)
    write_run(first, machine, run="first", study={"trials": 16, "rounds": 3, "storage": "journal"})
    run = begin(second, run="second", study={**STUDY, "trials": 1})
    best = tune(run, machine=WritingMachine(outcome=no_data_parallel, noise=0.0), earlier_run=first)
    assert best.winner is not None
    assert best.winner.trial.record.source is not None
    elsewhere = FakeMachine(cluster=make_nodes(1, 1), noise=0.0)
    result = tune(begin(tmp_path / "last", study=STUDY), elsewhere, earlier_run=second)
    first_tried, winner = result.trials[1].plan, best.winner.trial.plan
    assert (first_tried.layout, first_tried.split) == (winner.layout, winner.split)


def test_another_cluster_only_says_what_to_try_first(tmp_path: Path, earlier: Path) -> None:
    machine, watching = FakeMachine(cluster=make_nodes(1, 1)), Watching()
    result = tune(begin(tmp_path / "r", study=STUDY), machine, earlier_run=earlier, observer=watching)
    assert not any(trial.record.source for trial in result.trials)
    assert any("another job or cluster; 5 of its best plans come first" in text for text in watching.messages)
    first = result.trials[1].plan
    assert first.made_for.nodes == machine.cluster
    found = read_history(earlier)
    best = found.best
    assert best is not None
    assert best.plan is not None
    assert (first.layout, first.split) == (best.plan.layout, best.plan.split)


def test_a_resumed_run_has_it_already(tmp_path: Path, earlier: Path) -> None:
    reference = tune(begin(tmp_path / "s", study=STUDY), FakeMachine(), earlier_run=earlier)
    machine = FakeMachine(dies_at=3)
    with pytest.raises(Killed):
        tune(begin(tmp_path / "r", study=STUDY), machine, earlier_run=earlier)
    machine.dies_at = None
    result = tune(resume(tmp_path / "r"), machine)
    assert [replace(r.record, attempt_id="") for r in result.trials] == [
        replace(r.record, attempt_id="") for r in reference.trials
    ]


def test_a_run_without_a_baseline_is_refused(tmp_path: Path) -> None:
    other = begin(tmp_path / "other")
    with pytest.raises(ConfigError, match="its baseline was not measured"):
        tune(begin(tmp_path / "r", study=STUDY), FakeMachine(), earlier_run=other.folder.path)
    with pytest.raises(ConfigError, match="no such run"):
        tune(begin(tmp_path / "s", study=STUDY), FakeMachine(), earlier_run=tmp_path / "nowhere")


def test_many_that_did_not_fit_elsewhere_end_no_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quartet_plugin.tuner.sequential_search.MAX_INFEASIBLE_IN_A_ROW", 6)

    def outcome(plan: Plan) -> Outcome:
        return Outcome.OK if plan.layout == plan.made_for.baseline.layout else Outcome.INFEASIBLE

    earlier, _ = write_run(
        tmp_path / "earlier", WritingMachine(outcome=outcome), run="earlier", study={"trials": 5, "rounds": 3}
    )
    machine = FakeMachine(outcome=outcome)
    result = tune(begin(tmp_path / "r", study=STUDY), machine, earlier_run=earlier.folder.path)
    own = [r for r in result.trials if r.number and r.record.source is None and r.record.repeats is None]
    assert len(own) == 4


def test_a_model_of_another_depth_begins_with_the_best_plans_at_its_own_depth(
    tmp_path: Path, earlier: Path
) -> None:
    machine, watching = FakeMachine(job=make_job(shape=make_shape(num_layers=16))), Watching()
    search = {"virtual_stages": 1, "schedule": ["no-pipelining", "1f1b"]}
    result = tune(
        begin(tmp_path / "r", search=search, study=STUDY), machine, earlier_run=earlier, observer=watching
    )
    assert any("of its best plans come first" in text for text in watching.messages)
    assert not any("cluster; 0 of its" in text for text in watching.messages)
    first = result.trials[1].plan
    assert sum(first.split.transformer_layers_per_stage) == 16
    assert first.layout in {row.plan.layout for row in read_history(earlier).trials if row.plan is not None}
