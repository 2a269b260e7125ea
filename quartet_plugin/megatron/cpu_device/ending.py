"""How a CPU rank that has done its work ends."""

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn


def leave() -> NoReturn:
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
