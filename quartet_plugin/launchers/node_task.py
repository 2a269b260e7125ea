"""The process of a trial on one of its nodes: starts the command there, and ends all that it has started.

    python -m quartet_plugin.launchers.node_task -- ARGV...

The engine starts it once on each node. It sets the variables by which torchrun and scripts know their node
(`PET_*`, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT), becomes the parent of each descendant that loses its
own, passes signals on, and kills what is left when the command has ended. It imports nothing beside the
standard library: where it runs, only the command's own environment needs to be.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from types import FrameType

# The names of the trial's nodes in their order, comma-separated, and this node's place in them.
NODES, NODE_INDEX = "QUARTET_NODES", "QUARTET_NODE_INDEX"
ATTEMPT_ID = "QUARTET_ATTEMPT_ID"

_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
_PR_SET_CHILD_SUBREAPER = 36
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# The exit code of a command that fails because somebody has asked for its end.
TERMINATED_EXIT = 128 + signal.SIGTERM
_KILL_S = 5.0
# Whoever ends a job may signal its processes one after the other, children first: the command may have ended
# before the signal is here.
_LATE_SIGTERM_S, _POLL_S = 0.5, 0.02


def nodes_of_step(environment: MutableMapping[str, str]) -> tuple[list[str], int]:
    """The trial's nodes and this one's index: from the engine, else from Slurm's step."""
    names = environment.get(NODES)
    if names:
        return names.split(","), int(environment[NODE_INDEX])
    listed = subprocess.run(
        ["scontrol", "show", "hostnames", environment["SLURM_STEP_NODELIST"]],  # noqa: S607  # as Slurm's own
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return listed.stdout.split(), int(environment["SLURM_PROCID"])


def set_node_variables(environment: MutableMapping[str, str], names: Sequence[str], index: int) -> None:
    """Say in `environment` where the node stands among `names`.

    Options of torchrun's own command line go before its variables, so a command that names them keeps them.
    Slurm's variables of the job are those of the trial's nodes: a script reads them for the whole.
    """
    number = str(len(names))
    environment.update(
        {
            NODES: ",".join(names),
            NODE_INDEX: str(index),
            "PET_NNODES": number,
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": names[0],
            "NNODES": number,
            "NODE_RANK": str(index),
            "MASTER_ADDR": names[0],
        }
    )
    if "SLURM_JOB_ID" in environment:
        environment.update(dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), number))
        environment.update(dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST"), ",".join(names)))
        environment["SLURM_NODEID"] = str(index)
    attempt_id = environment.get(ATTEMPT_ID, "0")[-8:]
    port = _FIRST_PORT + int(attempt_id, 16) % _NUM_PORTS
    for name in ("MASTER_PORT", "PET_MASTER_PORT"):
        environment.setdefault(name, str(port))


def run(argv: Sequence[str], *, started: Callable[["subprocess.Popen[bytes]"], None] | None = None) -> int:
    """Run the command to its end and kill what it leaves; its exit code, 128 and a signal's number.

    The command gets the signals of this process. Where it fails after a SIGTERM the code is TERMINATED_EXIT.
    `started` is called with the command's process.
    """
    is_terminated = False
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(list(argv), stdin=subprocess.DEVNULL)
    if started is not None:
        started(process)

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal is_terminated
        del frame
        is_terminated = is_terminated or number == signal.SIGTERM
        if process.poll() is None:
            process.send_signal(number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    code = process.wait()
    end = time.monotonic() + _LATE_SIGTERM_S
    while code and not is_terminated and time.monotonic() < end:
        time.sleep(_POLL_S)
    _kill_rest()
    if is_terminated and code:
        return TERMINATED_EXIT
    return code if code >= 0 else 128 - code


def _kill_rest() -> None:
    """Kill and collect every descendant that is left: each becomes a child in its turn."""
    end = time.monotonic() + _KILL_S
    while time.monotonic() < end:
        children = _children()
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _children() -> list[int]:
    """The children of this process that are not collected, whatever session they are in."""
    children = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == os.getpid():
                    children.append(int(folder.name))
    return children


def main(words: Sequence[str]) -> int:
    """Start the command that follows `--` on this node."""
    if not words or words[0] != "--" or len(words) < 2:
        sys.stderr.write("node_task: no command behind --\n")
        return 2
    names, index = nodes_of_step(os.environ)
    set_node_variables(os.environ, names, index)
    return run(words[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
