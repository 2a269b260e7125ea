"""Processes are ended by identity alone."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from quartet_plugin.errors import ConfigError, StorageError
from quartet_plugin.launchers.running_process import (
    current_identity,
    identify,
    is_running,
)
from quartet_plugin.protocol.environment import ATTEMPT_ID
from quartet_plugin.protocol.process_identity import Identity
from quartet_plugin.trial.processes import ProcessRegistry, marked_processes, num_oom_kills, reap
from tests.trial.factory import ID

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP


def start(program: str = SLEEP, *, mark: str | None = None) -> subprocess.Popen[str]:
    """A process that is up."""
    environment = {**os.environ, **({ATTEMPT_ID: mark} if mark else {})}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Those that a test starts."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def known(process: subprocess.Popen[str]) -> Identity:
    """Its identity."""
    found = identify(psutil.Process(process.pid))
    assert found is not None
    return found


@pytest.mark.parametrize("program", [SLEEP, DEAF])
def test_reap_ends_exactly_these(program: str, processes: list[subprocess.Popen[str]]) -> None:
    processes += [start(program), start(program)]
    assert reap([known(processes[0])], grace_s=0.3) == frozenset()
    assert not known_alive(processes[0])
    assert known_alive(processes[1])


def known_alive(process: subprocess.Popen[str]) -> bool:
    """Whether it runs."""
    return process.poll() is None


def test_another_start_or_boot_is_another_process(processes: list[subprocess.Popen[str]]) -> None:
    processes.append(start())
    mine = known(processes[0])
    assert is_running(mine)
    assert mine.start_ticks is not None
    for other in (
        replace(mine, start_ticks=mine.start_ticks - 5),
        replace(mine, process_start=mine.process_start - 5, start_ticks=None),
        replace(mine, boot_id="another"),
        replace(mine, pid=2**30),
    ):
        assert not is_running(other)
        reap([other], grace_s=0.1)
    assert known_alive(processes[0])


def test_row_34_a_clock_that_is_set_makes_no_process_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: list[subprocess.Popen[str]]
) -> None:
    """The system gives starts in seconds since 1970, and they move with its clock."""
    processes.append(start(mark=ID))
    mine = known(processes[0])
    registry = ProcessRegistry(tmp_path / "p.json", attempt_id=ID)
    registry.rescan(processes[0].pid)
    create_time = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + 3600.0)
    assert known(processes[0]).process_start > mine.process_start + 3000
    assert is_running(mine)
    registry.search()
    assert len(registry.identities) == 1
    assert reap(ProcessRegistry.read(tmp_path / "p.json", attempt_id=ID).alive, grace_s=5.0) == frozenset()
    assert processes[0].wait(10) < 0


def test_the_book_holds_descendants_and_survives_its_writer(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    parent = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); "
        "import time; time.sleep(600)"
    )
    processes.append(start(parent))
    path = tmp_path / "processes.json"
    registry = ProcessRegistry(path, attempt_id=ID)
    registry.rescan(processes[0].pid)
    assert len(registry.alive) == 2
    again = ProcessRegistry.read(path, attempt_id=ID)
    assert again.identities == registry.identities
    assert ProcessRegistry.read(path, attempt_id="b" * 32).identities == frozenset()
    assert reap(again.alive, grace_s=1.0) == frozenset()
    assert not again.alive


def test_a_process_that_could_not_be_written_down_can_be_ended_and_is_written_later(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    processes.append(start())
    is_full = True

    def fence() -> None:
        if is_full:
            raise StorageError("the disk is full")

    path = tmp_path / "processes.json"
    registry = ProcessRegistry(path, attempt_id=ID, fence=fence)
    with pytest.raises(StorageError):
        registry.add([known(processes[0])])
    assert registry.alive == {known(processes[0])}
    is_full = False
    registry.add([])
    assert ProcessRegistry.read(path, attempt_id=ID).alive == {known(processes[0])}


def test_a_named_process_is_believed_only_with_the_attempts_mark(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    processes += [start(), start(mark=ID), start(mark="b" * 32)]
    named = [(known(one).pid, known(one).process_start) for one in processes]
    registry = ProcessRegistry(tmp_path / "p.json", attempt_id=ID)
    registry.rescan(2**30, named=[*named, (1, 0.0), (os.getpid(), current_identity().process_start)])
    assert {one.pid for one in registry.identities} == {processes[1].pid}
    assert {one.pid for one in marked_processes(ID)} == {processes[1].pid}


def test_a_broken_book_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"schema_version": 1, "attempt_id": ID, "processes": [{"pid": "1"}]}))
    with pytest.raises(ConfigError, match=r"p\.json"):
        ProcessRegistry.read(path, attempt_id=ID)
    assert ProcessRegistry.read(tmp_path / "none", attempt_id=ID).identities == frozenset()


EVENTS = "low 0\nhigh 3\nmax 7\noom 2\noom_kill {count}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n"


@pytest.mark.parametrize(
    ("groups", "files", "count"),
    [
        ("0::/job/step\n", {"job/step/memory.events": EVENTS.format(count=4)}, 4),
        ("0::/job\n", {"memory.events": EVENTS.format(count=5)}, 5),  # a container's own group is the root
        (
            "0::/job\n",
            {"job/memory.events": EVENTS.format(count=1), "memory.events": EVENTS.format(count=9)},
            1,
        ),
        ("12:cpu,memory:/slurm/7\n", {"memory/slurm/7/memory.oom_control": CONTROL.format(count=2)}, 2),
        ("12:memory:/docker/ab\n", {"memory/memory.oom_control": CONTROL.format(count=3)}, 3),
        ("12:cpuset:/x\n", {"memory/memory.oom_control": CONTROL.format(count=3)}, 0),
        ("0::/job\n", {"job/memory.events": "oom_kill many\n"}, 0),
        ("0::/job\n", {}, 0),
    ],
)
def test_row_3_kills_are_read_from_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str], count: int
) -> None:
    cgroup = tmp_path / "cgroup"
    cgroup.write_text(groups)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr("quartet_plugin.trial.processes._CGROUP_FILE", cgroup)
    monkeypatch.setattr("quartet_plugin.trial.processes._CGROUPS", tmp_path / "fs")
    assert num_oom_kills() == count


def test_without_control_groups_no_kills_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quartet_plugin.trial.processes._CGROUP_FILE", tmp_path / "none")
    monkeypatch.setattr("quartet_plugin.trial.processes._CGROUPS", tmp_path / "none")
    assert num_oom_kills() == 0


def test_no_process_is_added_for_a_launcher_that_has_ended(tmp_path: Path) -> None:
    registry = ProcessRegistry(tmp_path / "p.json", attempt_id=ID)
    registry.rescan(0)
    assert registry.identities == frozenset()
