"""Makes this process the parent of what a trial leaves without one, so that nothing outlives the trial.

A daemon leaves its session and its parents, and may clear its environment; then neither the attempt's id nor
its ancestors tell whose it is. On Linux the nearest ancestor that is a "child subreaper" becomes its parent
(prctl(2), PR_SET_CHILD_SUBREAPER); elsewhere nothing is adopted.
"""

import contextlib
import ctypes
import os
import sys
from types import TracebackType
from typing import Self

import psutil

from quartet_plugin.trial.processes import Identity, identify

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


class Subreaper:
    """Inside the block this process is the parent of each of its descendants that loses its own.

    What the block starts must get a session of its own: a child in this process's session, one that was there
    before, or one that `expect` names, is never taken for an orphan.
    """

    def __enter__(self) -> Self:
        self._was_subreaper = _set_subreaper(True)
        self._known = {child.pid for child in _children()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.orphans()
        _set_subreaper(self._was_subreaper)

    def expect(self, pid: int) -> None:
        """Leave a child that this process has started to whoever waits for it."""
        self._known.add(pid)

    def orphans(self) -> set[Identity]:
        """The orphans that run; those that have ended are removed from the process table."""
        running: set[Identity] = set()
        for child in _children():
            if child.pid in self._known or not _is_detached(child.pid):
                continue
            with contextlib.suppress(psutil.Error, ChildProcessError):
                if child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, os.WNOHANG)
                elif (identity := identify(child)) is not None:
                    running.add(identity)
        return running


def _children() -> list[psutil.Process]:
    return psutil.Process().children()


def _is_detached(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getsid(pid) != os.getsid(0)
    return False


def _set_subreaper(is_on: bool) -> bool:
    """Make this process a child subreaper or none, where the system has such; whether it was one before."""
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    before = ctypes.c_int(0)
    library.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    library.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(is_on), 0, 0, 0)
    return bool(before.value)
