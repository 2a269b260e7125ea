"""`kill -9` of the tuner in the middle of a trial: nothing measured is lost, no process is left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from quartet_plugin.errors import ConfigError, InfrastructureError
from quartet_plugin.trial import recover as recovery
from quartet_plugin.trial.attempt import read_result
from quartet_plugin.trial.processes import marked_processes
from quartet_plugin.trial.recover import recover
from quartet_plugin.trial.request import Outcome, TrialResult
from tests.cli.tuning import wait_until
from tests.faults.conftest import DEADLINE_S, all_in, past_the_limits

ROOT = Path(__file__).parents[2]
WAIT_S = 240.0


def killed_tuner(torchrun: Path, folder: Path, *fake: str, when: Callable[[Path], bool]) -> Path:
    """Start a tuner, kill it as soon as `when` holds for its attempt's folder, return that folder.

    The ranks wait after their first iteration until `release`: on a busy machine they would end before
    `when` is asked.
    """
    words = [sys.executable, "-m", "tests.faults.driver", str(torchrun), str(folder)]
    words += [*fake, "--hold", str(folder / "go")]
    tuner = subprocess.Popen(words, cwd=ROOT)
    attempt = folder / "attempt-1"

    def has_come() -> bool:
        assert tuner.poll() is None, "the tuner ended by itself"
        return when(attempt)

    wait_until(has_come, what="the moment to kill it", timeout_s=WAIT_S)
    os.kill(tuner.pid, signal.SIGKILL)
    tuner.wait()
    return attempt


def release(attempt: Path) -> bool:
    """Let the ranks go on; False, as a `stop` says that does not."""
    (attempt.parent / "go").touch()
    return False


def measuring(attempt: Path) -> bool:
    """Whether both ranks have begun to measure."""
    return all_in(attempt, "measure")


def processes(attempt: Path) -> list[int]:
    """The pids that run for an attempt."""
    attempt_id = json.loads((attempt / "trial.json").read_text())["attempt_id"]
    return [one.pid for one in marked_processes(attempt_id)]


def until_all_ended(attempt: Path) -> None:
    """Let the ranks go on, and wait for the trial's own end."""
    release(attempt)
    for pid in processes(attempt):
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(WAIT_S)


def test_a_trial_that_still_runs_is_waited_for(fake_torchrun: Path, tmp_path: Path) -> None:
    trials = tmp_path / "trials"
    attempt = killed_tuner(fake_torchrun, trials / "000003", when=measuring)
    assert processes(attempt)
    results = recover(trials, stop=lambda: release(attempt), poll_s=0.02)
    assert [one.folder for one in results] == [attempt]
    assert [one.outcome for one in results] == [Outcome.OK]
    assert len(results[0].iteration_s) == 4
    assert results[0].job is not None
    assert read_result(attempt) == results[0]
    assert recover(trials) == ()


def test_a_trial_under_the_real_torchrun_is_waited_for(tmp_path: Path) -> None:
    torchrun = Path(sys.executable).parent / "torchrun"
    attempt = killed_tuner(torchrun, tmp_path / "000001", "--gloo", when=measuring)
    assert [one.outcome for one in recover(tmp_path, stop=lambda: release(attempt))] == [Outcome.OK]


def test_row_34_a_clock_that_was_set_meanwhile_ends_no_trial(
    fake_torchrun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial that runs for a second is no day old, whatever the clock says now."""
    attempt = killed_tuner(fake_torchrun, tmp_path / "000003", when=measuring)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 86_400)
    results = recover(tmp_path, stop=lambda: release(attempt), poll_s=0.02)
    assert [one.outcome for one in results] == [Outcome.OK]
    assert results[0].wall_s < DEADLINE_S


def test_an_engines_attempt_has_its_whole_deadline_again(
    fake_torchrun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have waited in a queue until now, and that time counts for no deadline."""
    attempt = killed_tuner(fake_torchrun, tmp_path / "000003", when=measuring)
    until_all_ended(attempt)
    content = json.loads((attempt / "command.json").read_text())
    day_ago = {**content, "engine": "slurm", "time": content["time"] - 86_400}
    (attempt / "command.json").write_text(json.dumps(day_ago))
    given = {}

    def monitor(**options: Any) -> None:
        given.update(options)
        raise InfrastructureError("this is what the test asks for")

    monkeypatch.setattr(recovery, "AttemptMonitor", monitor)
    with pytest.raises(InfrastructureError, match="what the test asks for"):
        recover(tmp_path, poll_s=0.02)
    assert given["deadline_s"] == content["deadline_s"] > 0.0


def test_a_trial_that_has_ended_meanwhile_is_adopted(fake_torchrun: Path, tmp_path: Path) -> None:
    attempt = killed_tuner(fake_torchrun, tmp_path / "000001", when=measuring)
    until_all_ended(attempt)
    results = recover(tmp_path, poll_s=0.02)
    assert [one.outcome for one in results] == [Outcome.OK]


def test_a_failure_that_was_reported_is_kept(fake_torchrun: Path, tmp_path: Path) -> None:
    def reported(attempt: Path) -> bool:
        return (attempt / "rank-1.err.json").exists()

    attempt = killed_tuner(fake_torchrun, tmp_path / "000001", "--mode", "oom", when=measuring)
    release(attempt)
    wait_until(lambda: reported(attempt), what="the report", timeout_s=WAIT_S)
    results = recover(tmp_path, poll_s=0.02)
    assert [one.outcome for one in results] == [Outcome.INFEASIBLE]
    assert results[0].memory_excess_bytes == 12_345


def test_a_trial_that_does_not_move_is_ended(fake_torchrun: Path, tmp_path: Path) -> None:
    attempt = killed_tuner(
        fake_torchrun, tmp_path / "000001", "--mode", "stubborn", "--at", "4", when=measuring
    )
    release(attempt)
    results = recover(tmp_path, poll_s=0.02, **past_the_limits(tmp_path))
    assert [one.outcome for one in results] == [Outcome.INFRA]
    assert not processes(attempt)


def test_processes_that_died_with_the_tuner_are_infra(fake_torchrun: Path, tmp_path: Path) -> None:
    attempt = killed_tuner(fake_torchrun, tmp_path / "000001", when=measuring)
    for pid in processes(attempt):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    (attempt / ".rank-0.beat.json.1.ab.tmp").write_text('{"phase": "meas')
    results = recover(tmp_path, poll_s=0.02)
    assert [one.outcome for one in results] == [Outcome.INFRA]
    assert not list(attempt.glob(".*.tmp"))


def test_a_tuner_killed_right_after_the_launch_leaves_nothing(fake_torchrun: Path, tmp_path: Path) -> None:
    """Before it has written down a single process: those carry the attempt's id."""

    def launched(attempt: Path) -> bool:
        return (attempt / "stdout.log").exists()

    attempt = killed_tuner(fake_torchrun, tmp_path / "000001", "--mode", "hang-init", when=launched)
    (attempt / "processes.json").unlink(missing_ok=True)
    stop = iter([False, True])
    results = recover(tmp_path, stop=lambda: next(stop, True), poll_s=0.02)
    assert results[0].outcome in (Outcome.CANCELLED, Outcome.INFRA)
    assert not processes(attempt)


def test_an_attempt_that_was_never_launched(tmp_path: Path) -> None:
    (tmp_path / "000001" / "attempt-1").mkdir(parents=True)
    (tmp_path / "000001" / "attempt-1" / ".trial.json.1.ab.tmp").write_text("{")
    results = recover(tmp_path)
    assert [(one.outcome, one.phase) for one in results] == [(Outcome.INFRA, "launch")]
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_pid_that_is_used_again_is_not_touched(fake_torchrun: Path, tmp_path: Path) -> None:
    def recorded(attempt: Path) -> bool:
        return measuring(attempt) and (attempt / "processes.json").exists()

    attempt = killed_tuner(fake_torchrun, tmp_path / "000001", when=recorded)
    until_all_ended(attempt)
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        sheet = json.loads((attempt / "processes.json").read_text())
        for one in sheet["processes"]:
            one["pid"] = stranger.pid
        sheet["processes"] = sheet["processes"][:1]
        (attempt / "processes.json").write_text(json.dumps(sheet))
        assert recover(tmp_path, poll_s=0.02)[0].outcome is Outcome.OK
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
        (attempt / "processes.json").unlink()


def test_a_foreign_command_file_is_refused(fake_torchrun: Path, tmp_path: Path) -> None:
    attempt = killed_tuner(fake_torchrun, tmp_path / "000001", when=measuring)
    until_all_ended(attempt)
    sheet = json.loads((attempt / "command.json").read_text())
    sheet["attempt_id"] = "0" * 32
    (attempt / "command.json").write_text(json.dumps(sheet))
    files = sorted(attempt.iterdir())
    with pytest.raises(ConfigError, match="attempt_id"):
        recover(tmp_path)
    assert sorted(attempt.iterdir()) == files
    # The killed tuner may have been writing, and what is refused is left as it is.
    for half in attempt.glob(".*.tmp"):
        half.unlink()


def test_row_33_the_files_of_an_old_attempt_are_not_listened_to(
    trial: Callable[..., TrialResult], tmp_path: Path
) -> None:
    first = trial("--mode", "ok")
    again = trial(
        "--mode", "hang-init", max_attempts=1, attempt=2, deadline_s=200.0, **past_the_limits(tmp_path)
    )
    assert again.outcome is Outcome.INFEASIBLE
    report = (first.folder / "rank-0.json").read_text()
    (again.folder / "rank-0.json").write_text(report)
    (again.folder / "rank-1.json").write_text((first.folder / "rank-1.json").read_text())
    (again.folder / "result.json").unlink()
    results = recover(tmp_path, poll_s=0.02)
    assert [one.outcome for one in results] == [Outcome.INFRA]
