"""Makes this process the parent of what a trial leaves without one, so that nothing outlives the trial.

A daemon leaves its session and its parents, and may clear its environment; then neither the attempt's id nor
its ancestors tell whose it is. On Linux the nearest ancestor that is a "child subreaper" becomes its parent
(prctl(2), PR_SET_CHILD_SUBREAPER); elsewhere nothing is adopted.
"""

import contextlib
import ctypes
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from quartet_plugin.launchers.running_process import identify
from quartet_plugin.protocol.process_identity import Identity
from quartet_plugin.trial.processes import descendants

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


class Subreaper:
    """Inside the block this process is the parent of each of its descendants that loses its own.

    Only for a process that starts one trial at a time and nothing else with a session of its own meanwhile.
    No orphans are the children of before the block, what these have started, what `expect` names, and the
    children in this process's session. The first process of a container adopts whatever is started there, so
    in it, as where `is_on` is False, nothing counts as an orphan.
    """

    def __init__(self, *, is_on: bool = True) -> None:
        self._is_on = is_on and sys.platform == "linux" and os.getpid() != 1
        self._launcher: int | None = None
        self._known: set[int] = set()
        self._others: set[tuple[int, float]] = set()

    def __enter__(self) -> Self:
        if self._is_on:
            self._known = {child.pid for child in _children()}
            self._note_others()
            self._was_subreaper = _set_subreaper(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_on:
            self.orphans()
            _set_subreaper(self._was_subreaper)

    def expect(self, pid: int) -> None:
        """Do not reap a child that this process has started; another part of the program waits for it."""
        self._known.add(pid)
        self._launcher = pid

    def leave_alone(self, pid: int) -> None:
        """Take a child that this process has started meanwhile for none of the launch's."""
        self._known.add(pid)

    def orphans(self) -> set[Identity]:
        """The orphans that run; those that have ended are removed from the process table."""
        running: set[Identity] = set()
        if not self._is_on:
            return running
        self._note_others()
        for child in _children():
            with contextlib.suppress(psutil.Error, OSError):
                if not self._is_orphan(child):
                    continue
                if child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, os.WNOHANG)
                elif (identity := identify(child)) is not None:
                    running.add(identity)
        return running

    def _is_orphan(self, child: psutil.Process) -> bool:
        if child.pid in self._known or (child.pid, child.create_time()) in self._others:
            return False
        return os.getsid(child.pid) != os.getsid(0)

    def _note_others(self) -> None:
        """Note what the children of before have started: such a one's end makes it this process's child."""
        earlier = self._known - {self._launcher}
        if earlier:
            # A trial server is such a child, and the launcher one that it has started.
            without = [] if self._launcher is None else [self._launcher]
            others = descendants(earlier, without=without)
            self._others |= {(other.pid, other.process_start) for other in others}


def _children() -> list[psutil.Process]:
    """This process's children; where the system lists them at once, since some are other processes soon."""
    pids: set[int] = set()
    try:
        for task in Path("/proc/self/task").iterdir():
            pids |= set(map(int, (task / "children").read_text().split()))
    except OSError:
        return psutil.Process().children()
    children = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            children.append(psutil.Process(pid))
    return children


def _set_subreaper(is_on: bool) -> bool:
    """Make this process a child subreaper or none; whether it was one before."""
    library = ctypes.CDLL(None)
    before = ctypes.c_int(0)
    library.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    library.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(is_on), 0, 0, 0)
    return bool(before.value)
