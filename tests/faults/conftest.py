"""Trials of the fake training, and the check that none of them leaves anything behind."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from quartet_plugin.launchers.command import ENTRY_MODULE, parse_command
from quartet_plugin.launchers.local import LocalLauncher
from quartet_plugin.launchers.protocol import Handle
from quartet_plugin.protocol.environment import ATTEMPT_ID
from quartet_plugin.trial.devices import DeviceGuard
from quartet_plugin.trial.processes import marked_processes
from quartet_plugin.trial.request import Timeouts, TrialRequest, TrialResult
from quartet_plugin.trial.runner import run_trial

HERE = Path(__file__).parent
FAKE = HERE / "fake_trial.py"
SHORT = Timeouts(init_s=20.0, first_step_s=10.0, step_s=5.0, shutdown_s=3.0)


@dataclass
class BareLauncher:
    """Starts the command without the adapter; the fake writes the adapter's files."""

    num_nodes: int = 1
    engine: str | None = None
    started: list[int] = field(default_factory=list)

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdout: Path) -> Handle:
        """Leave the adapter's module out."""
        words = list(argv)
        at = words.index(ENTRY_MODULE)
        del words[at - 1 : at + 1]
        handle = LocalLauncher().start(words, env=env, cwd=cwd, stdout=stdout)
        self.started.append(handle.pid)
        return handle


@pytest.fixture
def fake_torchrun(tmp_path: Path) -> Path:
    """A program called torchrun that starts in milliseconds."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "torchrun"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "torchrun.py"}" "$@"\n')
    program.chmod(0o755)
    return program


def trial_request(torchrun: Path | str, folder: Path, *fake: str, **options: Any) -> TrialRequest:
    """Two ranks of the fake training."""
    words = [str(torchrun), "--nproc-per-node", "2", str(FAKE), *fake]
    defaults = {
        "warmup": 1,
        "measure": 4,
        "deadline_s": 60.0,
        "device": "cpu",
        "timeouts": SHORT,
        "min_free_bytes": 0,
    }
    return TrialRequest(
        folder=folder, command=parse_command(words, environment={}), **{**defaults, **options}
    )


@pytest.fixture
def trial(tmp_path: Path, fake_torchrun: Path) -> Callable[..., TrialResult]:
    """Run a trial of the fake: `trial("--mode", "oom", step_s=...)`; keywords go to the request."""

    def run(
        *fake: str,
        torchrun: Path | str = fake_torchrun,
        stop: Any = None,
        devices: DeviceGuard | None = None,
        **options: Any,
    ) -> TrialResult:
        request = trial_request(torchrun, tmp_path / "trials" / "000000", *fake, **options)
        return run_trial(
            request, launcher=BareLauncher(), devices=devices, stop=stop, poll_s=0.02, is_subreaper=True
        )

    return run


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    assert_nothing_left(tmp_path, known_children=before)


def assert_nothing_left(root: Path, *, known_children: set[int]) -> None:
    """No process, no port, no lock, no torn file below `root`."""
    for sheet in root.rglob("trial.json"):
        attempt_id = json.loads(sheet.read_text())["attempt_id"]
        assert not marked_processes(attempt_id), f"processes of {sheet.parent.name} live on"
    for sheet in root.rglob("processes.json"):
        for one in json.loads(sheet.read_text())["processes"]:
            assert not _is_alive(one["pid"], one["process_start"]), f"{one} lives on"
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    assert children <= known_children, "a child of the test lives on"
    for sheet in root.rglob("command.json"):
        words = json.loads(sheet.read_text())["argv"]
        if "--master-port" in words:
            port = int(words[words.index("--master-port") + 1])
            # A free port is anybody's: another program may have been given it since.
            ours = [c for c in _listeners() if c.laddr.port == port and _is_of_a_trial(c.pid)]
            assert not ours, f"port {port} is still taken"
    assert not list(root.rglob("*.tmp")), "a half-written file is left"
    assert not list(root.rglob("lock.json*")), "a lock is left"


def _is_of_a_trial(pid: int | None) -> bool:
    try:
        return pid is not None and pid != os.getpid() and ATTEMPT_ID in psutil.Process(pid).environ()
    except psutil.Error:
        return False


def _is_alive(pid: int, start: float) -> bool:
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - start) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _listeners() -> list[Any]:
    return [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
