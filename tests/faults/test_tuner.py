"""Rows of the fault matrix that a whole tuner meets, with real processes: signals, disks, leases, secrets."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.trial import watch
from quartet_plugin.trial.lease import LOCK_NAME, Lease
from tests.cli.tuning import environment, living, prepare, wait_until
from tests.faults.conftest import all_in, are_recorded

ENTRY = "from quartet_plugin.cli.main import entry; entry()"
SLOW = ["--step-s", "0.3"]


def tune(folder: Path, *more: str, fake: list[str] | None = None, before: tuple[str, ...] = ()) -> int:
    """`quartet tune` in this process; `before` goes before the user's command."""
    options, command = prepare(folder)
    return main([*options, *more, "--", *before, *command, *(fake or [])])


def start(folder: Path, *more: str, fake: list[str], **variables: str) -> "subprocess.Popen[bytes]":
    """`quartet tune` in a process of its own."""
    options, command = prepare(folder)
    argv = [sys.executable, "-c", ENTRY, *options, *more, "--", *command, *fake]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, env={**environment(), **variables}, stdout=pipe, stderr=subprocess.STDOUT)


def run_of(folder: Path) -> Path:
    """The run's folder."""
    return folder / "runs" / "fake"


def beat_of(folder: Path, trial: int) -> Path:
    """What appears when a trial has begun."""
    return run_of(folder) / "trials" / f"{trial:06d}" / "attempt-1" / "rank-1.beat.json"


def told(folder: Path) -> list[int]:
    """The trials that the events say were told, in order."""
    lines = (run_of(folder) / "events.jsonl").read_text().splitlines()
    return [event["trial"] for event in map(json.loads, lines) if event["kind"] == "told"]


def ended(process: "subprocess.Popen[bytes]") -> tuple[int, str]:
    """The exit code of a tuner, and what it printed."""
    printed, _ = process.communicate(timeout=240)
    return process.returncode, printed.decode(errors="replace")


def assert_nothing_is_left_over(run: Path) -> None:
    """No lock, no room that was kept, no half-written file; and nobody else may look into it (row 39)."""
    assert run.stat().st_mode & 0o777 == 0o700
    for path in run.rglob("*"):
        assert not path.name.endswith((".tmp", ".draft", "-journal", ".lock", LOCK_NAME)), path
        assert not path.name.startswith(".ballast"), path


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.nightly)])
def test_row_15_a_preempted_tuner_leaves_its_trial_to_the_requeued_one(tmp_path: Path, number: int) -> None:
    """Slurm sends SIGTERM to tuner and ranks alike, and starts the very command again."""
    go = tmp_path / "go"
    fake = ["--nominal", "--hold", str(go)]
    process = start(tmp_path, fake=fake)
    beat = beat_of(tmp_path, 1)
    wait_until(beat.exists, what="trial 1", timeout_s=240)
    process.send_signal(number)
    if number == signal.SIGTERM:
        for rank in (0, 1):
            path = beat.with_name(f"rank-{rank}.beat.json")
            if path.exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(json.loads(path.read_text())["pid"], signal.SIGTERM)
    code, printed = ended(process)
    assert code == 130, printed
    assert "--resume continues" in printed
    assert living(tmp_path) == []
    assert not (run_of(tmp_path) / LOCK_NAME).exists()
    assert told(tmp_path) == []
    if number == signal.SIGUSR1:
        return
    go.touch()
    again = start(tmp_path, fake=fake, SLURM_RESTART_COUNT="1")
    code, printed = ended(again)
    assert code == 0, printed
    assert told(tmp_path) == sorted(set(told(tmp_path)))
    assert len(told(tmp_path)) >= 3


def test_row_15_a_first_start_under_slurm_is_none_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert tune(tmp_path, "--resume") == 2
    assert "no run to resume" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")  # requeued before it had begun anything
    assert tune(tmp_path, fake=["--mode", "nothing"]) == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_row_10_a_profile_that_is_ended_from_outside_leaves_no_rank(tmp_path: Path, number: int) -> None:
    """Its ranks have sessions of their own; `quartet check` ends its own in the same way."""
    _, command = prepare(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    argv = [sys.executable, "-c", ENTRY, "profile", "-o", str(tmp_path / "p.json"), "--", *command]
    process = subprocess.Popen(
        [*argv, "--hold", str(tmp_path / "never")],
        env={**environment(), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_until(lambda: bool(list(temporary.rglob("rank-1.beat.json"))), what="the profile", timeout_s=240)
    process.send_signal(number)
    code, printed = ended(process)
    assert code == 130, printed
    assert living(tmp_path) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_row_29_a_disk_that_fills_up_in_a_trial_is_exit_6_and_nothing_measured_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks that the tuner can no longer record train to their end; it waits for space and gives up."""
    run, attempt, go = run_of(tmp_path), beat_of(tmp_path, 1).parent, tmp_path / "go"
    fake = ["--nominal", "--hold", str(go), "--hold-at", "-1"]
    is_launched = False
    with monkeypatch.context() as patch:

        def unless_full(function: Callable[..., Any]) -> Callable[..., Any]:
            def called(*arguments: Any) -> Any:
                nonlocal is_launched
                is_full = is_launched and bool(list(run.glob(".ballast-*")))
                # The first call that sees the file is a part of its writing.
                is_launched |= (attempt / "processes.json").exists()
                if is_full:
                    go.touch()
                    if all_in(attempt, "done"):
                        patch.setattr(watch, "_LOST_S", 0.0)  # the minute has passed
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return function(*arguments)

            return called

        patch.setattr(os, "fsync", unless_full(os.fsync))
        patch.setattr(os, "write", unless_full(os.write))
        assert tune(tmp_path, fake=fake) == 6
    shown = capfd.readouterr().err.strip().splitlines()
    assert "No space left on device" in shown[-1]
    assert living(tmp_path) == []
    assert not (run / LOCK_NAME).exists()
    last = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], "No space left" in last["reason"]) == ("storage", True)
    assert tune(tmp_path, "--resume", fake=fake) == 0
    for trial in (0, 1):
        assert not (run / "trials" / f"{trial:06d}" / "attempt-2").exists()


def test_row_30_a_second_tuner_is_refused_and_told_who_holds_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path)
    run.mkdir(parents=True)
    with Lease.acquire(run):
        before = {path.name for path in run.iterdir()}
        assert tune(tmp_path) == 6
        assert {path.name for path in run.iterdir()} == before
    shown = capsys.readouterr().err.strip().splitlines()
    assert len(shown) == 1
    assert f"another tuner holds this run: process {os.getpid()} on" in shown[0]


def stop_between_writes(tuner: "subprocess.Popen[bytes]", run: Path) -> None:
    """SIGSTOP while the ranks are waited for, at a moment when the tuner does not renew its lease."""
    stopped = psutil.Process(tuner.pid)
    while True:
        tuner.send_signal(signal.SIGSTOP)
        wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, what="SIGSTOP")
        with (run / ".lock.guard").open() as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        tuner.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_row_32_a_tuner_that_was_stopped_and_replaced_writes_nothing_when_it_wakes(tmp_path: Path) -> None:
    """SIGSTOP, a takeover after the lease ran out, a whole search by the other tuner, SIGCONT."""
    run, attempt, go = run_of(tmp_path), beat_of(tmp_path, 1).parent, tmp_path / "go"
    fake = ["--nominal", "--hold", str(go)]
    stopped = start(tmp_path, fake=fake)
    try:
        wait_until(
            lambda: all_in(attempt, "measure") and are_recorded(attempt), what="trial 1", timeout_s=240
        )
        stop_between_writes(stopped, run)
        os.utime(run / LOCK_NAME)
        assert tune(tmp_path, "--resume", "--takeover", fake=fake) == 6  # it has renewed a moment ago
        os.utime(run / LOCK_NAME, (0, 0))
        assert tune(tmp_path, "--resume", fake=fake) == 6  # not without the word
        go.touch()
        assert tune(tmp_path, "--resume", "--takeover", fake=fake) == 0
        files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    finally:
        stopped.send_signal(signal.SIGCONT)
    code, printed = ended(stopped)
    assert code == 6, printed
    assert "writes nothing more" in printed
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files
    assert told(tmp_path) == sorted(set(told(tmp_path)))
    assert living(tmp_path) == []


def test_row_37_no_secret_is_in_any_file_of_a_run_nor_on_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the environment, in the command's own assignments, and behind its flags."""
    monkeypatch.setenv("WANDB_API_KEY", "hunter22-env")
    monkeypatch.setenv("NCCL_SECRET", "hunter22-env")
    monkeypatch.setenv("PGPASSWORD", "hunter22-env")
    before = ("env", "HF_TOKEN=hunter22-word")
    fake = ["--api-key", "hunter22-flag", "--auth=hunter22-auth"]
    assert tune(tmp_path, before=before, fake=fake) == 0
    files = [path for path in run_of(tmp_path).rglob("*") if path.is_file()]
    assert {"report.html", "config.json", "events.jsonl", "command.json", "study.sqlite3"} <= {
        path.name for path in files
    }
    for path in files:
        assert b"hunter22" not in path.read_bytes(), path
    shown = capfd.readouterr()
    assert "hunter22" not in shown.out + shown.err
    assert_nothing_is_left_over(run_of(tmp_path))
    assert tune(tmp_path, "--resume", before=("env", "HF_TOKEN=another"), fake=fake) == 0  # it was renewed
    assert tune(tmp_path, "--resume", before=before, fake=[*fake, *SLOW]) == 2


def test_row_37_no_secret_that_an_exception_says_is_in_any_file_but_the_ranks_own_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The value of a variable, that of a flag and a URL's password, in the command and in the exception."""
    monkeypatch.setenv("HF_TOKEN", "swordfish-env")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    secrets = ("swordfish", "0123456789abcdef0123456789abcdef01234567", "sk-flag-Secret")
    words = ["--my-api-key", "sk-flag-Secret1234", "--data", "s3://me:swordfish-url@host/data"]
    assert tune(tmp_path, fake=["--mode", "leak", "--at", "1", *words]) == 0
    run = run_of(tmp_path)
    logs = list(run.rglob("stdout.log"))
    assert any("swordfish-env" in log.read_text() for log in logs)
    assert {log.stat().st_mode & 0o777 for log in logs} == {0o600}
    files = [path for path in run.rglob("*") if path.is_file() and path not in logs]
    names = {"report.html", "config.json", "events.jsonl", "command.json", "result.json", "study.sqlite3"}
    assert names | {"rank-1.err.json"} <= {path.name for path in files}
    for path in files:
        for secret in secrets:
            assert secret.encode() not in path.read_bytes(), path
    page = (run / "report.html").read_text()
    assert "401 for ***, *** at s3://me:***@host/data" in page
    shown = capfd.readouterr()
    assert not any(secret in shown.out + shown.err for secret in secrets)
    assert tune(tmp_path, "--resume", fake=["--mode", "leak", "--at", "1", *words]) == 0
    assert tune(tmp_path, "--resume", fake=["--mode", "leak", "--at", "2", *words]) == 2
