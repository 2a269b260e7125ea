"""The plans of a run are listed while trial 0 ends, and nothing that is proposed depends on it."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError, InfrastructureError
from quartet_plugin.model.packed_lengths import PackedLengths
from quartet_plugin.planner.plan_scorer import PlanScorer
from quartet_plugin.study.storage import StudyStorage
from quartet_plugin.trial import attempt as attempt_files
from quartet_plugin.trial.request import Outcome, Progress, TrialRequest, TrialResult
from quartet_plugin.tuner import baseline_space, early_plans
from quartet_plugin.tuner.early_plans import EarlyPlans
from tests.space.jobs import make_job, make_layout
from tests.tuner.fakes import FakeMachine, begin_with_journal, outcome, tune
from tests.tuner.run_folders import WritingMachine

JOB = make_job(layout=make_layout(pipeline_parallel=2))
SHORT = {"study": {"trials": 3, "top_k": 1, "rounds": 3}}


class ReportingMachine(WritingMachine):
    """Says that all ranks of a launch have reported before it ends, as the monitor of an attempt does."""

    def run(self, request: TrialRequest, **options: Any) -> TrialResult:
        result = super().run(request, **options)
        options["on_progress"](at("done"))
        ended()
        return result


def at(phase: Any) -> Progress:
    return Progress(attempt=1, phase=phase, iteration=3, num_iterations=13, elapsed_s=3.0)


def ended() -> None:
    """Wait until what was begun early is made."""
    for thread in threading.enumerate():
        if thread.name == early_plans.THREAD:
            thread.join()


def measured(folder: Path) -> tuple[EarlyPlans, Path, FakeMachine]:
    """The early plans of a run, and the folder of its trial 0, which has ended."""
    machine, run = WritingMachine(job=JOB), begin_with_journal(folder / "run", study={"trials": 1})
    tune(run, machine)
    return EarlyPlans(run), run.folder.trial(0) / "attempt-1", machine


def test_what_is_made_early_counts_for_the_same_job_on_the_same_nodes(tmp_path: Path) -> None:
    early, attempt, machine = measured(tmp_path)
    assert early.take(JOB, nodes=machine.cluster) == (None, None)
    early = EarlyPlans(early.run)
    for phase in ("measure", "done", "done"):
        early.observe(attempt, at(phase))
    ended()
    space, proposer = early.take(JOB, nodes=machine.cluster)
    assert space is not None
    assert (space.job, space.nodes) == (JOB, machine.cluster)
    assert proposer is not None
    assert early.take(replace(JOB, global_batch_size=2 * JOB.global_batch_size), nodes=machine.cluster) == (
        None,
        None,
    )
    renamed = (replace(machine.cluster[0], host="other"), *machine.cluster[1:])
    assert early.take(JOB, nodes=renamed) == (None, None)


def test_documents_that_ranks_counted_belong_to_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, attempt, machine = measured(tmp_path)
    packed = PackedLengths(tokens_per_sequence=48.0, squares_per_sequence=1152.0)
    monkeypatch.setattr(attempt_files, "packed_lengths_of", lambda *_, **__: packed)
    early.observe(attempt, at("done"))
    ended()
    job = replace(JOB, packed=packed)
    assert early.take(job, nodes=machine.cluster) != (None, None)


def test_an_attempt_without_reports_makes_nothing_early(tmp_path: Path) -> None:
    early, attempt, machine = measured(tmp_path)
    early.observe(attempt.with_name("attempt-7"), at("done"))
    assert early.take(JOB, nodes=machine.cluster) == (None, None)


def test_the_thread_ends_at_its_next_plan_where_another_attempt_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, attempt, machine = measured(tmp_path)
    is_waiting, stops = threading.Event(), []

    def prepare(scorer: PlanScorer, *, is_stopped: Callable[[], bool]) -> None:
        is_waiting.set()
        while not is_stopped():
            pass
        stops.append(scorer)

    monkeypatch.setattr(PlanScorer, "prepare_candidates", prepare)
    early.observe(attempt, at("done"))
    assert is_waiting.wait(60.0)
    early.observe(attempt.with_name("attempt-2"), at("launch"))
    ended()
    assert len(stops) == 1
    # What it has made by then is of the same job.
    assert early.take(JOB, nodes=machine.cluster) != (None, None)


def test_a_run_that_ends_without_its_plans_ends_their_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_waiting, stops = threading.Event(), []

    def prepare(scorer: PlanScorer, *, is_stopped: Callable[[], bool]) -> None:
        is_waiting.set()
        while not is_stopped():
            pass
        stops.append(scorer)

    class DivergingMachine(WritingMachine):
        def run(self, request: TrialRequest, **options: Any) -> TrialResult:
            result = super().run(request, **options)
            options["on_progress"](at("done"))
            assert is_waiting.wait(60.0)
            return replace(result, outcome=Outcome.WRONG)

    monkeypatch.setattr(PlanScorer, "prepare_candidates", prepare)
    with pytest.raises(InfrastructureError, match="diverges"):
        tune(begin_with_journal(tmp_path), DivergingMachine(job=JOB))
    assert len(stops) == 1


def test_a_run_is_the_same_with_early_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = tune(begin_with_journal(tmp_path / "alone", **SHORT), WritingMachine(job=JOB))
    monkeypatch.delattr(baseline_space, "space_around")  # the tuner makes no other space
    early = tune(begin_with_journal(tmp_path / "early", **SHORT), ReportingMachine(job=JOB))
    assert outcome(early) == outcome(alone)


def test_what_fails_early_fails_where_the_tuner_does_it(tmp_path: Path) -> None:
    run = begin_with_journal(tmp_path, search={"tensor_parallel": 64})
    with pytest.raises(ConfigError, match="tensor_parallel"):
        tune(run, ReportingMachine(job=JOB))


def test_libraries_are_imported_once_while_the_first_processes_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[str] = []
    monkeypatch.setattr(StudyStorage, "import_libraries", lambda storage: imported.append(storage.run))
    early = EarlyPlans(begin_with_journal(tmp_path))
    early.observe(tmp_path, at("measure"))
    assert imported == []
    for attempt in ("attempt-1", "attempt-2"):
        early.observe(tmp_path / attempt, at("launch"))
    ended()
    assert imported == ["r"]
