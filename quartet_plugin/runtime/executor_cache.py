"""The executors of one device that a training has used last, for any adapter."""

from collections.abc import Callable
from functools import lru_cache

from quartet_plugin.runtime.executor import Executor
from quartet_plugin.runtime.programs import KEPT_PROGRAMS, ProgramCache


def executor_cache(programs: ProgramCache, *, device: Callable[[], int]) -> Callable[[int, bool], Executor]:
    """The function from a number of microbatches, and whether they only run forward, to their executor.

    It keeps the last `KEPT_PROGRAMS` executors. `device` is asked for the pipeline rank when one is made.
    """

    @lru_cache(KEPT_PROGRAMS)
    def executor(num_microbatches: int, forward_only: bool) -> Executor:
        program = programs.program(num_microbatches, forward_only=forward_only)
        return Executor(program, device=int(device()))

    return executor
