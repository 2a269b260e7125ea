"""What ends a command from outside ends what it has started, too."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

_NUMBERS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt: processes in sessions of their own would outlive us."""

    def handle(number: int, frame: object) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stop_on_signals(tell: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Whether to stop: from the first Ctrl-C on. The second raises KeyboardInterrupt.

    So are SIGTERM, SIGHUP and what Slurm sends ahead of a time limit or a preemption (SIGUSR1, SIGUSR2).
    `tell` gets one line when that is first asked, since nothing may be printed where a signal comes.
    """
    stop = threading.Event()
    is_told = False

    def handle(number: int, frame: object) -> None:
        del number, frame
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    def should_stop() -> bool:
        nonlocal is_told
        if stop.is_set() and not is_told:
            is_told = True
            tell("stopping after cleaning up; once more to kill at once")
        return is_told

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield should_stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
