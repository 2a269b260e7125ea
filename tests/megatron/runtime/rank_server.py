"""Forks the ranks of `rank_with_schedule.py` from a process that has made their imports.

A test of two to eight ranks would import torch and Megatron in each of them, which takes longer than what it
trains. `python -m tests.megatron.runtime.rank_server FLAG...` prepares a process as the flags ask for it
(`rank_with_schedule.prepare`), and answers each request, a line of JSON, with the exit code of its ranks.
"""

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.megatron.argument_docs import keep_argument_docs
from tests.megatron.runtime import rank_with_schedule
from tests.megatron.support import PRETRAIN_SCRIPT, REPOSITORY, rank_environment
from tests.ports import free_port

_POLL_S = 0.02
# For the other ranks to fail by themselves, whose lines say what they were at.
_PEERS_S = 5.0
TIMED_OUT = 124


class RankServer:
    """A started server for trainings whose flags need the same preparation."""

    def __init__(self, flags: Sequence[str]) -> None:
        """`flags` are those that `rank_with_schedule.preparation` gives."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.megatron.runtime.rank_server", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=rank_environment() | {"PYTHONFAULTHANDLER": "1"},
            cwd=REPOSITORY,
            start_new_session=True,
        )

    def run(
        self,
        words: Sequence[str],
        *,
        num_processes: int,
        timeout_s: float,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> tuple[int, str]:
        """Train in forked ranks, which get `environment` too: their exit code and output.

        The code is the first that is not 0, TIMED_OUT, or 0.
        """
        request = {"words": list(words), "ranks": num_processes, "port": free_port()}
        request |= {"timeout_s": timeout_s, "log": str(log), "environment": dict(environment or {})}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the rank server ended with exit code {self._process.wait()}"
        return int(answer), log.read_text(errors="replace")

    def close(self) -> None:
        """End the server and what it has forked."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def main() -> None:
    """Make the imports, then serve."""
    answers = os.fdopen(os.dup(1), "w")
    # What is printed besides.
    os.dup2(2, 1)
    rank_with_schedule.prepare(sys.argv[1:])
    # Its imports alone: the script trains under another name.
    runpy.run_path(str(PRETRAIN_SCRIPT), run_name="imported")
    rank_with_schedule.import_runtime()
    keep_argument_docs()
    assert threading.active_count() == 1, "threads are not forked"
    for line in sys.stdin:
        request = json.loads(line)
        print(_train(request), file=answers, flush=True)


def _train(request: Mapping[str, Any]) -> int:
    """The exit code of all ranks of a request; none of them is left."""
    size = request["ranks"]
    ranks = {}
    for rank in range(size):
        environment = {
            **request["environment"],
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(request["port"]),
        }
        ranks[_fork(environment, request)] = rank
    end_s, code = time.monotonic() + request["timeout_s"], 0
    while ranks and time.monotonic() < end_s:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(_POLL_S)
            continue
        rank, ended = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if ended != 0 and code == 0:
            code, end_s = ended, min(end_s, time.monotonic() + _PEERS_S)
            with Path(request["log"]).open("a") as log:
                print(f"rank {rank} ended with exit code {ended}", file=log)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return code or (TIMED_OUT if ranks else 0)


def _fork(environment: Mapping[str, str], request: Mapping[str, Any]) -> int:
    """The process id of a new rank; does not return in the rank itself."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ |= environment
        rank_with_schedule.train(request["words"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        print(error, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
