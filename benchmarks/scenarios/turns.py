"""Jobs that live side by side and train in turns, a few steps at a time.

Two launches of one job differ by 10 to 20 % here, because the machine is not the same from one minute to the
next. Jobs that take turns every second meet the same machine, and each is started once. A job waits without
using a core: its processes block on a socket before a step (`script.py`), and are let through together.
"""

import contextlib
import json
import random
import selectors
import socket
import statistics
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.scenarios.script import STEPS
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.plan import Plan
from quartet_plugin.trial.request import Timeouts, TrialRequest, TrialResult
from quartet_plugin.trial.runner import run_trial

# The first step of a turn finds the caches full of another job's data, and does not count.
COLD_STEPS = 1
_TIMEOUTS = Timeouts(init_s=600.0, first_step_s=300.0, step_s=300.0)
_DEADLINE_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What is launched: the training command, its number of processes, and the plan of each job."""

    command: Sequence[str]
    num_processes: int
    plans: Mapping[str, Plan | None]
    folder: Path
    cwd: Path


@dataclass(slots=True)
class _Job:
    """The connections of a job's processes, and the seconds that each step of the last turn took them."""

    connections: list[socket.socket] = field(default_factory=list)
    steps_s: list[list[float]] = field(default_factory=list)


def measured_in_turns(launch: Launch, *, rounds: int, seed: int) -> list[dict[str, float]]:
    """Seconds an iteration of every job, round by round; a round is a turn of each, in random order.

    Raises SystemExit with the reason where a job ends before its time.
    """
    with tempfile.TemporaryDirectory() as short:
        address = str(Path(short) / "turns")
        with _listening(address) as server, _started(launch, address, rounds=rounds) as trials:
            jobs = _connected(server, launch, trials)
            generator = random.Random(seed)
            # A turn before the rounds: allocators and optimizers have their memory after it.
            for name in sorted(jobs):
                _turn(jobs[name])
            found = []
            for _ in range(rounds):
                order = generator.sample(sorted(jobs), len(jobs))
                values = {name: _turn(jobs[name]) for name in order}
                found.append(values)
            for job in jobs.values():
                _let_through(job)
    return found


@contextlib.contextmanager
def _listening(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(64)
        server.settimeout(1.0)
        yield server


@contextlib.contextmanager
def _started(launch: Launch, address: str, *, rounds: int) -> Iterator[dict[str, Future[TrialResult]]]:
    """The jobs' trials, in threads with the caller's network namespace; stopped where this is left early."""
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=len(launch.plans)) as pool:
        try:
            yield {
                name: pool.submit(run_trial, _request(launch, name, address, rounds), stop=stop, poll_s=1.0)
                for name in launch.plans
            }
        except BaseException:
            stop.set()
            raise


def _request(launch: Launch, name: str, address: str, rounds: int) -> TrialRequest:
    folder = launch.folder / name[:12]
    folder.mkdir(parents=True, exist_ok=True)
    words = ["env", f"SCENARIO_TURNS={address}", f"SCENARIO_JOB={name}", *launch.command]
    return TrialRequest(
        folder=folder,
        command=parse_command(words),
        plan=launch.plans[name],
        warmup=STEPS,
        measure=STEPS * rounds + 1,
        device="cpu",
        deadline_s=_DEADLINE_S,
        timeouts=_TIMEOUTS,
        max_attempts=1,
        max_spread=1e9,
        cwd=launch.cwd,
    )


def _connected(
    server: socket.socket, launch: Launch, trials: Mapping[str, Future[TrialResult]]
) -> dict[str, _Job]:
    """Every job with all its processes waiting for a first turn."""
    jobs = {name: _Job() for name in launch.plans}
    while any(len(job.connections) < launch.num_processes for job in jobs.values()):
        for name, trial in trials.items():
            if trial.done():
                result = trial.result()
                raise SystemExit(f"{name[:12]}: {result.outcome.value}: {result.reason}; see {result.folder}")
        with contextlib.suppress(TimeoutError):
            connection = server.accept()[0]
            connection.settimeout(None)
            jobs[str(_received(connection))].connections.append(connection)
    return jobs


def _turn(job: _Job) -> float:
    """Let a job do STEPS steps; the seconds of one, of its slowest process."""
    _let_through(job)
    job.steps_s = []
    with selectors.DefaultSelector() as selector:
        for connection in job.connections:
            selector.register(connection, selectors.EVENT_READ)
        while len(job.steps_s) < len(job.connections):
            for key, _ in selector.select():
                selector.unregister(key.fileobj)
                job.steps_s.append(_received(key.fileobj))  # type: ignore[arg-type]
    return max(statistics.fmean(steps[COLD_STEPS:]) for steps in job.steps_s)


def _let_through(job: _Job) -> None:
    for connection in job.connections:
        connection.sendall(b"go\n")


def _received(connection: socket.socket) -> list[float]:
    """One line of JSON; no process sends a second one before it is let through."""
    data = b""
    while not data.endswith(b"\n"):
        more = connection.recv(65536)
        if not more:
            raise SystemExit("a process ended before its time; its log is in the folder of the turns")
        data += more
    values: list[float] = json.loads(data)
    return values
