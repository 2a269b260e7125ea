"""The process of a trial on a node that a connection holds: runs what a request on its standard input says.

    python -m quartet_plugin.launchers.connected_node           # the first line of the input is the request
    python -m quartet_plugin.launchers.connected_node --end ID  # ends every process of an attempt here

ssh or an actor of Ray starts it. No value of the user's is on a command line, which ssh's shell would read.
The input stays open as long as the launcher lives: its end ends the command. Nothing beside the standard
library is imported.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quartet_plugin.launchers.node_task import ATTEMPT_ID, run, set_node_variables

# How the module is started on a node.
MODULE = "quartet_plugin.launchers.connected_node"
TERMINATE = b"terminate\n"
# The exit code of a command that ends with 255, by which ssh says that it has no connection.
OTHER_255 = 254
_GRACE_S, _END_S = 5.0, 30.0


def start_command(connection: "subprocess.Popen[bytes]", request: Mapping[str, Any], *, index: int) -> None:
    """Have the process behind `connection` run the request's command as node `index`."""
    content = {name: request[name] for name in ("argv", "env", "cwd", "nodes")} | {"index": index}
    send(connection, json.dumps(content).encode() + b"\n")


def send(connection: "subprocess.Popen[bytes]", content: bytes) -> None:
    """Write to a process that may have ended."""
    assert connection.stdin is not None
    with contextlib.suppress(OSError, ValueError):
        connection.stdin.write(content)
        connection.stdin.flush()


def close(connection: "subprocess.Popen[bytes]") -> None:
    """End the input of a process, which ends its command whatever that ignores."""
    assert connection.stdin is not None
    with contextlib.suppress(OSError):
        connection.stdin.close()


def follow_input(process: "subprocess.Popen[bytes]") -> None:
    """End the command when the launcher asks for it, and kill it when the launcher is gone."""
    # Not through Python's buffers: a thread that waits in them is an error when the interpreter ends.
    while os.read(0, len(TERMINATE)) == TERMINATE:
        process.terminate()
    if process.poll() is None:
        process.terminate()
        time.sleep(_GRACE_S)
    if process.poll() is None:
        process.kill()


def run_request() -> int:
    """Run the command of the request to its end."""
    request = json.loads(_first_line())
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    set_node_variables(os.environ, request["nodes"], request["index"])

    def started(process: "subprocess.Popen[bytes]") -> None:
        threading.Thread(target=follow_input, args=(process,), daemon=True).start()

    code = run(request["argv"], started=started)
    return OTHER_255 if code == 255 else code


def _first_line() -> bytes:
    """The first line of the standard input, and nothing behind it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(0, 1)
        if not part:
            raise SystemExit("connected_node: the launcher has sent no request")
        line += part
    return bytes(line)


def end_attempt(attempt_id: str) -> int:
    """Kill every process of the attempt on this host; 0 when none is left."""
    end = time.monotonic() + _END_S
    while pids := _marked(attempt_id):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= end:
            return 1
        time.sleep(0.05)
    return 0


def _marked(attempt_id: str) -> list[int]:
    """The processes of this user that carry the attempt's id, and what descends from them."""
    marked: set[int] = set()
    parents: dict[int, int] = {}
    mark = f"{ATTEMPT_ID}={attempt_id}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError, IndexError, ValueError):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state == "Z":
                    continue
                parents[int(folder.name)] = int(parent)
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    marked.add(int(folder.name))
    size = -1
    while len(marked) != size:
        size = len(marked)
        marked |= {pid for pid, parent in parents.items() if parent in marked}
    return sorted(marked - {os.getpid()})


def main(words: list[str]) -> int:
    """Run the request on the standard input, or with `--end ID` end that attempt; the exit code."""
    if words[:1] == ["--end"] and len(words) == 2 and re.fullmatch(r"[0-9a-f]{32}", words[1]):
        return end_attempt(words[1])
    return run_request()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
