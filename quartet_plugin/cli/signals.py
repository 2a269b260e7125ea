"""What ends a command from outside ends what it has started, too."""

import contextlib
import signal
from collections.abc import Iterator

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
