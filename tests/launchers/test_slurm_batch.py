"""What `slurm-batch` gives to sbatch, without a Slurm."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from quartet_plugin.errors import ConfigError, InfrastructureError
from quartet_plugin.launchers import patience, slurm_batch, slurm_commands
from quartet_plugin.launchers.protocol import NodesHandle
from quartet_plugin.launchers.site import Site
from quartet_plugin.launchers.slurm_batch import (
    EXIT_FILE,
    SCRIPT,
    SlurmBatchEngine,
    SlurmBatchLauncher,
    SlurmJob,
)
from quartet_plugin.protocol.environment import ATTEMPT_ID

AWAY = (
    "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
)


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    """Shell scripts by these names, which come first on PATH."""
    for name, text in texts.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def start(folder: Path) -> NodesHandle:
    """Submit a job."""
    env = {"PATH": os.environ["PATH"], ATTEMPT_ID: "a" * 32}
    return SlurmBatchLauncher(1, Site()).start(["true"], env=env, cwd=folder, stdout=folder / "stdout.log")


def submissions(folder: Path) -> int:
    """How often sbatch has run."""
    return len((folder / "submitted").read_text().splitlines())


@pytest.mark.parametrize(("squeue", "times"), [("echo '7|PENDING'", 1), ("true", 2)])
def test_a_submission_without_an_answer_is_repeated_unless_it_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, times: int
) -> None:
    monkeypatch.setattr(slurm_commands, "_PAUSE_S", 0.01)
    once = f"echo 1 >> {tmp_path}/submitted; mkdir {tmp_path}/away 2>/dev/null && {{ {AWAY}; }}; exit 0"
    programs(tmp_path, monkeypatch, sbatch=once, squeue=squeue)
    start(tmp_path)
    assert submissions(tmp_path) == times


def test_an_sbatch_that_does_not_end_is_killed_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_commands, "_PAUSE_S", 0.01)
    monkeypatch.setattr(slurm_commands, "PROGRAM_S", 1.0)
    once = f"echo 1 >> {tmp_path}/submitted; mkdir {tmp_path}/away 2>/dev/null && exec sleep 600; exit 0"
    programs(tmp_path, monkeypatch, sbatch=once, squeue="true")
    start(tmp_path)
    assert submissions(tmp_path) >= 2


def test_a_refused_submission_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "echo 'sbatch: warning: x' >&2; echo 'sbatch: error: Invalid partition name specified' >&2"
    programs(tmp_path, monkeypatch, sbatch=f"echo 1 >> {tmp_path}/submitted; {refusal}; exit 1")
    with pytest.raises(InfrastructureError, match="sbatch: sbatch: error: Invalid partition"):
        start(tmp_path)
    assert submissions(tmp_path) == 1


def test_a_host_without_sbatch_is_a_wrong_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch: not found"):
        start(tmp_path)


def test_sbatch_sees_the_users_variables_and_the_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(tmp_path, monkeypatch, sbatch=f"env > {tmp_path}/seen")
    users = {"SBATCH_ACCOUNT": "team", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_QOS": "low"}
    of_a_job = {"SLURM_JOB_ID": "7", "SRUN_DEBUG": "3", "SBATCH_MEM_BIND": "none"}
    env = {"PATH": os.environ["PATH"], ATTEMPT_ID: "a" * 32, **users, **of_a_job}
    launcher = SlurmBatchLauncher(1, Site(environment={"SBATCH_QOS": "high"}))
    launcher.start(["true"], env=env, cwd=tmp_path, stdout=tmp_path / "stdout.log")
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines())
    assert users | {"SBATCH_QOS": "high"} == {name: seen[name] for name in users}
    assert not of_a_job.keys() & seen.keys()


def job(folder: Path) -> SlurmJob:
    """The handle of a job whose script writes into `folder`."""
    return SlurmJob("quartet-a", folder / "exit-code")


def test_a_look_does_not_wait_for_a_controller_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits in a question renews no lease."""
    monkeypatch.setattr(slurm_commands, "_PAUSE_S", 1e6)
    monkeypatch.setattr(slurm_batch, "_LOOK_S", 0.0)
    programs(tmp_path, monkeypatch, squeue=AWAY)
    looked_at = job(tmp_path)
    monkeypatch.setattr(looked_at, "_seen_s", time.monotonic() - 1e6)
    assert looked_at.poll() is None
    assert looked_at.poll() is None
    monkeypatch.setattr(patience, "PATIENCE_S", 0.0)
    with pytest.raises(patience.NoAnswerError, match="is slurmctld up"):
        looked_at.poll()


def test_a_controller_that_answers_again_is_waited_for_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_batch, "_LOOK_S", 0.0)
    looked_at = job(tmp_path)
    for squeue in (AWAY, "echo '7|RUNNING'", AWAY):
        programs(tmp_path, monkeypatch, squeue=squeue)
        assert looked_at.poll() is None
        assert looked_at.fault is None
    programs(tmp_path, monkeypatch, squeue="echo '7|COMPLETED'")
    assert looked_at.poll() == 1


def test_processes_that_got_a_sigterm_were_ended_by_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the grace time of a preemption the job's state says nothing yet."""
    programs(tmp_path, monkeypatch, squeue="echo '7|COMPLETING'", scancel="true")
    looked_at = job(tmp_path)
    (tmp_path / "exit-code").write_text("143\n")
    assert looked_at.poll() == 143
    assert looked_at.fault is not None
    assert "got a SIGTERM: Slurm preempts it" in looked_at.fault
    looked_at.terminate()
    assert looked_at.fault is None


def test_a_suspended_job_is_no_plans_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch, squeue="echo '7|SUSPENDED'")
    assert job(tmp_path).poll() is None
    assert job(tmp_path).fault == "Slurm has stopped the job: SUSPENDED"


def test_a_file_server_that_fails_ends_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch, squeue="echo '7|RUNNING'")
    (tmp_path / "exit-code").mkdir()  # reading it is an error of the system
    assert job(tmp_path).poll() is None


def no_answer(*words: object, **options: object) -> NoReturn:
    """A question to a controller that is away, after the time that it may be away."""
    raise patience.NoAnswerError("sbatch: Socket timed out on send/recv operation; is slurmctld up?")


def submission(monkeypatch: pytest.MonkeyPatch, end: Callable[[], object]) -> None:
    """Let `end` be what comes of a submission."""
    monkeypatch.setattr(slurm_commands, "submit", lambda words, **options: end())


def a_queued_job(folder: Path, monkeypatch: pytest.MonkeyPatch, *, state: str = "PENDING") -> None:
    """Let Slurm have job 7 in this state until it is cancelled, and an srun that says that it ran."""
    monkeypatch.setattr(slurm_batch, "_POLL_S", 0.01)
    programs(
        folder,
        monkeypatch,
        squeue=f"test -e {folder}/cancelled || echo '7|{state}'",
        scancel=f"touch {folder}/cancelled",
        srun=f"touch {folder}/ran",
    )


def starts_something(folder: Path) -> bool:
    """Whether the job's script, which gets its nodes now, starts the command."""
    subprocess.run(["bash", folder / SCRIPT, folder / EXIT_FILE, "true"], check=False, timeout=60)
    return (folder / "ran").exists()


def begin(folder: Path) -> None:
    """Begin as the job's script does."""
    (folder / f"{EXIT_FILE}.begun").mkdir()


def test_a_job_that_was_perhaps_queued_starts_nothing_and_is_cancelled_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trial may have been launched again meanwhile."""
    a_queued_job(tmp_path, monkeypatch)
    submission(monkeypatch, no_answer)
    with pytest.raises(patience.NoAnswerError):
        start(tmp_path)
    later = SlurmBatchEngine(Site()).adopt("a" * 32, stdout=tmp_path / "stdout.log")
    assert later.poll() == 1
    assert later.fault is None
    assert later.end_on_nodes() == ()
    assert (tmp_path / "cancelled").exists()
    assert not starts_something(tmp_path)
    assert later.poll() == 1


def test_a_job_that_was_queued_starts_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_queued_job(tmp_path, monkeypatch)
    submission(monkeypatch, lambda: None)
    handle = start(tmp_path)
    assert handle.poll() is None
    assert starts_something(tmp_path)
    assert handle.poll() == 0


def test_a_job_that_has_begun_was_taken_though_sbatch_had_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_queued_job(tmp_path, monkeypatch, state="RUNNING")

    def begun() -> None:
        begin(tmp_path)
        no_answer()

    submission(monkeypatch, begun)
    assert start(tmp_path).poll() is None
    assert not (tmp_path / "cancelled").exists()


def test_a_job_that_has_begun_is_cancelled_where_its_start_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_queued_job(tmp_path, monkeypatch, state="RUNNING")

    def interrupted() -> None:
        begin(tmp_path)
        raise KeyboardInterrupt

    submission(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    assert (tmp_path / "cancelled").exists()


def test_a_queued_job_is_ended_though_the_controller_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_queued_job(tmp_path, monkeypatch)
    submission(monkeypatch, lambda: None)
    handle = start(tmp_path)
    monkeypatch.setattr(slurm_commands, "jobs_named", no_answer)
    with pytest.raises(patience.NoAnswerError):
        handle.end_on_nodes()
    assert not starts_something(tmp_path)
    assert handle.poll() == 1
