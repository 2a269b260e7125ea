"""Whose a process is that has lost its parent."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from quartet_plugin.trial.subreaper import Subreaper

SLEEP = "import time; time.sleep(600)"
# Starts a daemon without environment in a session of its own, says its pid, and waits for its input to end.
PARENT = (
    "import subprocess, sys; "
    f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], stdout=subprocess.DEVNULL, "
    "env={}, start_new_session=True); "
    "print(child.pid, flush=True); sys.stdin.read()"
)


@pytest.fixture
def pids() -> Iterator[list[int]]:
    """Processes that a test leaves to be ended."""
    started: list[int] = []
    yield started
    for pid in started:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def parent_of_a_daemon(pids: list[int]) -> tuple[subprocess.Popen[str], int]:
    """A process in a session of its own, and the daemon that it has started."""
    words = [sys.executable, "-c", PARENT]
    parent = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    pids.append(int(parent.stdout.readline()))
    return parent, pids[-1]


def end(parent: subprocess.Popen[str]) -> None:
    parent.communicate()
    assert parent.returncode == 0


def test_what_the_launcher_has_left_is_an_orphan(pids: list[int]) -> None:
    with Subreaper() as subreaper:
        launcher, daemon = parent_of_a_daemon(pids)
        subreaper.expect(launcher.pid)
        assert subreaper.orphans() == set()
        end(launcher)
        assert {orphan.pid for orphan in subreaper.orphans()} == {daemon}
        os.kill(daemon, 9)
        while psutil.Process(daemon).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert subreaper.orphans() == set()
        assert not psutil.pid_exists(daemon), "it is buried"


def test_what_an_earlier_child_has_left_is_none(pids: list[int]) -> None:
    parent, daemon = parent_of_a_daemon(pids)
    with Subreaper() as subreaper:
        end(parent)
        assert psutil.Process(daemon).ppid() == os.getpid()
        assert subreaper.orphans() == set()
    assert psutil.Process(daemon).is_running()


def test_where_it_is_off_nothing_is_adopted(pids: list[int]) -> None:
    with Subreaper(is_on=False) as subreaper:
        child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], start_new_session=True)
        while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert subreaper.orphans() == set()
        assert child.wait() == 3, "its exit code is left to whoever has started it"
        launcher, daemon = parent_of_a_daemon(pids)
        end(launcher)
        assert psutil.Process(daemon).ppid() != os.getpid()


def test_the_first_process_of_a_container_adopts_nothing_of_a_trial(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)
            subreaper = Subreaper()
        with subreaper:
            assert subreaper.orphans() == set()
    finally:
        child.kill()
        child.wait()
