"""The state of a forked process before its program's first line: that of a process that was just started."""

import ctypes
import gc
import importlib
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from quartet_plugin.protocol.environment import ATTEMPT_ID
from quartet_plugin.protocol.trial_server import NO_ATTEMPT
from quartet_plugin.rank.device import declare_forked, resident_files

_FIRST_DESCRIPTOR = 3
# What Python itself sets in its environment when it starts.
_SET_BY_PYTHON = ("LC_CTYPE",)
# The field of /proc/PID/stat behind the name, counted from 0, with the address of the environment.
_ENVIRONMENT_FIELD = 47


class StartState:
    """What a server had when it started, for the processes that are forked from it.

    `given` is the environment that it was started with. What its imports add to that, or change of it, they
    would have changed in a rank too.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = dict(given)
        self._agent_path = list(sys.path)
        self._num_frozen = gc.get_freeze_count()  # by Python itself

    def note_imports(self) -> None:
        """Note what the imports have changed, and move what they made out of the collector's sight."""
        self._changes = {name: value for name, value in os.environ.items() if self._given.get(name) != value}
        self._rank_path = list(sys.path)
        self._file_bytes = resident_files()
        self._is_frozen = gc.get_freeze_count() > self._num_frozen
        gc.collect()
        gc.freeze()

    def environment_of(self, environment: Mapping[str, str], *, is_rank: bool) -> dict[str, str]:
        """The environment that a process would have now that was started with `environment`."""
        changes = {
            name: value
            for name, value in self._changes.items()
            if (is_rank or name in _SET_BY_PYTHON) and environment.get(name) == self._given.get(name)
        }
        return {**environment, **changes}

    def take_on(
        self,
        environment: Mapping[str, str],
        *,
        output: Sequence[int],
        is_rank: bool,
    ) -> None:
        """Give this forked process its environment, its output, and the state of a new process.

        `output` are the descriptors of standard output and error; all others are closed.
        """
        for number, descriptor in enumerate(output, start=1):
            os.dup2(descriptor, number)
        close_descriptors(keep=())
        wanted = self.environment_of(environment, is_rank=is_rank)
        for name in set(os.environ) - set(wanted):
            del os.environ[name]
        for name, value in wanted.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        _mark(environment.get(ATTEMPT_ID, NO_ATTEMPT))
        sys.path[:] = self._rank_path if is_rank else self._agent_path
        importlib.invalidate_caches()
        if is_rank:
            if not self._is_frozen:
                gc.unfreeze()
            declare_forked(self._file_bytes)
            _seed_anew()

    def run_module(self, argv: Sequence[str]) -> None:
        """Run `python ... -m MODULE ARGS...` in this process, as its main program."""
        index = argv.index("-m") + 1
        sys.orig_argv[:] = list(argv)
        sys.argv[:] = ["-m", *argv[index + 1 :]]
        sys.modules["__main__"] = ModuleType("__main__")
        runpy._run_module_as_main(argv[index])  # type: ignore[attr-defined]


def close_descriptors(*, keep: Sequence[int]) -> None:
    """Close every descriptor above standard error but those to keep."""
    begin = _FIRST_DESCRIPTOR
    for descriptor in sorted(keep):
        os.closerange(begin, descriptor)
        begin = descriptor + 1
    os.closerange(begin, os.sysconf("SC_OPEN_MAX"))


def _mark(attempt_id: str) -> None:
    """Write the attempt's id into the environment block that other processes see of this process.

    The kernel shows the block that the server was started with, which has room for an id.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    begin, end = int(fields[_ENVIRONMENT_FIELD]), int(fields[_ENVIRONMENT_FIELD + 1])
    if not begin < end:
        return
    block = ctypes.string_at(begin, end - begin)
    name = f"{ATTEMPT_ID}=".encode()
    offset = 0 if block.startswith(name) else block.find(b"\0" + name) + 1
    if block[offset:].startswith(name):
        ctypes.memmove(begin + offset + len(name), attempt_id.encode(), len(NO_ATTEMPT))


def _seed_anew() -> None:
    """Seed what a new process seeds from the system; Python's own generator is seeded by the fork."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
