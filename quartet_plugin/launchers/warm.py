"""Warm starts: a launcher whose processes are forked from a trial server that has made their imports.

The server is started by another launcher, on its slice of the machine, when a first trial needs it; it ends
with the tuner. Where it cannot stand in for a start, the other launcher starts the command as ever, and the
record of the start says why.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quartet_plugin.errors import ConfigError, InfrastructureError
from quartet_plugin.launchers.local import LocalLauncher, open_output
from quartet_plugin.launchers.protocol import Handle
from quartet_plugin.launchers.server_command import ServerCommand, server_command
from quartet_plugin.protocol.trial_server import (
    CHANNEL_FLAG,
    LEFT_OUT_FLAG,
    ForkAnswer,
    ForkEnd,
    ForkRequest,
    PreloadAnswer,
    receive_record,
    send_record,
)

# Imports of a large framework from a slow disk; what takes longer is started cold from then on.
IMPORT_LIMIT_S = 600.0
_ANSWER_LIMIT_S = 30.0
_END_LIMIT_S = 5.0
_POLL_S = 0.05
# Imports of the user's that are left to the ranks, and servers that are lost, before it is given up.
_MAX_LEFT_OUT = 5
_MAX_LOST = 3
_UNKNOWN_EXIT = 1

ShouldStop = Callable[[], bool]
# Of a command's words, environment and folder: the server, or why there is none.
CommandOf = Callable[..., ServerCommand | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """How a command was started; `cold_reason` says why not from a trial server.

    Before it `import_s` seconds were spent on imports for this start and later ones.
    """

    is_warm: bool
    cold_reason: str | None = None
    import_s: float = 0.0


class _ServerLostError(Exception):
    """The trial server has ended, or does not answer."""


class TrialServerClient:
    """A started trial server. Raises `_ServerLostError` from every call after it was lost."""

    def __init__(self, command: ServerCommand, launcher: LocalLauncher, *, left_out: Sequence[str]) -> None:
        self.command = command
        self.is_lost = False
        self._ends: dict[int, int] = {}
        self._channel, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        flags = [word for name in left_out for word in (LEFT_OUT_FLAG, name)]
        try:
            with theirs:
                self._process = launcher.spawn(
                    [*command.argv, CHANNEL_FLAG, str(theirs.fileno()), *flags],
                    env=command.environment,
                    cwd=command.cwd,
                    output=self._output.fileno(),
                    descriptors=[theirs.fileno()],
                )
        except BaseException:
            self._channel.close()
            self._output.close()
            raise

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def preload(self, *, should_stop: ShouldStop) -> PreloadAnswer | None:
        """Let it make the imports, and wait; None where the wait was ended by the user."""
        end = time.monotonic() + IMPORT_LIMIT_S
        with self._losing():
            send_record(self._channel, self.command.preload)
            while not self._is_readable(_POLL_S):
                if should_stop():
                    return None
                if time.monotonic() > end:
                    raise TimeoutError
            answer = self._receive(PreloadAnswer)[0]
            assert isinstance(answer, PreloadAnswer)
            return answer

    def fork(self, request: ForkRequest, *, output: int) -> tuple[ForkAnswer, int | None]:
        """Fork the process of a request: the answer, with a descriptor of the process where there is one."""
        with self._losing():
            send_record(self._channel, request, descriptors=(output,))
            answer, descriptors = self._receive(ForkAnswer)
            assert isinstance(answer, ForkAnswer)
            return answer, descriptors[0] if descriptors else None

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a process that was forked; None where the server has not reported its end."""
        with self._losing():
            while self._is_readable(0.0):
                self._receive(ForkEnd)
        return self._ends.pop(pid, None)

    def last_line(self) -> str:
        """The last line that the server printed."""
        with contextlib.suppress(OSError, ValueError):
            self._output.seek(0)
            lines = self._output.read().decode(errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""

    def close(self) -> None:
        """End the server, at once where it is at work; the processes that it has forked go on."""
        self.is_lost = True
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def _is_readable(self, limit_s: float) -> bool:
        return bool(select.select([self._channel], [], [], limit_s)[0])

    def _receive(self, kind: type[Any]) -> tuple[Any, list[int]]:
        """The next message of a kind; ends of processes that come before it are noted."""
        while True:
            message, descriptors = receive_record(self._channel)
            if isinstance(message, ForkEnd):
                self._ends[message.pid] = message.exit_code
            if isinstance(message, kind):
                return message, descriptors

    @contextlib.contextmanager
    def _losing(self) -> Any:
        if self.is_lost:
            raise _ServerLostError
        self._channel.settimeout(_ANSWER_LIMIT_S)
        try:
            yield
        except (EOFError, OSError, ConfigError) as error:
            self.is_lost = True
            raise _ServerLostError from error


class WarmHandle:
    """A process that a trial server has forked; the server's end does not end it."""

    def __init__(self, pid: int, descriptor: int, server: TrialServerClient) -> None:
        self.pid = pid
        self._descriptor = descriptor
        self._server = server
        self._exit_code: int | None = None
        self._ended_at_s: float | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs, 1 if its end was not observed."""
        if self._exit_code is None:
            try:
                self._exit_code = self._server.exit_code(self.pid)
            except _ServerLostError:
                self._exit_code = self._code_without_server()
            if self._exit_code is None and self._has_ended() and not self._server.is_lost:
                self._await_server()
        return self._exit_code

    def terminate(self) -> None:
        """SIGTERM, unless it has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def _has_ended(self) -> bool:
        return bool(select.select([self._descriptor], [], [], 0.0)[0])

    def _await_server(self) -> None:
        """Close the server if it does not say for a while how the process has ended."""
        now = time.monotonic()
        self._ended_at_s = now if self._ended_at_s is None else self._ended_at_s
        if now - self._ended_at_s > _END_LIMIT_S:
            self._server.close()

    def _code_without_server(self) -> int | None:
        if not self._has_ended():
            return None
        # A child of this process since the server's end, where this process takes in orphans.
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            return os.waitstatus_to_exitcode(status) if pid else None
        return _UNKNOWN_EXIT

    def __del__(self) -> None:
        """Give the descriptor back."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


class WarmLauncher:
    """Starts commands on this machine from a trial server, if that is equivalent to a new process."""

    num_nodes = 1
    engine: str | None = None

    def __init__(self, cold: LocalLauncher | None = None, *, command_of: CommandOf = server_command) -> None:
        """`cold` starts the server, whose command `command_of` makes, and what that cannot start."""
        self._cold = cold or LocalLauncher()
        self._command_of = command_of
        self._server: TrialServerClient | None = None
        self._refusals: dict[ServerCommand, str] = {}
        self._num_lost = 0
        self._reason: str | None = None
        self._import_s = 0.0
        self.latest = StartRecord(is_warm=False)

    @property
    def server_pid(self) -> int | None:
        """The process id of the trial server; None where none runs."""
        return None if self._server is None or self._server.is_lost else self._server.pid

    def prepare(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        should_stop: ShouldStop = lambda: False,
    ) -> None:
        """Have a server ready that can start `argv`, or know why there is none."""
        self._reason = None
        command = self._command_of(argv, env=self._cold.environment_of(env), cwd=cwd)
        if isinstance(command, str):
            self._reason = command
            return
        if self._server is not None and (self._server.is_lost or self._server.command != command):
            self._num_lost += self._server.is_lost
            self.close()
        if self._num_lost >= _MAX_LOST:
            self._refusals.setdefault(command, f"{_MAX_LOST} trial servers were lost")
        self._reason = self._refusals.get(command)
        if self._server is None and self._reason is None:
            self._reason = self._start_server(command, should_stop=should_stop)

    def _start_server(self, command: ServerCommand, *, should_stop: ShouldStop) -> str | None:
        """Start a server and let it make the imports; why there is none, None where there is."""
        left_out: list[str] = []
        begin = time.monotonic()
        while True:
            try:
                self._server = TrialServerClient(command, self._cold, left_out=left_out)
                answer = self._server.preload(should_stop=should_stop)
            except InfrastructureError as error:
                return str(error)
            except _ServerLostError:
                assert self._server is not None
                reason = f"the trial server ended in its imports: {self._server.last_line()}"
                self.close()
                return self._refusals.setdefault(command, reason)
            self._import_s = time.monotonic() - begin
            if answer is not None and answer.refusal is None:
                return None
            self.close()
            if answer is None:
                return "the tuner was told to stop"
            if answer.unsafe is None or len(left_out) >= _MAX_LEFT_OUT:
                return self._refusals.setdefault(command, answer.refusal or "")
            left_out.append(answer.unsafe)

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdout: Path) -> Handle:
        """See `launchers.protocol.Launcher`; `latest` says how it was started."""
        self.prepare(argv, env=env, cwd=cwd)
        handle: Handle | None = None
        if self._server is not None and self._reason is None:
            output = open_output(stdout)
            try:
                handle = self._forked(argv, env=env, cwd=cwd, output=output)
            finally:
                os.close(output)
            if handle is None:
                stdout.unlink(missing_ok=True)
        import_s, self._import_s = self._import_s, 0.0
        if handle is None:
            handle = self._cold.start(argv, env=env, cwd=cwd, stdout=stdout)
        self.latest = StartRecord(
            is_warm=isinstance(handle, WarmHandle), cold_reason=self._reason, import_s=import_s
        )
        return handle

    def _forked(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, output: int
    ) -> WarmHandle | None:
        """The forked process, from a server with the imports of now; None with the reason noted."""
        for is_last in (False, True):
            server = self._server
            if server is None:
                return None
            request = server.command.request(argv, env=self._cold.environment_of(env))
            try:
                answer, descriptor = server.fork(request, output=output)
            except _ServerLostError:
                self._num_lost += 1
                self._reason = "the trial server was lost"
            else:
                if answer.pid is not None and descriptor is not None:
                    return WarmHandle(answer.pid, descriptor, server)
                self._reason = f"the trial server refused: {answer.refusal}"
            self.close()
            if not is_last:
                self.prepare(argv, env=env, cwd=cwd)
        return None

    def close(self) -> None:
        """End the server. Processes that it has forked go on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def __enter__(self) -> Self:
        """Enter the block without a server: the first start makes it."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End the server."""
        self.close()
