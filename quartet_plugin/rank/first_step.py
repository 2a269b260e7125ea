"""Progress inside of a first step, which may take minutes: kernels are compiled and graphs captured."""

from collections.abc import Callable

import psutil


class FirstStepProgress:
    """Counts what a first step has done so far: a rank that hangs adds nothing.

    `num_modules` are the modules whose forward has begun. Processes that this one has started since count as
    well: compilers run in processes of their own.
    """

    def __init__(self, num_modules: Callable[[], int]) -> None:
        self._num_modules = num_modules
        self._children: set[tuple[int, float]] = set()

    def count(self) -> int:
        """The count so far; it never falls."""
        try:
            for child in psutil.Process().children(recursive=True):
                self._children.add((child.pid, child.create_time()))
        except psutil.Error:
            pass  # a child that has just ended; the next look counts the others
        return self._num_modules() + len(self._children)
