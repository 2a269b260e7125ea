"""Trials of the fake training, and the check that none of them leaves anything behind."""

import json
import os
import sys
import time
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
# Longer than any process of a busy machine stands still: no test waits for one of these limits to pass.
SHORT = Timeouts(init_s=120.0, first_step_s=60.0, step_s=60.0, shutdown_s=3.0)
DEADLINE_S = 600.0
# More than every limit of SHORT, and less than the deadline.
_PAST_S = 300.0


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
        "deadline_s": DEADLINE_S,
        "device": "cpu",
        "timeouts": SHORT,
        "max_spread": 1e9,
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
        clock: Callable[[], float] = time.monotonic,
        devices: DeviceGuard | None = None,
        **options: Any,
    ) -> TrialResult:
        request = trial_request(torchrun, tmp_path / "trials" / "000000", *fake, **options)
        return run_trial(
            request,
            launcher=BareLauncher(),
            devices=devices,
            stop=stop,
            clock=clock,
            poll_s=0.02,
            is_subreaper=True,
        )

    return run


@dataclass
class Clock:
    """A clock that a test sets ahead, so that limits pass by what ranks do and not by how fast they are."""

    ahead_s: float = 0.0

    def __call__(self) -> float:
        """Seconds, as `time.monotonic` counts them."""
        return time.monotonic() + self.ahead_s


def all_in(attempt: Path, phase: str) -> bool:
    """Whether both ranks are in this phase, by their heartbeats."""
    return [beat["phase"] for beat in beats(attempt)] == [phase, phase]


def are_recorded(attempt: Path) -> bool:
    """Whether the tuner has written down the processes of both ranks."""
    try:
        sheet = json.loads((attempt / "processes.json").read_text())
    except OSError:
        return False
    pids = {beat["pid"] for beat in beats(attempt)}
    return len(pids) == 2 and pids <= {one["pid"] for one in sheet["processes"]}


def beats(attempt: Path) -> list[dict[str, Any]]:
    """The heartbeats that are there."""
    return [json.loads(path.read_text()) for path in sorted(attempt.glob("rank-*.beat.json"))]


def once_seen(root: Path, is_so: Callable[[Path], bool], then: Callable[[], object]) -> Callable[[], bool]:
    """A `stop` that ends nothing: it calls `then` while `is_so` holds for the latest attempt below `root`.

    Not before the look at the attempt that follows, which has seen the same.
    """
    before: Path | None = None

    def stop() -> bool:
        nonlocal before
        latest = max(root.rglob("attempt-*"), default=None)
        found = latest if latest is not None and is_so(latest) else None
        if found is not None and found == before:
            then()
        before = found
        return False

    return stop


def past_the_limits_when(root: Path, is_so: Callable[[Path], bool]) -> dict[str, Any]:
    """Options of a trial: its limits have passed as soon as `is_so` holds for the latest attempt."""
    clock = Clock()

    def pass_them() -> None:
        clock.ahead_s += _PAST_S

    return {"clock": clock, "stop": once_seen(root, is_so, pass_them)}


def past_the_limits(root: Path, *, ranks: Sequence[int] = (0, 1)) -> dict[str, Any]:
    """Options of a trial: its limits have passed as soon as these ranks wait for ever."""

    def are_blocked(attempt: Path) -> bool:
        return all((attempt / f"blocked-{rank}").exists() for rank in ranks)

    return past_the_limits_when(root, are_blocked)


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
        record = json.loads(sheet.read_text())
        words = record["argv"]
        if "--master-port" in words:
            port = int(words[words.index("--master-port") + 1])
            # A free port is anybody's: another program, or another trial, may have been given it since.
            pids = [c.pid for c in _listeners() if c.laddr.port == port]
            ours = [pid for pid in pids if _attempt_of(pid) == record["attempt_id"]]
            assert not ours, f"port {port} is still taken"
    assert not list(root.rglob("*.tmp")), "a half-written file is left"
    assert not list(root.rglob("lock.json*")), "a lock is left"


def _attempt_of(pid: int | None) -> str | None:
    try:
        return None if pid in (None, os.getpid()) else psutil.Process(pid).environ().get(ATTEMPT_ID)
    except psutil.Error:
        return None


def _is_alive(pid: int, start: float) -> bool:
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - start) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _listeners() -> list[Any]:
    return [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
