"""Ranks of the tests' trainings, forked from a trial server that has made Megatron's imports once."""

import atexit
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quartet_plugin.launchers.protocol import Handle
from quartet_plugin.launchers.server_command import ServerCommand
from quartet_plugin.launchers.warm import WarmLauncher
from quartet_plugin.protocol.environment import ATTEMPT_ID, CPU_REEXECUTED, CPU_SETTINGS
from quartet_plugin.protocol.trial_server import NO_ATTEMPT, SERVER_MODULE, ForkRequest

ROOT = Path(__file__).resolve().parents[2]
_TORCHRUN = ("-m", "torch.distributed.run")
_COUNT = "--nproc-per-node"


@dataclass(frozen=True, slots=True)
class TestServerCommand(ServerCommand):
    """A server that forks as many ranks as each command line says."""

    __test__ = False

    def request(self, argv: Sequence[str], *, env: Mapping[str, str]) -> ForkRequest:
        """The request for a launch of `argv` with the environment `env`."""
        request = ServerCommand.request(self, argv, env=env)
        return replace(request, num_ranks=int(argv[argv.index(_COUNT) + 1]))


def command_of(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> ServerCommand:
    """The server for `python -m torch.distributed.run --nproc-per-node N ... -m MODULE ...`."""
    assert tuple(argv[1:3]) == _TORCHRUN
    given = {**env, ATTEMPT_ID: NO_ATTEMPT}
    own = dict(given)
    if any(given.get(name) != value for name, value in CPU_SETTINGS.items()):
        own |= {**CPU_SETTINGS, CPU_REEXECUTED: "1"}  # what a rank starts itself anew with
    return TestServerCommand(
        (sys.executable, "-u", "-m", SERVER_MODULE),
        cwd,
        1,
        (),
        tuple(sorted(own.items())),
        tuple(sorted(given.items())),
        str(ROOT / "examples" / "pretrain_gpt.py"),
        is_module=False,
        on_cpu=True,
        entry="tests.megatron.warm_rank",
        framework="tests",
    )


@functools.cache
def launcher() -> WarmLauncher:
    """The launcher of this process's tests; its server ends with them."""
    made = WarmLauncher(command_of=command_of)
    atexit.register(made.close)
    return made


def start(argv: Sequence[str], *, environment: Mapping[str, str], log: Path) -> Handle:
    """Start torchrun with forked ranks. A test that would start them cold fails."""
    way = launcher()
    handle = way.start(argv, env=environment, cwd=ROOT, stdout=log)
    assert way.latest.is_warm, way.latest.cold_reason
    return handle
