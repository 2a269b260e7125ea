"""How long compiling kernels took: time limits leave the first compilation out."""

from collections.abc import Iterator
from contextlib import contextmanager

from numba.core.event import TimingListener, install_listener


class CompilationTime:
    """Seconds spent compiling while it was watched; 0 where all machine code came from the cache."""

    def __init__(self, listener: TimingListener) -> None:
        self._listener = listener

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return float(self._listener.duration) if self._listener.done else 0.0


@contextmanager
def compilation_time() -> Iterator[CompilationTime]:
    """Watch this process's compilations while the block runs."""
    listener = TimingListener()
    with install_listener("numba:compile", listener):
        yield CompilationTime(listener)
