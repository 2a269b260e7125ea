"""torchrun in a forked process: its own code starts the ranks, each in a process forked before it began.

torchrun's agent runs threads, so no rank can be forked from it later. A waiting rank becomes a rank when the
agent would start a program for it, with the same words, environment, output and session; the agent waits for
it and ends it as any other child. Ranks of a restart are started cold.
"""

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from quartet_plugin.protocol.trial_server import RankStart, receive_record, send_record
from quartet_plugin.rank.warm.process_state import StartState, close_descriptors

_POLL_S = 0.01

Task = Callable[[], object]


class AgentUnknownError(Exception):
    """This release of torch starts its ranks in another way."""


def check_agent() -> None:
    """Import torchrun. Raises AgentUnknownError where its ranks cannot be started from here."""
    try:
        import torch.distributed.elastic.agent.server.local_elastic_agent
        import torch.distributed.run  # noqa: F401
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    except ImportError as error:
        raise AgentUnknownError(f"torchrun cannot be imported ({error})") from error
    if not callable(getattr(subprocess_handler.SubprocessHandler, "_popen", None)):
        raise AgentUnknownError(f"torch {sys.modules['torch'].__version__}'s launcher is not known")


class WaitingRank:
    """A forked process that waits to become a rank; with the methods of Popen that torchrun uses."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._channel = channel

    def begin(self, argv: Sequence[str], environment: Mapping[str, str], *, output: tuple[int, int]) -> None:
        """Let it become the rank with this command line."""
        with self._channel:
            start = RankStart(argv=tuple(argv), environment=dict(environment))
            send_record(self._channel, start, descriptors=output)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended. Raises TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Signal the process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        self.send_signal(signal.SIGKILL)


def fork_ranks(count: int, state: StartState) -> Task | list[WaitingRank]:
    """Fork `count` processes: each gets what it runs as its task, this process the list of them.

    None of them is left where one cannot be forked. Raises OSError.
    """
    waiting: list[WaitingRank] = []
    for _ in range(count):
        agent_end, rank_end = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            agent_end.close()
            close_descriptors(keep=[rank_end.fileno()])
            return lambda: _wait_and_run(rank_end, state)
        rank_end.close()
        waiting.append(WaitingRank(pid, agent_end))
    return waiting


def _wait_and_run(channel: socket.socket, state: StartState) -> None:
    try:
        start, output = receive_record(channel)
    except EOFError:
        os._exit(0)  # torchrun has ended before it needed this rank
    channel.close()
    state.take_on(start.environment, output=output, is_rank=True)
    state.run_module(start.argv)


def run_agent(argv: Sequence[str], waiting: list[WaitingRank]) -> NoReturn:
    """Run torchrun with the words of a command line; its ranks are those that wait."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.run import main

    start_cold = subprocess_handler.SubprocessHandler._popen

    def start(handler: Any, args: Sequence[str], env: Mapping[str, str]) -> Any:
        if not waiting or args[0] != sys.executable or "-m" not in args:
            return start_cold(handler, args, env)
        rank = waiting.pop(0)
        output = tuple(
            number if stream is None else stream.fileno()
            for number, stream in ((1, handler._stdout), (2, handler._stderr))
        )
        rank.begin(args, env, output=output)  # type: ignore[arg-type]
        return rank

    subprocess_handler.SubprocessHandler._popen = start
    words = list(argv)
    if "-m" in words[:3] and words[words.index("-m") + 1].startswith("torch.distributed."):
        words = words[words.index("-m") + 1 :]
        words[0] = str(sys.modules["torch.distributed.run"].__file__)
    elif program := shutil.which(words[0]):
        words[0] = program
        sys.path[0] = str(Path(program).parent)
    sys.argv[:] = words
    sys.orig_argv[:] = list(argv)
    sys.excepthook = _show_without_our_frames
    main()
    _end_at_once()


def _end_at_once() -> NoReturn:
    """Run what an interpreter runs at its end, and end without freeing what the server's imports made.

    To free it would take some tenths of a second in every launch.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _show_without_our_frames(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an error's traceback from torchrun's own code on, like a newly started torchrun."""
    begin = trace
    while begin is not None and begin.tb_frame.f_globals.get("__name__", "").partition(".")[0] != "torch":
        begin = begin.tb_next
    sys.__excepthook__(kind, error.with_traceback(begin or trace), begin or trace)
