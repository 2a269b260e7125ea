"""The loop of a trial server: makes imports, and forks a process for every request, until the tuner ends."""

import contextlib
import os
import select
import socket
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

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
from quartet_plugin.rank.warm.agent import AgentUnknownError, check_agent, fork_ranks, run_agent
from quartet_plugin.rank.warm.import_checks import ImportChecks
from quartet_plugin.rank.warm.imports import LoadedFiles, UnsafeImportError, make_imports
from quartet_plugin.rank.warm.process_state import StartState

Task = Callable[[], object]


def serve(words: list[str]) -> Task | None:
    """Serve until the tuner has ended; in a forked process, return at once what it has to run."""
    channel = socket.socket(fileno=int(words[words.index(CHANNEL_FLAG) + 1]))
    left_out = [word for flag, word in pairwise(words) if flag == LEFT_OUT_FLAG]
    server = TrialServer(channel)
    try:
        if not server.prepare(left_out):
            return None
        return server.run()
    except (EOFError, ConnectionError):
        return None


class TrialServer:
    """One trial server; `prepare` makes its imports, `run` answers requests."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._children: dict[int, int] = {}  # pid -> its descriptor

    def prepare(self, left_out: list[str]) -> bool:
        """Make the imports, and say how they went; whether processes can be forked from here."""
        preload, _ = receive_record(self._channel)
        self._state = StartState(preload.environment)
        self._on_cpu = preload.on_cpu
        self._checks = ImportChecks()
        place = sys.path[0]
        if not preload.is_module:
            # Where a tree beside the script is the framework that it trains with.
            sys.path[0] = str(Path(preload.target).resolve().parent)
        try:
            make_imports(preload, self._checks, left_out=left_out)
            if preload.has_agent:
                check_agent()
                if fault := self._checks.fault(on_cpu=self._on_cpu):
                    raise UnsafeImportError(f"the import of torchrun {fault}")
        except (UnsafeImportError, AgentUnknownError) as error:
            unsafe = getattr(error, "module", None)
            send_record(self._channel, PreloadAnswer(refusal=str(error), unsafe=unsafe))
            return False
        sys.path[0] = place
        self._files = LoadedFiles()
        self._state.note_imports()
        send_record(self._channel, PreloadAnswer(refusal=None))
        return True

    def run(self) -> Task | None:
        """Answer requests until the tuner ends; in a forked process, return what it has to run."""
        while True:
            watched = [self._channel.fileno(), *self._children.values()]
            ready, _, _ = select.select(watched, [], [])
            self._report_ends()
            if self._channel.fileno() not in ready:
                continue
            request, descriptors = receive_record(self._channel)
            try:
                task = self._fork(request, descriptors)
            finally:
                for descriptor in descriptors:
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
            if task is not None:
                return task

    def _report_ends(self) -> None:
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                os.close(self._children.pop(pid))
                send_record(self._channel, ForkEnd(pid=pid, exit_code=os.waitstatus_to_exitcode(status)))

    def _fork(self, request: ForkRequest, output: list[int]) -> Task | None:
        """Fork the process of a request: there its task, here None, with the answer sent."""
        changed = self._files.changed()
        if changed is not None:
            send_record(self._channel, ForkAnswer(pid=None, refusal=f"{changed} has changed"))
            return None
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            send_record(self._channel, ForkAnswer(pid=None, refusal=f"no fork: {error.strerror}"))
            return None
        if pid == 0:
            return self._become(request, output)
        descriptor = os.pidfd_open(pid)
        self._children[pid] = descriptor
        send_record(self._channel, ForkAnswer(pid=pid), descriptors=(descriptor,))
        return None

    def _become(self, request: ForkRequest, output: list[int]) -> Task:
        os.setsid()
        self._channel.detach()
        log = output.pop()
        environment = request.environment
        is_rank = request.num_ranks == 0
        self._state.take_on(environment, output=(log, log), is_rank=is_rank)
        if is_rank:
            return lambda: self._state.run_module(request.argv)
        ranks = fork_ranks(request.num_ranks, self._state)
        if callable(ranks):
            return ranks
        return lambda: run_agent(request.argv, ranks)
