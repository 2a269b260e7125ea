"""Jobs that live side by side and train in turns, a few steps at a time.

Two launches of one job differ by 10 to 20 % here, because the machine is not the same from one minute to the
next. Jobs that take turns every second meet the same machine, and each is started once. The processes of a
job block on a socket before a step (`script.py`), and are let through together. While it waits they are
stopped: a process that only blocks has some 70 threads of gloo, which look for messages a hundred times a
second, and the waiting jobs would take a fifth of a core or more from the one whose turn it is.
"""

import contextlib
import json
import random
import socket
import statistics
import struct
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil

from benchmarks.scenarios.script import STEPS
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.launchers.protocol import Launcher
from quartet_plugin.model.plan import Plan
from quartet_plugin.trial.request import Timeouts, TrialRequest, TrialResult
from quartet_plugin.trial.runner import run_trial

# The first step of a turn finds the caches full of another job's data, and does not count.
COLD_STEPS = 1
_TIMEOUTS = Timeouts(init_s=600.0, first_step_s=300.0, step_s=300.0)
_DEADLINE_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What is launched: the training command, its number of processes, and the plan of each job.

    `launcher` starts the command on several hosts; None: here.
    """

    command: Sequence[str]
    num_processes: int
    plans: Mapping[str, Plan | None]
    folder: Path
    cwd: Path
    launcher: Launcher | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A process of a job, and a line to and from it."""

    line: TextIO
    process: psutil.Process


type _Job = list[Rank]


def measured_in_turns(launch: Launch, *, rounds: int, seed: int) -> list[dict[str, float]]:
    """Seconds an iteration of every job, round by round; a round is a turn of each, in random order.

    Raises SystemExit with the reason where a job ends before its time.
    """
    with tempfile.TemporaryDirectory() as short:
        address = str(Path(short) / "turns")
        with listening(address) as server, _started(launch, address, rounds=rounds) as trials:
            jobs = _connected(server, launch, trials)
            generator = random.Random(seed)
            try:
                for job in jobs.values():
                    stopped_after(job)
                # A turn before the rounds: allocators and optimizers have their memory after it.
                for job in jobs.values():
                    turn_s(job)
                orders = (generator.sample(sorted(jobs), len(jobs)) for _ in range(rounds))
                found = [{name: turn_s(jobs[name]) for name in order} for order in orders]
            finally:
                for job in jobs.values():
                    resume(job)
            for job in jobs.values():
                let_through([rank.line for rank in job])
    return found


@contextlib.contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    """A socket that processes of jobs connect to."""
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
                name: pool.submit(
                    run_trial,
                    _request(launch, name, address, rounds),
                    launcher=launch.launcher,
                    stop=stop,
                    poll_s=1.0,
                )
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
    """Every job with a line to all its processes."""
    jobs: dict[str, _Job] = {name: [] for name in launch.plans}
    while any(len(job) < launch.num_processes for job in jobs.values()):
        for name, trial in trials.items():
            if trial.done():
                result = trial.result()
                raise SystemExit(f"{name[:12]}: {result.outcome.value}: {result.reason}; see {result.folder}")
        with contextlib.suppress(TimeoutError):
            connection = server.accept()[0]
            connection.settimeout(None)
            line = connection.makefile("rw")
            jobs[heard(line)].append(Rank(line=line, process=process_behind(connection)))
    return jobs


def process_behind(connection: socket.socket) -> psutil.Process:
    """The process at the other end of a connection of this machine."""
    credentials = struct.Struct("3i")
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    pid, _, _ = credentials.unpack(content)
    return psutil.Process(pid)


def turn_s(job: _Job) -> float:
    """Let a job do STEPS steps; the seconds of one, of its slowest process."""
    resume(job)
    let_through([rank.line for rank in job])
    return max(statistics.fmean(steps_s[COLD_STEPS:]) for steps_s in stopped_after(job))


def let_through(job: Sequence[TextIO]) -> None:
    """Let the waiting processes of a job do the steps of a turn."""
    for line in job:
        print("go", file=line, flush=True)


def stopped_after(job: _Job) -> list[list[float]]:
    """Stop the processes of a job once all wait for a turn; the seconds of the steps of their last one."""
    steps_s = [heard(rank.line) for rank in job]
    for rank in job:
        rank.process.suspend()
    return steps_s


def resume(job: _Job) -> None:
    """Continue the processes of a job that still run."""
    for rank in job:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.process.resume()


def heard(line: TextIO) -> Any:
    """What a process says next. Raises SystemExit where it has ended."""
    text = line.readline()
    if not text:
        raise SystemExit("a process ended before its time; its log is in the folder of the turns")
    return json.loads(text)
