"""How kernels are compiled: with numba, kept on disk as machine code, without the GIL, and timed."""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.event import Event, Listener, install_listener

# What a process waits for another's compilation of the kernel that it needs, before it compiles it too.
OTHERS_LIMIT_S = 60.0
_POLL_S = 0.05
COMPILING = "compiling the planner's kernels (once per installation, up to a minute)"


@cache
def _kernels_digest(folder: Path) -> str:
    """The sha256 of all files with kernels below a folder."""
    sources = [path.read_bytes() for path in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"".join(text for text in sources if b"compiled" in text)).hexdigest()


class _IndexFile(IndexDataCacheFile):  # type: ignore[misc] # numba has no types
    """An index of machine code that counts as absent where it cannot be read.

    It names the types of a kernel's arguments; after an upgrade one of them may be gone from its module.
    """

    def _load_index(self) -> dict[Any, Any]:
        try:
            return cast(dict[Any, Any], super()._load_index())
        except Exception:  # whatever the bytes of another release lead to
            return {}


class _KernelCache(FunctionCache):  # type: ignore[misc] # numba has no types
    """Machine code on disk, of use while no kernel has changed.

    numba looks at the kernel's file alone, but a kernel contains the kernels of other files that it calls.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        folders = {Path(__file__).parent, Path(function.__code__.co_filename).parent}
        self._cache_file = _IndexFile(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=[self._impl.locator.get_source_stamp(), *map(_kernels_digest, sorted(folders))],
        )
        self._lock: int | None = None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The machine code on disk, or None: then this process compiles, and others wait for its code."""
        code = super().load_overload(sig, target_context)
        if code is not None:
            return code
        self._release()
        if self._await_others():
            code = super().load_overload(sig, target_context)
        if code is not None:
            self._release()
        return code

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write what was compiled, and let those read it that wait."""
        try:
            super().save_overload(sig, data)
        finally:
            self._release()

    def _await_others(self) -> bool:
        """Take the kernel's lock; whether another process had it, which may have written the code since."""
        try:
            self._impl.locator.ensure_cache_path()
            path = Path(self._cache_path, f"{self._impl.filename_base}.lock")
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        end = time.monotonic() + OTHERS_LIMIT_S
        had_to_wait = False
        while time.monotonic() < end:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                had_to_wait = True
                time.sleep(_POLL_S)
            except OSError:
                return had_to_wait  # no locks on this file system
            else:
                break
        return had_to_wait

    def _release(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = None


def compiled[Function: Callable[..., Any]](function: Function) -> Function:
    """Compile with numba, keep the machine code beside the file, release the GIL."""
    return _kept(function, njit(nogil=True, no_cfunc_wrapper=True)(function))


def inner[Function: Callable[..., Any]](function: Function) -> Function:
    """Compile as `compiled` does, for kernels alone to call: without the way in for Python."""
    return _kept(function, njit(nogil=True, no_cfunc_wrapper=True, no_cpython_wrapper=True)(function))


def _kept[Function: Callable[..., Any]](function: Function, dispatcher: Any) -> Function:
    """The dispatcher, with the plugin's cache on disk."""
    dispatcher._cache = _KernelCache(function)
    return cast(Function, dispatcher)


def inlined[Function: Callable[..., Any]](function: Function) -> Function:
    """Compile as a part of each kernel that calls it, which spares handing over large records."""
    return cast(Function, njit(nogil=True, inline="always")(function))


class _Compilations(Listener):  # type: ignore[misc] # numba has no types
    """The seconds of compilations, of one that is still running too; numba runs one at a time."""

    def __init__(self) -> None:
        self._depth = 0
        self._began_s = 0.0
        self._ended_s = 0.0

    def on_start(self, _event: Event) -> None:
        """A kernel is compiled, perhaps for another one."""
        if self._depth == 0:
            self._began_s = time.monotonic()
        self._depth += 1

    def on_end(self, _event: Event) -> None:
        """A kernel is compiled or has failed to be."""
        self._depth -= 1
        if self._depth == 0:
            self._ended_s += time.monotonic() - self._began_s

    def seconds(self) -> float:
        """The seconds so far."""
        return self._ended_s + (time.monotonic() - self._began_s if self._depth else 0.0)


@contextmanager
def compilation_time() -> Iterator[Callable[[], float]]:
    """Watch this process's compilations while the block runs.

    What it yields tells their seconds so far; 0 where all machine code came from the cache.
    """
    listener = _Compilations()
    with install_listener("numba:compile", listener):
        yield listener.seconds


class _FirstCompilation(Listener):  # type: ignore[misc] # numba has no types
    """Tells a line before the first compilation."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._has_begun = False

    def on_start(self, _event: Event) -> None:
        """A kernel is compiled."""
        if not self._has_begun:
            self._has_begun = True
            self._tell(COMPILING)

    def on_end(self, _event: Event) -> None:
        """A kernel is compiled or has failed to be."""


@contextmanager
def compilation_notice(tell: Callable[[str], None]) -> Iterator[None]:
    """Give `tell` one line if the block has to compile; none where all machine code is on the disk."""
    with install_listener("numba:compile", _FirstCompilation(tell)):
        yield
