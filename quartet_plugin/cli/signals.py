"""What ends a command from outside ends what it has started, too."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence


@contextlib.contextmanager
def handled(numbers: Sequence[int], handle: Callable[[int, object], None]) -> Iterator[None]:
    """`handle` takes these signals; after the block whatever took them before does.

    Where this process ignores SIGHUP, as under nohup, SIGHUP stays ignored.
    """
    is_detached = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    taken = [number for number in numbers if not (is_detached and number == signal.SIGHUP)]
    before = {number: signal.signal(number, handle) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_in_foreground() -> bool:
    """Whether a terminal's Ctrl-C reaches this process, and so its children too."""
    with contextlib.suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False


@contextlib.contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt: processes in other sessions would outlive this."""

    def handle(number: int, frame: object) -> None:
        del number, frame
        raise KeyboardInterrupt

    with handled((signal.SIGTERM, signal.SIGHUP), handle):
        yield


def is_interruption(error: BaseException) -> bool:
    """Whether Ctrl-C raised the error, which numba's functions turn into the cause of a SystemError."""
    cause: BaseException | None = error
    while isinstance(cause, SystemError):
        cause = cause.__cause__
    return isinstance(cause, KeyboardInterrupt)


@contextlib.contextmanager
def stop_on_signals(tell: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Whether to stop: from the first Ctrl-C on. The second raises KeyboardInterrupt.

    So are SIGTERM, SIGHUP and what Slurm sends ahead of a time limit or a preemption (SIGUSR1, SIGUSR2).
    `tell` gets one line when that is first asked, since nothing may be printed where a signal comes.
    """
    stop = threading.Event()
    is_announced = False

    def handle(number: int, frame: object) -> None:
        del number, frame
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    def should_stop() -> bool:
        nonlocal is_announced
        if stop.is_set() and not is_announced:
            is_announced = True
            tell("stopping after cleaning up; press again to kill at once")
        return is_announced

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    with handled(numbers, handle):
        yield should_stop
