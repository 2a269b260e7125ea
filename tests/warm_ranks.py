"""Ranks of the tests' trainings, forked from a trial server that has made a framework's imports once."""

import atexit
import functools
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quartet_plugin.launchers import warm
from quartet_plugin.launchers.protocol import Handle
from quartet_plugin.launchers.server_command import ServerCommand
from quartet_plugin.launchers.warm import WarmLauncher
from quartet_plugin.protocol.environment import ATTEMPT_ID, CPU_REEXECUTED, CPU_SETTINGS, ERRORS_FOLDER
from quartet_plugin.protocol.trial_server import NO_ATTEMPT, SERVER_MODULE, ForkRequest

ROOT = Path(__file__).resolve().parents[1]
_TORCHRUN = ("-m", "torch.distributed.run")
# What each launch has its own of, and no import reads.
_UNREAD = (ERRORS_FOLDER, "PARTITION", "PYTEST_CURRENT_TEST", "QUARTET_TEST_DROPPED_SEAM")
# What a trial gives to its ranks, and other launches of Megatron leave to them: one server has it for both.
_OF_TRIALS = (*CPU_SETTINGS, "DS_ACCELERATOR", "PYTHONFAULTHANDLER")
# On a busy machine a server reports an end late; a launcher that gives it up knows no exit code.
warm._END_LIMIT_S = 120.0
_COUNT = re.compile(r"--nproc-per-node[= ]([0-9]+)")


@dataclass(frozen=True, slots=True)
class TestServerCommand(ServerCommand):
    """A server that forks as many ranks as each command line says."""

    __test__ = False

    def request(self, argv: Sequence[str], *, env: Mapping[str, str]) -> ForkRequest:
        """The request for a launch of `argv` with the environment `env`."""
        count = _COUNT.search(" ".join(argv))
        assert count is not None
        return replace(ServerCommand.request(self, argv, env=env), num_ranks=int(count[1]))


@dataclass(frozen=True, slots=True)
class Framework:
    """What a server imports: the module `entry`, and what `script` imports."""

    entry: str
    script: Path
    has_own_settings: bool = False


# A rank of Megatron on the CPU starts itself anew with CPU_SETTINGS.
MEGATRON = Framework("tests.megatron.warm_rank", ROOT / "examples" / "pretrain_gpt.py", has_own_settings=True)
# Process groups of torch alone.
TORCH = Framework("tests.runtime.warm_rank", ROOT / "tests" / "runtime" / "transport_rank.py")
DEEPSPEED = Framework("tests.deepspeed.warm_rank", ROOT / "examples" / "pretrain_deepspeed.py")


def command_of(
    framework: Framework, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path
) -> ServerCommand:
    """The server for `python -m torch.distributed.run --nproc-per-node N ... -m MODULE ...`."""
    assert tuple(argv[1:3]) == _TORCHRUN
    given = {**{name: value for name, value in env.items() if name not in _UNREAD}, ATTEMPT_ID: NO_ATTEMPT}
    own = dict(given)
    if framework.has_own_settings:
        given = {name: value for name, value in given.items() if name not in _OF_TRIALS}
        given["PYTHONFAULTHANDLER"] = "1"
        own = {**given, **CPU_SETTINGS, CPU_REEXECUTED: "1"}
    return TestServerCommand(
        (sys.executable, "-u", "-m", SERVER_MODULE),
        cwd,
        1,
        (),
        tuple(sorted(own.items())),
        tuple(sorted(given.items())),
        str(framework.script),
        is_module=False,
        on_cpu=True,
        entry=framework.entry,
        framework="tests",
    )


@functools.cache
def launcher(framework: Framework = MEGATRON) -> WarmLauncher:
    """The launcher of this process's tests; its server ends with them."""
    made = WarmLauncher(command_of=functools.partial(command_of, framework))
    atexit.register(made.close)
    return made


def start(
    argv: Sequence[str], *, environment: Mapping[str, str], log: Path, framework: Framework = MEGATRON
) -> Handle:
    """Start torchrun with forked ranks. A test that would start them cold fails."""
    way = launcher(framework)
    handle = way.start(argv, env=environment, cwd=ROOT, stdout=log)
    assert way.latest.is_warm, way.latest.cold_reason
    return handle
