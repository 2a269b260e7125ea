"""The tuner of a job as a process: started with a list of words, known again by pid and start time.

A batch that is killed leaves its tuners running: they are processes of their own sessions, and whoever goes
on with the batch waits for them as for its own. A batch that ends leaves none.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from quartet_plugin.batch.job_file import JobFile
from quartet_plugin.errors import InfrastructureError, QuartetError, StorageError
from quartet_plugin.launchers.running_process import identify, is_running, runs_on
from quartet_plugin.model.batch import BatchPaths
from quartet_plugin.protocol.environment import ATTEMPT_ID, JOB_MARK
from quartet_plugin.protocol.process_identity import Identity
from quartet_plugin.trial.lease import read_holder
from quartet_plugin.trial.log import last_lines, read_tail
from quartet_plugin.trial.processes import reap, send_signal

OUTPUT_NAME = "output.log"
# A tuner that is asked to stop ends its trial first.
STOP_S, SECOND_STOP_S = 60.0, 10.0
_GRACE_S = 2.0
_POLL_S = 0.05


class JobProcess:
    """A job's tuner that runs; `child` is None for one that an earlier session of the batch has started."""

    def __init__(self, identity: Identity, *, child: "subprocess.Popen[bytes] | None" = None) -> None:
        self.identity = identity
        self._child = child

    @property
    def is_over(self) -> bool:
        """Whether the tuner's process has ended."""
        return not is_running(self.identity) if self._child is None else self._child.poll() is not None

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs, and if it is unknown."""
        return None if self._child is None else self._child.poll()

    def ask_to_stop(self) -> None:
        """Let it end its trial and itself; asked twice it ends at once."""
        if not self.is_over:
            send_signal([self.identity], signal.SIGTERM)


def start(words: Sequence[str], *, cwd: Path, output: Path, mark: str) -> JobProcess:
    """Start a tuner. Raises InfrastructureError where it cannot be, StorageError where its output cannot."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        log = os.open(output, flags, 0o600)
    except OSError as error:
        raise StorageError(f"{output}: cannot be written: {error.strerror}") from error
    try:
        child = subprocess.Popen(
            list(words),
            cwd=cwd,
            env=environment_of(mark),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise InfrastructureError(f"the tuner cannot be started: {error}") from error
    finally:
        os.close(log)
    identity = identify(psutil.Process(child.pid))
    assert identity is not None, "a child that nobody waited for keeps its pid"
    return JobProcess(identity, child=child)


def environment_of(mark: str) -> Mapping[str, str]:
    """This process's variables with the job's mark, and output as it comes."""
    return {**os.environ, JOB_MARK: mark, "PYTHONUNBUFFERED": "1"}


def find_tuner(file: JobFile, *, paths: BatchPaths) -> JobProcess | None:
    """The tuner of a job that an earlier session has started and that still runs, None where none does.

    It is the process that the job's file names, else the holder of the run's lease, else, where the batch was
    killed between the start and the note of it, the process with the job's mark that belongs to no trial.
    """
    if file.process is not None and is_running(file.process):
        return JobProcess(file.process)
    holder = None
    with contextlib.suppress(QuartetError):
        holder = read_holder(paths.runs / file.name)
    if holder is not None:
        return JobProcess(holder.identity) if runs_on(holder, host=holder.host) else None
    if file.process is not None:
        return None
    marked = job_processes(file.mark, without_trials=True)
    pids = {identity.pid for identity in marked}
    roots = [identity for identity in marked if _parent_of(identity) not in pids]
    return JobProcess(min(roots, key=lambda root: root.process_start)) if roots else None


def is_held_elsewhere(run: Path) -> bool:
    """Whether a process of another host or container holds the lease of a job's run."""
    with contextlib.suppress(QuartetError):
        holder = read_holder(run)
        return holder is not None and runs_on(holder, host=holder.host) is None
    return False


def job_processes(mark: str, *, without_trials: bool = False) -> set[Identity]:
    """The running processes of this user that inherited a job's mark; reads every process of the host."""
    identities: set[Identity | None] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.uids().real != os.getuid():
                continue
            variables = process.environ()
            if variables.get(JOB_MARK) == mark and not (without_trials and ATTEMPT_ID in variables):
                identities.add(identify(process))
    return {identity for identity in identities if identity is not None and is_running(identity)}


def end_left_behind(mark: str) -> int:
    """End what a job's tuner has left; how many processes that were."""
    left = job_processes(mark)
    if left:
        reap(left, grace_s=_GRACE_S)
    return len(left)


def stop(processes: Iterable[JobProcess], *, limit_s: float = STOP_S) -> None:
    """Ask tuners to stop and wait; who does not is asked again, and then left to `end_left_behind`.

    KeyboardInterrupt meanwhile, a second Ctrl-C, asks again at once.
    """
    running = list(processes)
    try:
        _ask(running)
        _wait(running, limit_s=limit_s)
    except KeyboardInterrupt:
        pass
    if not all(process.is_over for process in running):
        _ask(running)
        _wait(running, limit_s=min(limit_s, SECOND_STOP_S))


def _ask(processes: Iterable[JobProcess]) -> None:
    for process in processes:
        process.ask_to_stop()


def _wait(processes: Sequence[JobProcess], *, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end and not all(process.is_over for process in processes):
        time.sleep(_POLL_S)


def last_line(output: Path) -> str:
    """The last line that a tuner printed, without the program's name; empty where it printed none."""
    lines = last_lines(read_tail(output), num_lines=1)
    return lines[-1].removeprefix("quartet: ") if lines else ""


def _parent_of(identity: Identity) -> int | None:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(identity.pid).ppid()
    return None
