"""The process of a trial on a node that an engine starts by a command line: reads a shared folder.

    python -m quartet_plugin.launchers.shared_node REQUEST.json
    python -m quartet_plugin.launchers.shared_node --hex 2F72657175...

For engines that start the same command line on every node and hold no connection to it (Kubernetes,
NeMo-Run). No value of the user's command is on that line. All that the nodes and the launcher tell one
another are files beside the request, made whole by a rename or a link: each node says that it has begun, and
is never begun a second time; the first one that fails ends the others. Nothing beside the standard library
is imported.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from quartet_plugin.launchers.node_task import TERMINATED_EXIT, run, set_node_variables

# The request, and the files beside it: {} is a node's index.
REQUEST_FILE = "request.json"
BEGUN_FILE, EXIT_FILE, OUTPUT_FILE = "begun-{}.json", "exit-{}.json", "output-{}.log"
# Made by the nodes whose part has failed: one file, so that a look costs the same on any number of nodes.
FAILED_FILE = "failed"
# Made by the launcher: the command is asked to end, or is killed.
TERMINATE_FILE, KILL_FILE = "terminate", "kill"
# Exit codes of a node that does not see the request (sysexits(3), EX_CONFIG), or has been started before.
NOT_SEEN_EXIT, BEGUN_BEFORE_EXIT, STOPPED_EXIT = 78, 79, TERMINATED_EXIT
# An engine's own variables of its ranks, which are set anew for those of the command. A name that ends with _
# stands for all that begin with it.
OF_THE_RANKS = (
    "PET_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NNODES",
    "NODE_RANK",
)
# Variables of the node that the launcher's environment does not replace.
OF_THE_NODE = (
    "KUBERNETES_",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_REQUIRE_",
    "CUDA_VISIBLE_DEVICES",
    "HOSTNAME",
    "SLURM_",
    "SLURMD_",
    "PMI_",
    "PMIX_",
    "JOB_COMPLETION_",
)
_SEE_S, _POLL_S, _GRACE_S = 30.0, 0.2, 5.0
# Above this number of nodes each looks less often, so that the file server is asked no more often in all.
_MANY_NODES, _MAX_POLL_S = 256, 1.0
# What is kept of the output of a node that is not the first; the engine's own log has all of it.
_MAX_OUTPUT_BYTES = 2**24


def read_request(path: Path, *, limit_s: float = _SEE_S) -> dict[str, Any] | None:
    """The request; None where it is not there in time: a shared folder may be late."""
    end = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError):
            content: dict[str, Any] = json.loads(path.read_bytes())
            return content
        if time.monotonic() >= end:
            return None
        time.sleep(_POLL_S)


class NodePart:
    """The command of one request on node `index`."""

    def __init__(self, request: Mapping[str, Any], folder: Path, index: int) -> None:
        self._request, self._folder, self._index = request, folder, index
        self._is_stopped = False
        self._poll_s = min(_MAX_POLL_S, _POLL_S * max(1.0, request["num_nodes"] / _MANY_NODES))

    def run(self) -> int:
        """The command's exit code, which the exit file holds too."""
        signal.signal(signal.SIGTERM, self._stop)
        if not self._begin():
            print("shared_node: this node of the attempt was already started", flush=True)
            return BEGUN_BEFORE_EXIT
        names = self._meet()
        code = STOPPED_EXIT if names is None else self._run_command(names)
        if code:
            (self._folder / FAILED_FILE).touch()
        _write(self._folder / EXIT_FILE.format(self._index), {"code": code})
        if self._index == 0 and not code:
            self._await_others()
        return code

    def _await_others(self) -> None:
        """Wait for the other nodes: an engine may end them when the first one has ended."""
        signal.signal(signal.SIGTERM, self._stop)
        self._await_files(EXIT_FILE)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._is_stopped = True

    def _begin(self) -> bool:
        """Say that the node runs; False where it has said so before."""
        path = self._folder / BEGUN_FILE.format(self._index)
        part = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
        part.write_text(json.dumps({"name": _name(self._request["names"]), "host": socket.gethostname()}))
        try:
            os.link(part, path)
        except FileExistsError:
            return False
        finally:
            part.unlink()
        return True

    def _meet(self) -> list[str] | None:
        """The names of all nodes once each has begun; None where the attempt is ended before."""
        paths = self._await_files(BEGUN_FILE)
        return None if paths is None else [json.loads(path.read_bytes())["name"] for path in paths]

    def _await_files(self, name: str) -> list[Path] | None:
        """This file of every node once each has made it; None where the attempt is ended before."""
        paths = [self._folder / name.format(index) for index in range(self._request["num_nodes"])]
        for path in paths:
            while not is_there(path):
                if self._is_stopped or self._is_to_end():
                    return None
                time.sleep(self._poll_s)
        return paths

    def _run_command(self, names: list[str]) -> int:
        environment = {**_kept_environment(), **self._request["env"]}
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(self._request["cwd"])
        set_node_variables(os.environ, names, self._index)
        with _copied_output(self._output):
            try:
                return run(self._request["argv"], started=self._started)
            except OSError as error:
                print(f"{self._request['argv'][0]}: cannot start: {error.strerror}", flush=True)
                return 127

    @property
    def _output(self) -> Path:
        return (
            self._folder / OUTPUT_FILE.format(self._index) if self._index else Path(self._request["stdout"])
        )

    def _started(self, process: "subprocess.Popen[bytes]") -> None:
        if self._is_stopped:
            process.terminate()
        threading.Thread(target=self._follow, args=(process,), daemon=True).start()

    def _follow(self, process: "subprocess.Popen[bytes]") -> None:
        """End the command where the launcher asks for it, or within seconds where another node has failed."""
        asked_s: float | None = None
        while process.poll() is None:
            if self._has(KILL_FILE):
                process.kill()
            if asked_s is None and self._is_to_end():
                asked_s = time.monotonic()
                process.terminate()
            elif asked_s is not None and time.monotonic() > asked_s + _GRACE_S and not self._is_asked():
                process.kill()
            time.sleep(self._poll_s)

    def _is_asked(self) -> bool:
        """Whether the launcher asks for the end, which it waits for: the command takes its time."""
        return self._has(TERMINATE_FILE)

    def _is_to_end(self) -> bool:
        return any(map(self._has, (TERMINATE_FILE, KILL_FILE, FAILED_FILE)))

    def _has(self, name: str) -> bool:
        return is_there(self._folder / name)


def is_there(path: Path) -> bool:
    """Whether the file is there; False also while the file server fails, where `Path.exists` raises."""
    return os.path.exists(path)  # noqa: PTH110


def exit_code(path: Path) -> int | None:
    """The code in a node's exit file; None as long as there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return int(json.loads(path.read_bytes())["code"])
    return None


def _write(path: Path, content: Mapping[str, Any]) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(content))
    part.rename(path)


def _name(kind: str) -> str:
    """The address by which other nodes reach this node, or its host name."""
    host = socket.gethostname()
    if kind == "address":
        with contextlib.suppress(OSError):
            return socket.gethostbyname(host)
    return host


def _kept_environment() -> dict[str, str]:
    """The node's variables without those with which its engine identifies its own ranks."""
    return {name: value for name, value in os.environ.items() if not is_among(name, OF_THE_RANKS)}


def is_among(name: str, names: Sequence[str]) -> bool:
    """Whether a variable is one of `names`, or begins with one that ends with _."""
    return any(name.startswith(known) if known.endswith("_") else name == known for known in names)


@contextlib.contextmanager
def _copied_output(path: Path) -> Iterator[None]:
    """Standard output and error go into the file `path` too."""
    inner, outer = os.pipe()
    before = [os.dup(number) for number in (1, 2)]
    for number in (1, 2):
        os.dup2(outer, number)
    os.close(outer)
    copier = threading.Thread(target=_copy, args=(inner, before[0], path), daemon=True)
    copier.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        for number, descriptor in zip((1, 2), before, strict=True):
            os.dup2(descriptor, number)
        # What has lost its parent, and could still hold the pipe, is dead by now.
        copier.join(_GRACE_S)


def _copy(inner: int, outer: int, path: Path) -> None:
    number_bytes, is_first = 0, not path.name.startswith("output-")
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    while content := os.read(inner, 2**16):
        # A full disk, or a pod whose log is closed, must not end the command.
        with contextlib.suppress(OSError):
            os.write(outer, content)
        number_bytes += len(content)
        if is_first or number_bytes <= _MAX_OUTPUT_BYTES:
            with contextlib.suppress(OSError):
                os.write(file, content)
    os.close(file)


def node_index(variables: Sequence[str], environment: Mapping[str, str]) -> int:
    """The index of this node, from the first variable of an engine that is set."""
    return next((int(environment[name]) for name in variables if name in environment), 0)


def main(words: list[str], *, see_s: float = _SEE_S) -> int:
    """Run this node's part of the request."""
    # In hexadecimal digits where an engine puts the words together for a shell.
    path = Path(os.fsdecode(bytes.fromhex(words[1])) if words[0] == "--hex" else words[0])
    request = read_request(path, limit_s=see_s)
    if request is None:
        print(
            f"shared_node: this node does not see {path}: mount the folder of the run under this path",
            flush=True,
        )
        return NOT_SEEN_EXIT
    index = node_index(request["index_variables"], os.environ)
    return NodePart(request, path.parent, index).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
