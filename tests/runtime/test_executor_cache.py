"""The executors that were used last are kept, each for one number of microbatches and direction."""

from quartet_plugin.runtime.executor_cache import executor_cache
from quartet_plugin.runtime.programs import KEPT_PROGRAMS, ProgramCache
from tests.runtime.pipelines import spec_of


def test_the_executors_used_last_are_kept() -> None:
    executor = executor_cache(ProgramCache(spec_of("zb-h1", 2)), device=lambda: 1)
    first = executor(2, False)
    assert first.program.num_microbatches == 2
    assert executor(2, False) is first
    assert executor(2, True) is not first
    for count in range(3, 3 + KEPT_PROGRAMS):
        executor(count, False)
    assert executor(2, False) is not first
