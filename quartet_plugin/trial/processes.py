"""Processes of a trial, told apart for certain: pid, start time and boot; never by name.

Every process of a trial inherits `QUARTET_ATTEMPT_ID`, so one that left its parents behind is still
known as ours. A process that a rank's file names is believed only if it carries the id or descends from
the launcher.
"""

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import psutil

from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import Bounds, Length, dump, record
from quartet_plugin.protocol.attempt_files import AttemptId, Name, Pid, Seconds, Version, read_sheet

MARK = "QUARTET_ATTEMPT_ID"

# Only where the system does not count ticks: a start time in seconds moves when the clock is set.
_START_TOLERANCE_S = 1.0
_BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def boot_id() -> str:
    """What tells this start of the machine from every other."""
    with contextlib.suppress(OSError):
        return _BOOT_FILE.read_text().strip()
    return f"{psutil.boot_time():.0f}"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Identity:
    """One process for certain: a pid that is used again has another start time or boot.

    `start_ticks` counts clock ticks from the boot to the start, which no setting of the clock changes; None
    where nobody has looked. `process_start` is the same in seconds since 1970.
    """

    pid: Pid
    process_start: Seconds
    boot_id: Name
    start_ticks: Annotated[int, Bounds(ge=0)] | None = field(default=None, compare=False)

    def find(self) -> psutil.Process | None:
        """The running process, None when it has ended (a zombie has)."""
        if self.boot_id != boot_id():
            return None
        try:
            process = psutil.Process(self.pid)
            if not self._is_start_of(process):
                return None
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        except psutil.Error:
            return None

    def _is_start_of(self, process: psutil.Process) -> bool:
        ticks = start_ticks_of(process.pid)
        if self.start_ticks is not None and ticks is not None:
            return ticks == self.start_ticks
        return abs(process.create_time() - self.process_start) <= _START_TOLERANCE_S

    @property
    def age_s(self) -> float | None:
        """Seconds since its start, if this boot's; None where the system does not tell."""
        if self.start_ticks is None or self.boot_id != boot_id() or not hasattr(time, "CLOCK_BOOTTIME"):
            return None
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.start_ticks / os.sysconf("SC_CLK_TCK")

    @property
    def is_alive(self) -> bool:
        """Whether it still runs on this machine."""
        return self.find() is not None


def start_ticks_of(pid: int) -> int | None:
    """Clock ticks from the boot to the process's start; None where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name, in parentheses, may hold anything; behind it the start is the twentieth field.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    return None


def identify(process: psutil.Process) -> Identity | None:
    """The identity of a running process, None when it has ended meanwhile."""
    try:
        start = process.create_time()
        ticks = start_ticks_of(process.pid)
        return Identity(pid=process.pid, process_start=start, boot_id=boot_id(), start_ticks=ticks)
    except psutil.Error:
        return None


def own_identity() -> Identity:
    """This process's."""
    found = identify(psutil.Process())
    assert found is not None
    return found


def descendants(pids: Iterable[int]) -> set[Identity]:
    """The children of `pids`, theirs, and so on, as far as they run; one look at all processes."""
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            children.setdefault(process.ppid(), []).append(process)
    found: set[Identity] = set()
    open_pids = list(pids)
    seen = set(open_pids)
    while open_pids:
        for child in children.get(open_pids.pop(), []):
            identity = identify(child)
            if identity is not None and child.pid not in seen:
                seen.add(child.pid)
                found.add(identity)
                open_pids.append(child.pid)
    return found


def marked(attempt_id: str) -> set[Identity]:
    """Every running process of this user that inherited the attempt's id, whoever its parent is now."""
    found = set()
    for process in psutil.process_iter():
        if process.pid != os.getpid() and _carries(process, attempt_id):
            identity = identify(process)
            if identity is not None and identity.is_alive:
                found.add(identity)
    return found


def _carries(process: psutil.Process, attempt_id: str) -> bool:
    try:
        return process.uids().real == os.getuid() and process.environ().get(MARK) == attempt_id
    except (psutil.Error, OSError):
        return False


@record
class _Sheet:
    """processes.json."""

    attempt_id: AttemptId
    processes: Annotated[tuple[Identity, ...], Length(most=1_000_000)]
    schema_version: Version = 1


class ProcessBook:
    """The processes of one attempt, written to `path` whenever one is added.

    So whoever comes after a killed tuner can end exactly them.
    """

    def __init__(self, path: Path, *, attempt_id: str) -> None:
        self._path = path
        self._attempt_id = attempt_id
        self._known: set[Identity] = set()

    @classmethod
    def read(cls, path: Path, *, attempt_id: str) -> "ProcessBook":
        """The book of an earlier tuner; empty where it had not written one."""
        book = cls(path, attempt_id=attempt_id)
        with contextlib.suppress(FileNotFoundError):
            sheet = read_sheet(_Sheet, path)
            if sheet.attempt_id == attempt_id:
                book._known = set(sheet.processes)
        return book

    @property
    def identities(self) -> frozenset[Identity]:
        """Everything recorded so far, ended or not."""
        return frozenset(self._known)

    @property
    def alive(self) -> frozenset[Identity]:
        """What still runs of it."""
        return frozenset(identity for identity in self._known if identity.is_alive)

    def rescan(self, launcher_pid: int, *, named: Iterable[tuple[int, float]] = ()) -> None:
        """Add the launcher, its descendants, theirs, and of the `named` (pid, start) those that are ours."""
        found = descendants({launcher_pid, *(known.pid for known in self.alive)} - {0})
        with contextlib.suppress(psutil.Error):
            launcher = identify(psutil.Process(launcher_pid))
            found |= {launcher} if launcher is not None else set()
        for pid, start in named:
            claimed = Identity(pid=pid, process_start=start, boot_id=boot_id())
            process = claimed.find()
            if process is not None and _carries(process, self._attempt_id):
                identity = identify(process)
                found |= {identity} if identity is not None else set()
        self._add(found)

    def search(self) -> None:
        """Add whatever carries the attempt's id: it looks at every process, so not at each turn."""
        self._add(marked(self._attempt_id))

    def _add(self, found: set[Identity]) -> None:
        known = {(one.pid, one.boot_id): one for one in self._known}
        new = {one for one in found if not _is_same(one, known.get((one.pid, one.boot_id)))}
        if new:
            self._known |= new
            sheet = _Sheet(attempt_id=self._attempt_id, processes=tuple(sorted(self._known)))
            write_json_atomic(self._path, dump(sheet))


def _is_same(one: Identity, other: Identity | None) -> bool:
    """Whether two looks at one pid, of one boot, saw one process."""
    if other is None:
        return False
    if one.start_ticks is not None and other.start_ticks is not None:
        return one.start_ticks == other.start_ticks
    return abs(one.process_start - other.process_start) <= _START_TOLERANCE_S


def reap(
    identities: Iterable[Identity],
    *,
    grace_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> frozenset[Identity]:
    """End exactly these processes: SIGTERM, up to `grace_s` of waiting, SIGKILL.

    Returns those that still run after it (in an uninterruptible wait, or another user's).
    """
    wanted = [identity for identity in identities if identity.is_alive]
    _signal(wanted, signal.SIGTERM)
    _wait_for(wanted, grace_s, clock=clock, sleep=sleep)
    rest = [identity for identity in wanted if identity.is_alive]
    _signal(rest, signal.SIGKILL)
    _wait_for(rest, max(grace_s, 5.0) if rest else 0.0, clock=clock, sleep=sleep)
    return frozenset(identity for identity in rest if identity.is_alive)


def ask_for_stacks(identity: Identity) -> None:
    """SIGABRT: Python's fault handler prints the stacks of a process, be it `paused`, and ends it."""
    _signal([identity], signal.SIGABRT)
    _signal([identity], signal.SIGCONT)


@contextlib.contextmanager
def paused(identities: Iterable[Identity]) -> Iterator[None]:
    """Hold these processes with SIGSTOP, and let them go on afterwards."""
    held = list(identities)
    _signal(held, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(held, signal.SIGCONT)


def _signal(identities: Iterable[Identity], number: signal.Signals) -> None:
    for identity in identities:
        process = identity.find()
        if process is not None:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)


def _wait_for(
    identities: list[Identity],
    limit_s: float,
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    end = clock() + limit_s
    while any(identity.is_alive for identity in identities) and clock() < end:
        sleep(0.02)
