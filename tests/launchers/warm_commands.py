"""Trial servers without a framework, and scripts for them."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quartet_plugin.launchers import warm
from quartet_plugin.launchers.local import LocalLauncher
from quartet_plugin.launchers.protocol import Handle
from quartet_plugin.launchers.server_command import ServerCommand
from quartet_plugin.launchers.warm import WarmLauncher
from quartet_plugin.protocol.environment import ATTEMPT_ID
from quartet_plugin.protocol.trial_server import NO_ATTEMPT, SERVER_MODULE

ROOT = Path(__file__).parents[2]
ENTRY = "tests.launchers.light_entry"
LIMIT_S = 60.0
# On a busy machine a server reports an end late; a launcher that gives it up knows no exit code.
warm._END_LIMIT_S = 120.0


def light_command(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> ServerCommand:
    """The server of `python -m LIGHT_ENTRY SCRIPT`, or of torchrun that starts it twice."""
    given = tuple(sorted({**env, ATTEMPT_ID: NO_ATTEMPT}.items()))
    has_agent = argv[0] != sys.executable
    return ServerCommand(
        (
            _interpreter_of(argv[0]) if has_agent else sys.executable,
            *(("-u",) if has_agent else ()),
            "-m",
            SERVER_MODULE,
        ),
        cwd,
        2 if has_agent else 0,
        (),
        given,
        given,
        str(cwd / argv[argv.index(ENTRY) + 1]),
        is_module=False,
        on_cpu=True,
        entry=ENTRY,
        framework="tests",
    )


def _interpreter_of(script: str) -> str:
    return Path(script).read_text().partition("\n")[0].removeprefix("#!")


@dataclass
class Workplace:
    """A folder with scripts, and packages that count as installed in it."""

    folder: Path
    environment: dict[str, str] = field(init=False)
    num_logs: int = 0

    def __post_init__(self) -> None:
        base = self.folder / "base"
        self.packages = base / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        self.packages.mkdir(parents=True)
        self.environment = {
            **os.environ,
            "PYTHONUSERBASE": str(base),
            "PYTHONPATH": f"{ROOT}:{self.packages}",
            "OMP_NUM_THREADS": "1",
        }

    def script(self, text: str, name: str = "train.py") -> str:
        """A script of the user's; its name."""
        (self.folder / name).write_text(text)
        return name

    def argv(self, script: str, *arguments: str) -> list[str]:
        """The wrapped command of a script."""
        return [sys.executable, "-m", ENTRY, script, *arguments]

    def start(
        self, launcher: LocalLauncher | WarmLauncher, argv: Sequence[str], attempt_id: str = "a" * 32
    ) -> tuple[Handle, Path]:
        """Start a command: its process and its log."""
        self.num_logs += 1
        log = self.folder / f"log-{self.num_logs}"
        environment = {**self.environment, ATTEMPT_ID: attempt_id}
        return launcher.start(argv, env=environment, cwd=self.folder, stdout=log), log

    def run(self, launcher: LocalLauncher | WarmLauncher, argv: Sequence[str]) -> tuple[int, str]:
        """Run a command to its end: its exit code and its output."""
        handle, log = self.start(launcher, argv)
        return exit_code_of(handle), log.read_text()


def exit_code_of(handle: Handle) -> int:
    """Wait for a process's end."""
    end = time.monotonic() + LIMIT_S
    while (code := handle.poll()) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return code


def wait_for(path: Path, text: str) -> None:
    """Wait until a log holds a text."""
    end = time.monotonic() + LIMIT_S
    while text not in path.read_text():
        assert time.monotonic() < end, path.read_text()
        time.sleep(0.01)
