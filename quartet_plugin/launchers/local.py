"""The start of a trial's processes on this machine, and the checks before it."""

import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import psutil

from quartet_plugin.errors import ConfigError, InfrastructureError, StorageError
from quartet_plugin.launchers.command import Command
from quartet_plugin.model.accelerator import shows_accelerator
from quartet_plugin.protocol.environment import CPU_SETTINGS


def resolve_device(
    device: Literal["auto", "cpu", "cuda"], *, environment: Mapping[str, str]
) -> Literal["cpu", "cuda"]:
    """`auto` is CUDA where the machine shows an accelerator that the environment does not hide."""
    if device != "auto":
        return device
    return "cuda" if shows_accelerator(environment) else "cpu"


def child_environment(device: Literal["cpu", "cuda"], *, environment: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment, with the settings that every CPU run needs alike."""
    return {**environment, **({**CPU_SETTINGS, "DS_ACCELERATOR": "cpu"} if device == "cpu" else {})}


def check_start(command: Command, *, cwd: Path, environment: Mapping[str, str]) -> None:
    """Look for the command's program and script before anything is written or started.

    Raises ConfigError for one that is not there.
    """
    known = {**environment, **dict(command.environment)}
    check_program(command.program, cwd=cwd, path=known.get("PATH"))
    if command.starter == "other":
        return
    if not command.is_module and not (cwd / command.target).exists():
        raise ConfigError(f"script {command.target!r}: not found from {cwd}; correct its path")


def check_one_node(command: Command) -> None:
    """Raise ConfigError for a command of several nodes: it is started on this node alone.

    A part of the command's nodes would train another job than the one to tune, check or profile.
    """
    if command.num_nodes == 1:
        return
    is_deepspeed = command.starter == "deepspeed"
    flag = "deepspeed --num_nodes" if is_deepspeed else "torchrun --nnodes"
    unknown = "left to a host file or --include" if is_deepspeed else "a range"
    raise ConfigError(
        f"{flag}: {command.num_nodes or unknown}; without --launcher quartet starts processes on this node "
        "only; add --launcher to `quartet tune`, or plan with a JOB.yaml (`quartet plan`) and train with "
        "`quartet train --plan PLAN.json --` before the command on every node"
    )


def program_path(program: str, *, cwd: Path, path: str | None) -> str | None:
    """The file that a command in `cwd` starts by the name `program`; None where there is none.

    `path` is the command's PATH; a name with a slash is a path from `cwd`, as for the system.
    """
    where = str(cwd / program) if os.sep in program else program
    return shutil.which(where, path=os.defpath if path is None else path)


def check_program(program: str, *, cwd: Path, path: str | None) -> None:
    """Raise ConfigError where a command in `cwd` does not find its program."""
    if program_path(program, cwd=cwd, path=path) is None:
        raise ConfigError(f"command {program!r}: not found; activate the environment that contains it")


def free_port() -> int:
    """A TCP port of this machine that nothing uses now. Raises InfrastructureError when there is none."""
    try:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise InfrastructureError(f"no free TCP port: {error.strerror}; close other programs") from error


def open_output(path: Path) -> int:
    """A descriptor of the new file `path`, to be appended to. Raises StorageError when it cannot be made."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        raise StorageError(f"{path}: cannot be created: {error.strerror}") from error


class LocalLauncher:
    """Starts commands on this machine, each in its own session, so that Ctrl-C reaches only the tuner.

    The output goes straight to the file: a pipe would end the processes when the tuner dies.
    """

    num_nodes = 1
    engine: str | None = None

    def start(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdout: Path
    ) -> subprocess.Popen[bytes]:
        """Start `argv`. Raises ConfigError for a program that is not there, InfrastructureError for one
        that cannot start, StorageError when `stdout` cannot be made.
        """
        check_program(argv[0], cwd=cwd, path=env.get("PATH"))
        output = open_output(stdout)
        try:
            return self.spawn(argv, env=env, cwd=cwd, output=output)
        finally:
            os.close(output)

    def environment_of(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment that a command which is started with `env` really gets."""
        return dict(env)

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        output: int,
        descriptors: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Start `argv` with its output going to the descriptor `output`, and `descriptors` left open in it.

        Raises InfrastructureError where it cannot start.
        """
        try:
            process = subprocess.Popen(
                list(argv),
                env=self.environment_of(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(descriptors),
            )
        except OSError as error:
            raise InfrastructureError(f"command {argv[0]!r}: cannot start: {error.strerror}") from error
        _forbid_core_files(process.pid)
        return process


def _forbid_core_files(pid: int) -> None:
    """A hung trial is asked for its stacks with SIGABRT; that must not fill the disk."""
    try:
        _, most = psutil.Process(pid).rlimit(resource.RLIMIT_CORE)
        psutil.Process(pid).rlimit(resource.RLIMIT_CORE, (0, most))
    except (psutil.Error, OSError, AttributeError):
        pass  # not every system has prlimit
