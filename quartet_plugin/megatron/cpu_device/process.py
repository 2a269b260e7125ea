"""Start and exit of a CPU rank's process: the environment that it needs, and the way out.

glibc reads its allocator settings and OpenMP its thread count at process start, so setting them later has no
effect. They move step times as much as a layout does: every run of a comparison must have the same.
"""

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from typing import NoReturn

from quartet_plugin.protocol.environment import CPU_REEXECUTED

_SETTINGS = {
    # One thread a rank, which MKL and OpenBLAS obey too: ranks share the cores.
    "OMP_NUM_THREADS": "1",
    # Freed activations stay in the heap. By default glibc returns each to the kernel and faults it in again.
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "67108864",
}


def environment() -> dict[str, str]:
    """Variables that a launcher merges over the environment of every rank of a CPU run."""
    return dict(_SETTINGS)


def missing_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings of `environment()` that `environ` lacks or has with another value."""
    return {name: value for name, value in _SETTINGS.items() if environ.get(name) != value}


def ensure_environment() -> None:
    """Start this process anew, once, when it was started without `environment()`; the pid stays.

    Returns without an effect when the settings are there, when the process was already started anew, or when
    torch is imported: a half-initialized process is not replaced, it only runs with other settings.
    """
    missing = missing_settings(os.environ)
    if not missing or CPU_REEXECUTED in os.environ or "torch" in sys.modules:
        return
    # The interpreter's own arguments (-m, -X, ...) are in orig_argv, not in argv.
    command = [sys.executable, *sys.orig_argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, {**os.environ, **missing, CPU_REEXECUTED: "1"})  # noqa: S606 - same program


def exit_now() -> NoReturn:
    """End this process with code 0, exit handlers run, without the interpreter's teardown.

    The teardown destroys gloo's communicators while their threads run, and now and then the process is then
    aborted ("terminate called without an active exception", torch 2.11) though everything was trained and
    saved; the launcher reports a failure that was none.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    with contextlib.suppress(Exception):  # it has printed what went wrong
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)
