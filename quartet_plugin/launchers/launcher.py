"""How a trial's processes start: the protocol that every launcher keeps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol


class Handle(Protocol):
    """A started command."""

    @property
    def pid(self) -> int:
        """Process id of the launcher, on this host."""

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""

    def terminate(self) -> None:
        """Ask the launcher to end what it started; nothing when it has ended."""

    def kill(self) -> None:
        """End the launcher itself at once; what it started may live on."""


class Launcher(Protocol):
    """Starts commands. `num_nodes` is how many nodes one command may span; None has no limit.

    `start` returns when the command runs, its output going to the new file `stdout`, and raises
    InfrastructureError when it cannot run. What it started must survive the death of this process.
    """

    @property
    def num_nodes(self) -> int | None:
        """How many nodes one command may span."""

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdout: Path) -> Handle:
        """Start `argv` with the environment `env` in the folder `cwd`."""
