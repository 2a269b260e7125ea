"""A cluster file's memory limit: plans above it do not fit, and a command above it is no baseline."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.model.plan import Plan, read_plan
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord
from quartet_plugin.report.status import status_record
from quartet_plugin.trial.request import TrialRequest, TrialResult
from quartet_plugin.tuner.history import read_history
from quartet_plugin.tuner.memory_limit import stand_in_of
from quartet_plugin.tuner.proposer import keep_machine, kept_machine
from quartet_plugin.tuner.run_folder import TuningRun
from quartet_plugin.tuner.tune_result import write_best
from tests.model.plans import PLAN
from tests.model.test_custom_schedule import CUSTOM, plan_with
from tests.tuner.fakes import FakeMachine, Watching, outcome, resume, tune
from tests.tuner.fakes import begin_with_journal as begin
from tests.tuner.test_known_machine import probed

GIB = 2**30
CONFIG = {
    "search": {"schedule": ["no-pipelining", "1f1b", "interleaved"], "mapping": "stock"},
    "study": {"trials": 8, "top_k": 2, "rounds": 3, "starts": "none"},
}


class Sized(FakeMachine):
    """The peak of a launch is that of its plan, or of the user's command."""

    command_bytes = 3 * GIB

    def size(self, plan: Plan | None) -> int:
        if plan is None:
            return self.command_bytes
        return GIB if plan.layout.micro_batch_size == 8 else 3 * GIB

    def run(self, request: TrialRequest, **others: Any) -> TrialResult:
        result = replace(super().run(request, **others), peak_memory_bytes=self.size(request.plan))
        self.disk[request.folder] = result
        return result


def limited(folder: Path, limit_bytes: int) -> TuningRun:
    """A new run whose cluster file has devices of `limit_bytes`."""
    run = begin(folder / "r", **CONFIG)
    cluster = probed()
    for values in cluster["devices"].values():
        values["memory_bytes"] = limit_bytes
    (folder / "cluster.json").write_text(json.dumps(cluster))
    keep_machine(replace_cluster(run), cwd=folder, folder=run.folder)
    return run


def replace_cluster(run: TuningRun) -> Any:
    return run.config.machine.model_copy(update={"cluster": "cluster.json"})


def test_the_limit_is_the_least_of_the_files_devices(tmp_path: Path) -> None:
    run = limited(tmp_path, 2 * GIB)
    assert kept_machine(run.folder).memory_limit_bytes == 2 * GIB
    assert kept_machine(begin(tmp_path / "other").folder).memory_limit_bytes is None


def test_a_stock_plan_that_fits_becomes_the_baseline_of_a_command_that_does_not(tmp_path: Path) -> None:
    machine, watching = Sized(), Watching()
    run = limited(tmp_path, 2 * GIB)
    result = tune(run, machine, observer=watching)
    assert result.stand_in is not None
    assert result.baseline == result.stand_in.plan
    assert result.baseline.schedule.custom is None
    assert any("your command does not fit: a rank's peak is 3,072 MiB" in x for x in watching.messages)
    assert all(
        (trial.record.verdict == "infeasible") == (machine.size(trial.plan) > 2 * GIB)
        for trial in result.trials[1:]
        if trial.record.repeats is None and trial.record.verdict in ("measured", "infeasible")
    )
    keys = {key for folder, key in machine.launched if folder.startswith("000000-round")}
    assert keys == {result.baseline.key}
    fitting = [t for t in result.trials if t.record.verdict == "measured" and machine.size(t.plan) <= 2 * GIB]
    assert result.baseline.key in {trial.plan.key for trial in fitting}
    plan = write_best(result, run=run)
    assert plan is not None
    assert machine.size(read_plan(run.folder.best_plan)) <= 2 * GIB
    history = read_history(run.folder.path)
    assert f"the baseline is trial {result.stand_in.number}" in history.baseline_note
    assert status_record(history)["baseline_note"] == history.baseline_note


@pytest.mark.parametrize("limit_bytes", [4 * GIB, 3 * GIB])
def test_a_command_that_fits_stays_the_baseline(tmp_path: Path, limit_bytes: int) -> None:
    machine = Sized()
    result = tune(limited(tmp_path, limit_bytes), machine)
    assert result.stand_in is None
    assert {key for folder, key in machine.launched if folder.startswith("000000-round")} <= {None}
    assert read_history(tmp_path / "r").baseline_note == ""


def test_a_resumed_run_has_the_same_stand_in(tmp_path: Path) -> None:
    machine = Sized()
    first = tune(limited(tmp_path, 2 * GIB), machine)
    num_launched = len(machine.launched)
    again = tune(resume(tmp_path / "r"), machine)
    assert again.stand_in == first.stand_in
    assert outcome(again) == outcome(first)
    assert len(machine.launched) == num_launched


def test_only_a_stock_schedule_and_mapping_of_the_same_shape_stand_in() -> None:
    assert not PLAN.mapping.is_stock
    slots = tuple(sorted(PLAN.mapping.slots))
    command = replace(PLAN, mapping=replace(PLAN.mapping, slots=slots))
    plans = (
        plan_with(CUSTOM),
        PLAN,
        command,
    )
    record = TrialRecord(verdict="measured", outcome="OK", reason="", attempt_id="", value=1.0)
    trials = [FinishedTrial(number=n, plan=plan, record=record) for n, plan in enumerate(plans, start=1)]
    assert stand_in_of(trials[:2], command=command) is None
    assert stand_in_of(trials, command=command) == trials[2]
