"""The protocols of launchers: how one attempt's processes start, on this machine or on nodes, and end.

An engine knows nodes (Slurm, a list of hosts). It divides them between trials that run at once, and makes the
launcher of each part. Engines are entry points of the group `quartet_plugin.engines`, loaded when they are
named. `quartet_plugin.testing.launchers` has the tests that each must pass.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable


class Handle(Protocol):
    """A started command; on this machine a `subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """Process id of the launcher on this host; 0 where none runs here."""

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""

    def terminate(self) -> None:
        """Ask the launcher alone to end what it started, which may be in other sessions; nothing when it has
        ended.
        """

    def kill(self) -> None:
        """Kill the launcher itself; processes that it started may survive."""


@runtime_checkable
class NodesHandle(Handle, Protocol):
    """A command on nodes, whose processes this machine's system does not list."""

    @property
    def is_pending(self) -> bool:
        """Whether the command waits for nodes: that time counts for no deadline."""

    @property
    def fault(self) -> str | None:
        """Why the engine has ended the command (a lost node, preemption), for which no plan is to blame."""

    def end_on_nodes(self) -> tuple[str, ...]:
        """End at once what runs on the nodes, and wait for its end; what could not be ended, in words."""


class Launcher(Protocol):
    """Starts commands. `num_nodes` is the number of nodes that one command spans.

    `start` returns when the command runs or is queued, its output going to the new file `stdout`, and raises
    InfrastructureError when it cannot run. What it started must survive the death of this process.
    """

    @property
    def num_nodes(self) -> int:
        """The number of nodes that one command spans."""

    @property
    def engine(self) -> str | None:
        """The name of its engine; None on this machine."""

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdout: Path) -> Handle:
        """Start `argv` with the environment `env` in the folder `cwd`."""


class NodesLauncher(Launcher, Protocol):
    """Starts a command on nodes, once on each; the attempt's id in its environment names what it started."""

    def words(self, argv: Sequence[str], *, attempt_id: str, cwd: Path, stdout: Path) -> list[str]:
        """The words that `start` runs, for a reader.

        What follows `<` goes through the standard input or a file: it is on no command line.
        """

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdout: Path) -> NodesHandle:
        """See `Launcher`."""


@runtime_checkable
class ObjectLauncher(Protocol):
    """A launcher whose command reads an object, which says more than its words."""

    def object_text(self, *, attempt_id: str, stdout: Path) -> str:
        """The object as YAML, for a reader."""


class Engine(Protocol):
    """A way to nodes."""

    def divide(self, *, num_nodes: int, at_once: int) -> tuple[tuple[str, ...], ...]:
        """The names of `num_nodes` nodes for each of `at_once` trials; empty ones where a queue chooses.

        Raises ConfigError where there are not enough.
        """

    def launcher(self, nodes: Sequence[str], *, num_nodes: int) -> NodesLauncher:
        """The launcher of commands on these nodes."""

    def adopt(self, attempt_id: str, *, stdout: Path) -> NodesHandle:
        """The handle of an attempt that another process has started; one that has ended, if nothing runs."""


@runtime_checkable
class CountedNodes(Protocol):
    """An engine whose nodes are there before anything runs."""

    def count_nodes(self) -> int:
        """The number of all nodes that one command can span. Raises ConfigError where they are not known."""
