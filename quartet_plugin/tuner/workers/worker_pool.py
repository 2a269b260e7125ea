"""The workers of this host: processes of their own, one a slice, started again where one is killed."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from quartet_plugin.errors import InfrastructureError, StorageError
from quartet_plugin.launchers.device_slices import DeviceSlice
from quartet_plugin.launchers.running_process import current_identity, find, is_running, runs_on
from quartet_plugin.protocol.process_identity import Identity
from quartet_plugin.protocol.work_queue_files import Task, task_text
from quartet_plugin.trial.processes import descendants, reap
from quartet_plugin.tuner.workers.work_queue import WorkQueue

# A worker that is killed is started again, all in all this many times for each.
MAX_RESTARTS = 3

# A worker ends its trial within the trial's own time to shut down; longer than that is not waited for.
_STOP_S = 45.0
_SECOND_STOP_S = 10.0
_AT_ONCE_S = 0.3
_POLL_S = 0.02
_ENTRY = "from quartet_plugin.cli.main import entry; entry()"


@dataclass(slots=True, kw_only=True)
class WorkerPool:
    """Starts a worker for each of `slices`, under the names in `names`, and sees to them.

    `command` is the user's, with its secrets; workers read it from a pipe. `say` shows a line to the
    user. A worker that gives up by itself is not started again.
    """

    queue: WorkQueue
    command: tuple[str, ...]
    slices: tuple[DeviceSlice, ...]
    names: tuple[str, ...]
    say: Callable[[str], None]
    is_joined: bool = False
    _running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _given_up: dict[str, int] = field(default_factory=dict)
    _num_restarts: int = 0

    @property
    def num_running(self) -> int:
        """Workers that run."""
        return len(self._running)

    @property
    def last_code(self) -> int:
        """The exit code of the worker that gave up last."""
        return next((code for code in reversed(self._given_up.values()) if code), 0)

    @property
    def last_line(self) -> str:
        """The last line of a worker that gave up."""
        names = [name for name, code in self._given_up.items() if code] or list(self.names)
        return _last_line(self._log(names[-1]))

    def start_missing(self) -> None:
        """Start the workers that should run and do not."""
        for name, code in self._reap():
            self._note_end(name, code)
        for name, device_slice in zip(self.names, self.slices, strict=True):
            if name not in self._running and name not in self._given_up:
                self._running[name] = self._start(name, device_slice)

    def close(self, *, is_forced: bool = False) -> bool:
        """End every worker, and with it its trial; `is_forced`, or a Ctrl-C meanwhile, kills the trials.

        Returns whether all ended by themselves: what the others' trials left is then still to be ended.
        """
        try:
            self._stop(_AT_ONCE_S if is_forced else _STOP_S)
            if is_forced:
                self._stop(_SECOND_STOP_S)
            return not self._running
        except KeyboardInterrupt:
            self._stop(_SECOND_STOP_S)
            raise
        finally:
            self._kill()

    def _note_end(self, name: str, code: int) -> None:
        """Note a worker that has ended, by its exit code."""
        if code == 0:
            self._given_up[name] = code
        elif code < 0 and self._num_restarts < MAX_RESTARTS * len(self.slices):
            self._num_restarts += 1
            self.say(f"worker {name} was killed by signal {-code}; it is started again")
        else:
            self._given_up[name] = code
            self.say(f"worker {name} stopped: {_last_line(self._log(name))}")

    def _start(self, name: str, device_slice: DeviceSlice) -> "subprocess.Popen[bytes]":
        words = [sys.executable, "-P", "-c", _ENTRY, "work", str(self.queue.folder), "--name", name]
        task = Task(
            command=self.command,
            share=device_slice.record,
            parent=current_identity(),
            is_joined=self.is_joined,
        )
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            log = os.open(self._log(name), flags, 0o600)
        except OSError as error:
            raise StorageError(f"{self._log(name)}: cannot be written: {error.strerror}") from error
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(task_text(task))
            return process
        except OSError as error:
            raise InfrastructureError(f"a worker cannot be started: {error.strerror}") from error
        finally:
            os.close(log)

    def _stop(self, limit_s: float) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        end = time.monotonic() + limit_s
        while self._running and time.monotonic() < end:
            self._reap()
            time.sleep(_POLL_S)

    def _reap(self) -> list[tuple[str, int]]:
        """The workers that have ended, which are removed, with their exit codes."""
        codes = [(name, process.poll()) for name, process in self._running.items()]
        ended = [(name, code) for name, code in codes if code is not None]
        for name, _ in ended:
            del self._running[name]
            self.queue.forget(name)
        return ended

    def _kill(self) -> None:
        """Kill the workers that did not end, and their descendants."""
        left = descendants(process.pid for process in self._running.values()) if self._running else set()
        for name, process in self._running.items():
            process.kill()
            process.wait()
            self.queue.forget(name)
        self._running.clear()
        reap(left, grace_s=0.0)

    def _log(self, name: str) -> Path:
        return self.queue.path / "crew" / f"{name}.log"


def _last_line(path: Path) -> str:
    """The last thing a worker said."""
    from quartet_plugin.trial.log import last_lines, read_tail

    lines = last_lines(read_tail(path))
    return lines[-1] if lines else "it said nothing"


def end_earlier(queue: WorkQueue, *, keeps_joined: bool, host: str | None = None) -> frozenset[Path]:
    """End the workers that an earlier tuner of the run left; only under the run's lease.

    Its workers on this host are killed, and their trials run on: those are seen to their end like a killed
    tuner's own. Returns the trials' folders that workers which joined still have; without `keeps_joined` they
    have them no more. Nor do workers that have ended with an earlier boot of this host.
    """
    if not queue.is_there:
        return frozenset()
    queue.sweep()
    here = host or socket.gethostname()
    for worker in queue.workers():
        if worker.host == here and not worker.is_joined and worker.parent.pid != os.getpid():
            _kill_now(worker.identity)
            queue.forget(worker.name)
        elif queue.is_of_ended_boot(worker, here=here):
            queue.forget(worker.name)
    for claim in queue.claims():
        if queue.is_of_ended_boot(claim, here=here):
            queue.void(claim)
    if not keeps_joined:
        queue.close()
        return frozenset()
    current = {(queued.trial, queued.fence) for queued in queue.queued_trials() if not queued.is_closed}
    return frozenset(
        queue.trial_folder(claim.trial)
        for claim in queue.claims()
        if (claim.trial, claim.fence) in current
        and runs_on(claim.identity, host=claim.host, here=here) is not False
    )


def _kill_now(identity: Identity) -> None:
    """SIGKILL and nothing before it: a worker that is asked to end would end its trial."""
    process = find(identity)
    if process is not None:
        with contextlib.suppress(psutil.Error):
            process.kill()
        end = time.monotonic() + _SECOND_STOP_S
        while is_running(identity) and time.monotonic() < end:
            time.sleep(_POLL_S)
