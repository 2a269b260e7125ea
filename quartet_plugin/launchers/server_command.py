"""The command that starts the trial server of a training's command, or why its ranks cannot be forked."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import (
    DEEPSPEED_MODULE,
    ENTRY_MODULE,
    Assignments,
    Command,
    parse_command,
)
from quartet_plugin.launchers.local import program_path
from quartet_plugin.launchers.starter_options import read_options
from quartet_plugin.protocol.environment import ATTEMPT_ID, CPU_REEXECUTED, CPU_SETTINGS, DEVICE_FLAG
from quartet_plugin.protocol.trial_server import NO_ATTEMPT, SERVER_MODULE, ForkRequest, Preload

# The adapters whose ranks are forked, and the packages that they adapt.
_FRAMEWORKS = {ENTRY_MODULE: "megatron", DEEPSPEED_MODULE: "deepspeed"}
_MAX_SCRIPT_BYTES = 10_000
_INTERPRETER = re.compile(rb"#!(?:/bin/sh\n'''exec' )?\"?(/[^\s\"]*python[0-9.]*)\"?(?: \"\$0\" \"\$@\")?\n")
_MAIN = b"from torch.distributed.run import main"


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How a trial server is started, and for which trainings it serves: those with an equal command.

    `num_ranks` processes are forked for torchrun; 0 where the command is a rank itself. `assignments` are
    those of a leading `env`, which is not needed.
    """

    argv: tuple[str, ...]
    cwd: Path
    num_ranks: int
    assignments: Assignments
    environment_items: tuple[tuple[str, str], ...]
    given_items: tuple[tuple[str, str], ...]
    target: str
    is_module: bool
    on_cpu: bool
    entry: str = ENTRY_MODULE
    framework: str = "megatron"

    @property
    def environment(self) -> dict[str, str]:
        """The server's own environment."""
        return dict(self.environment_items)

    def request(self, argv: Sequence[str], *, env: Mapping[str, str]) -> ForkRequest:
        """The request for a launch of `argv` with the environment `env`."""
        program = 1 + len(self.assignments) if argv[0].rpartition("/")[2] == "env" else 0
        return ForkRequest(
            argv=tuple(argv[program:]),
            environment={**env, **dict(self.assignments)},
            num_ranks=self.num_ranks,
        )

    @property
    def preload(self) -> Preload:
        """The first message to the server."""
        return Preload(
            entry=self.entry,
            framework=self.framework,
            target=self.target,
            is_module=self.is_module,
            on_cpu=self.on_cpu,
            has_agent=self.num_ranks > 0,
            environment=dict(self.given_items),
        )


def server_command(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> ServerCommand | str:
    """The trial server for a wrapped command, or in words why it starts cold."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return "trial servers need Linux"
    try:
        command = parse_command(argv, environment=env, cwd=cwd)
    except ConfigError as error:
        return str(error)
    if reason := _cold_reason(command):
        return reason
    given = {**env, **dict(command.environment), ATTEMPT_ID: NO_ATTEMPT}
    interpreter = _interpreter(command, cwd=cwd, path=given.get("PATH"))
    if interpreter is None:
        return f"the interpreter of {command.program!r} is not known"
    options = _python_options(command)
    if options is None:
        return "a trial server does not support options of python"
    on_cpu = _option(command.arguments, DEVICE_FLAG) == "cpu"
    has_agent = command.starter == "torchrun"
    num_ranks = (command.num_processes or 0) if has_agent else 0
    server = dict(given)
    if num_ranks > 1:
        server.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it for ranks
    is_megatron = command.entry == ENTRY_MODULE
    if is_megatron and on_cpu and any(server.get(name) != value for name, value in CPU_SETTINGS.items()):
        server |= {**CPU_SETTINGS, CPU_REEXECUTED: "1"}  # what a rank of Megatron starts itself anew with
    return ServerCommand(
        (interpreter, *(("-u",) if has_agent else options), "-m", SERVER_MODULE),
        cwd,
        num_ranks,
        command.environment,
        tuple(sorted(server.items())),
        tuple(sorted(given.items())),
        command.target if command.is_module else str(cwd / command.target),
        command.is_module,
        on_cpu,
        command.entry,
        _FRAMEWORKS[command.entry],
    )


def _cold_reason(command: Command) -> str | None:
    """Why the processes of a command are none that a trial server can fork; None where they are."""
    if command.starter not in ("torchrun", "python"):
        name = command.program if command.starter == "other" else command.starter
        return f"{name} starts the processes itself"
    if command.entry not in _FRAMEWORKS or not command.is_wrapped:
        return "only ranks of Megatron and DeepSpeed are forked"
    if command.num_processes is None:
        return "the number of processes is left to the machine"
    if command.starter == "torchrun":
        first = command.words.index(command.program) + 1
        if Path(command.program).name != "torchrun":
            first = command.words.index("-m", first) + 2
        options = read_options(command.words, first, program="torchrun").values
        if "numa_binding" in options:
            return "torchrun --numa-binding starts the ranks by another program"
    return None


def _interpreter(command: Command, *, cwd: Path, path: str | None) -> str | None:
    """The Python that runs the command's ranks: its program, or the one that torchrun's script names."""
    program = program_path(command.program, cwd=cwd, path=path)
    if program is None or Path(program).name != "torchrun":
        return program
    try:
        content = Path(program).read_bytes()[:_MAX_SCRIPT_BYTES]
    except OSError:
        return None
    match = _INTERPRETER.match(content)
    return match[1].decode(errors="replace") if match and _MAIN in content else None


def _python_options(command: Command) -> tuple[str, ...] | None:
    """The options of python before its program, which may only be -u; None for others."""
    if Path(command.program).name == "torchrun":
        return ()
    begin = command.words.index(command.program) + 1
    options = command.words[begin : command.words.index("-m", begin)]
    return tuple(options) if set(options) <= {"-u"} else None


def _option(arguments: Sequence[str], flag: str) -> str | None:
    return next((value for name, value in pairwise(arguments) if name == flag), None)
