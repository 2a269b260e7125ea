"""An attempt whose nodes and launcher meet in a folder that all see (`shared_node` runs on the nodes).

The request holds the environment of the tuner: only its owner may read it, and it is removed when the attempt
has ended.
"""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quartet_plugin.errors import InfrastructureError
from quartet_plugin.launchers.local import open_output
from quartet_plugin.launchers.shared_node import (
    BEGUN_FILE,
    EXIT_FILE,
    KILL_FILE,
    NOT_SEEN_EXIT,
    OF_THE_NODE,
    OF_THE_RANKS,
    OUTPUT_FILE,
    REQUEST_FILE,
    TERMINATE_FILE,
    exit_code,
    is_among,
    is_there,
)
from quartet_plugin.model.files import write_json_atomic, write_text_atomic

MODULE = "quartet_plugin.launchers.shared_node"
FOLDER = "nodes"
_POLL_S = 0.2


def node_words(stdout: Path, *, python: str) -> list[str]:
    """The command line that an engine starts on every node of the attempt with this output."""
    return [python, "-m", MODULE, str(stdout.parent / FOLDER / REQUEST_FILE)]


def plain_node_words(stdout: Path, *, python: str) -> list[str]:
    """The same in words that no shell reads otherwise, whatever the path holds."""
    *words, request = node_words(stdout, python=python)
    return [*words, "--hex", os.fsencode(request).hex()]


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """The folder beside the attempt's output through which nodes and launcher communicate."""

    stdout: Path

    @property
    def path(self) -> Path:
        """The folder itself."""
        return self.stdout.parent / FOLDER

    def write_request(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        num_nodes: int,
        index_variables: Sequence[str],
        names: Literal["address", "host"],
        of_the_node: Sequence[str] = (),
        of_the_site: Mapping[str, str] | None = None,
    ) -> None:
        """Write what every node of the attempt is to run. Raises InfrastructureError where it cannot.

        A node's index is in the first of `index_variables` that is set there; without one it is 0. `names`
        says by what the nodes reach one another: their addresses, or the names of their hosts. Variables that
        begin with one of `of_the_node` stay as the engine sets them on a node, beside those of OF_THE_NODE;
        those of `of_the_site` are set in any case.
        """
        request = {
            "argv": list(argv),
            "env": {**_sent(env, of_the_node=of_the_node), **(of_the_site or {})},
            "cwd": str(cwd),
            "stdout": str(self.stdout),
            "num_nodes": num_nodes,
            "index_variables": list(index_variables),
            "names": names,
        }
        try:
            os.close(open_output(self.stdout))
            self.path.mkdir(mode=0o700)
            path = self.path / REQUEST_FILE
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            write_json_atomic(path, request)
        except OSError as error:
            raise InfrastructureError(f"{self.path}: cannot be written: {error.strerror}") from error

    def exit_codes(self, num_nodes: int) -> dict[int, int]:
        """The exit code of every node that has ended."""
        codes = {index: exit_code(self.path / EXIT_FILE.format(index)) for index in range(num_nodes)}
        return {index: code for index, code in codes.items() if code is not None}

    def has_begun(self, num_nodes: int) -> bool:
        """Whether every node has begun."""
        return all(is_there(self.path / BEGUN_FILE.format(index)) for index in range(num_nodes))

    def num_begun(self) -> int:
        """The number of nodes that have begun."""
        return sum(1 for _ in self.path.glob(BEGUN_FILE.format("*")))

    def ask_to_end(self) -> None:
        """Have every node ask the command to end."""
        self._mark(TERMINATE_FILE)

    def kill(self) -> None:
        """Have every node kill the command."""
        self._mark(KILL_FILE)

    @property
    def is_to_kill(self) -> bool:
        """Whether the nodes are to kill the command."""
        return is_there(self.path / KILL_FILE)

    def await_end(self, num_nodes: int, *, limit_s: float) -> list[int]:
        """Wait for the end of every node that has begun; those that have not ended in time."""
        end = time.monotonic() + limit_s
        while left := self._running(num_nodes):
            if time.monotonic() >= end:
                break
            time.sleep(_POLL_S)
        return left

    def collect(self) -> None:
        """Put the output of the other nodes behind the first one's, and forget the request."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / REQUEST_FILE).unlink()
        for part in sorted(self.path.glob(OUTPUT_FILE.format("*"))):
            with contextlib.suppress(OSError):
                self.add_output(part.read_bytes())
                part.unlink()

    def add_output(self, content: bytes) -> None:
        """Append to the attempt's output."""
        with self.stdout.open("ab") as file:
            file.write(content)

    def _running(self, num_nodes: int) -> list[int]:
        codes = self.exit_codes(num_nodes)
        begun = [index for index in range(num_nodes) if is_there(self.path / BEGUN_FILE.format(index))]
        return [index for index in begun if index not in codes]

    def _mark(self, name: str) -> None:
        if self.path.is_dir():
            write_text_atomic(self.path / name, "")


def highest(codes: Mapping[int, int]) -> int | None:
    """The exit code of the attempt from those of its nodes: the highest of the command's own."""
    of_command = [code for code in codes.values() if code != NOT_SEEN_EXIT]
    return max(of_command or codes.values(), default=None)


def _sent(env: Mapping[str, str], *, of_the_node: Sequence[str]) -> dict[str, str]:
    """The environment of the command, without what belongs to the host that the tuner runs on."""
    inherited = {name for name, value in env.items() if os.environ.get(name) == value}
    return {
        name: value
        for name, value in env.items()
        if name not in inherited
        or not (is_among(name, (*OF_THE_NODE, *OF_THE_RANKS)) or name.startswith(tuple(of_the_node)))
    }
