"""Processes of a trial, identified by pid, start time and boot; never by name.

Every process of a trial inherits `QUARTET_ATTEMPT_ID`, so a process that left its parents behind is still
recognised, and one without it by its new parent (`trial.subreaper`). A process that a rank's file names is
believed only if it carries the id or descends from the launcher.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import psutil

from quartet_plugin.launchers.running_process import boot_id, find, identify, is_running
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import Length, dump, record
from quartet_plugin.protocol.attempt_files import AttemptId, Version, read_shared
from quartet_plugin.protocol.environment import ATTEMPT_ID
from quartet_plugin.protocol.process_identity import Identity

_CGROUP_FILE = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def descendants(pids: Iterable[int], *, without: Collection[int] = ()) -> set[Identity]:
    """The running descendants of `pids`, from one pass over all processes.

    The processes `without`, and what descends from them alone, are left out.
    """
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            children.setdefault(process.ppid(), []).append(process)
    descending: set[Identity] = set()
    open_pids = list(pids)
    seen = {*open_pids, *without}
    while open_pids:
        for child in children.get(open_pids.pop(), []):
            identity = identify(child)
            if identity is not None and child.pid not in seen:
                seen.add(child.pid)
                descending.add(identity)
                open_pids.append(child.pid)
    return descending


def marked_processes(attempt_id: str) -> set[Identity]:
    """Every running process of this user that inherited the attempt's id, whatever its current parent."""
    others = (process for process in psutil.process_iter() if process.pid != os.getpid())
    identities = {identify(process) for process in others if _carries(process, attempt_id)}
    return {identity for identity in identities if identity is not None and is_running(identity)}


def _carries(process: psutil.Process, attempt_id: str) -> bool:
    try:
        return process.uids().real == os.getuid() and process.environ().get(ATTEMPT_ID) == attempt_id
    except (psutil.Error, OSError):
        return False


@record
class _ProcessesFile:
    """The content of processes.json."""

    attempt_id: AttemptId
    processes: Annotated[tuple[Identity, ...], Length(most=1_000_000)]
    schema_version: Version = 1


class ProcessRegistry:
    """The processes of one attempt, written to `path` whenever one is added.

    A tuner that follows a killed one reads the file and ends exactly these processes. `fence` is called
    before every write, and raises where the tuner that follows has the run already.
    """

    def __init__(self, path: Path, *, attempt_id: str, fence: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._attempt_id = attempt_id
        self._fence = fence
        self._known: set[Identity] = set()
        self._written: frozenset[Identity] = frozenset()

    @classmethod
    def read(cls, path: Path, *, attempt_id: str) -> "ProcessRegistry":
        """The registry that an earlier tuner wrote; empty where it wrote none."""
        registry = cls(path, attempt_id=attempt_id)
        with contextlib.suppress(FileNotFoundError):
            content = read_shared(_ProcessesFile, path)
            if content.attempt_id == attempt_id:
                registry._known = set(content.processes)
                registry._written = frozenset(content.processes)
        return registry

    @property
    def identities(self) -> frozenset[Identity]:
        """Every recorded process, running or ended."""
        return frozenset(self._known)

    @property
    def alive(self) -> frozenset[Identity]:
        """The recorded processes that still run."""
        return frozenset(identity for identity in self._known if is_running(identity))

    def rescan(self, launcher_pid: int, *, named: Iterable[tuple[int, float]] = ()) -> None:
        """Add the launcher, its descendants, and every `named` (pid, start) that carries the attempt's id.

        `launcher_pid` is 0 where the launcher has ended.
        """
        parents = {launcher_pid, *(known.pid for known in self.alive)} - {0}
        identities: set[Identity | None] = {*descendants(parents)}
        if launcher_pid:
            with contextlib.suppress(psutil.Error):
                identities.add(identify(psutil.Process(launcher_pid)))
        for pid, start in named:
            claimed = Identity(pid=pid, process_start=start, boot_id=boot_id())
            process = find(claimed)
            if process is not None and _carries(process, self._attempt_id):
                identities.add(identify(process))
        self.add(identity for identity in identities if identity is not None)

    def search(self) -> None:
        """Add every process that carries the attempt's id. Expensive: reads every process of the host."""
        self.add(marked_processes(self._attempt_id))

    def add(self, identities: Iterable[Identity]) -> None:
        """Add processes; `rescan` adds their descendants.

        They are known, and so can be ended, also where the file cannot be written. It is tried again then.
        """
        known = {(process.pid, process.boot_id): process for process in self._known}
        self._known |= {new for new in identities if not new.is_same(known.get((new.pid, new.boot_id)))}
        if self._known != self._written:
            known_now = frozenset(self._known)
            content = _ProcessesFile(attempt_id=self._attempt_id, processes=tuple(sorted(known_now)))
            self._fence()
            write_json_atomic(self._path, dump(content))
            self._written = known_now


def reap(
    identities: Iterable[Identity],
    *,
    grace_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> frozenset[Identity]:
    """End exactly these processes: SIGTERM, up to `grace_s` of waiting, SIGKILL.

    Returns the processes that still run (in an uninterruptible wait, or another user's).
    """
    running = frozenset(identity for identity in identities if is_running(identity))
    for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, max(grace_s, 5.0))):
        send_signal(running, number)
        end = clock() + limit_s
        while any(is_running(identity) for identity in running) and clock() < end:
            sleep(0.02)
        running = frozenset(identity for identity in running if is_running(identity))
    return running


def ask_for_stacks(identity: Identity) -> None:
    """Send SIGABRT: the fault handler prints the stacks of a process, even a `paused` one, and ends it."""
    send_signal([identity], signal.SIGABRT)
    send_signal([identity], signal.SIGCONT)


@contextlib.contextmanager
def paused(identities: Iterable[Identity]) -> Iterator[None]:
    """Stop these processes with SIGSTOP inside the block, and continue them after it."""
    held = list(identities)
    send_signal(held, signal.SIGSTOP)
    try:
        yield
    finally:
        send_signal(held, signal.SIGCONT)


def send_signal(identities: Iterable[Identity], number: signal.Signals) -> None:
    """Send a signal to those of the processes that still run."""
    for identity in identities:
        process = find(identity)
        if process is not None:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)


def num_oom_kills() -> int:
    """Processes that the kernel killed for memory in this process's group so far; 0 where it cannot say.

    Control groups of either version: `memory.events`, or `memory.oom_control` of the memory controller.
    """
    files = [_CGROUPS / "memory.events"]
    with contextlib.suppress(OSError):
        for line in _CGROUP_FILE.read_text().splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if number == "0":
                files.insert(0, _CGROUPS / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                # A container sees its own group as the root.
                for folder in (_CGROUPS / "memory" / path.lstrip("/"), _CGROUPS / "memory"):
                    files.append(folder / "memory.oom_control")
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            for line in file.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0
