"""`examples/pretrain_gpt.py` on chosen cores and in chosen network namespaces; otherwise untouched.

The environment says where the process with LOCAL_RANK i goes, so a permuted mapping moves RANKs over devices
that stay: SCENARIO_CORES="0,1,1" pins it, after the imports, which pinned processes do slowly;
SCENARIO_NAMESPACES="quartet-a,quartet-b" and SCENARIO_ADDRESS (of the first) move it;
SCENARIO_SLOWDOWN="1,2" stops it for half of every few milliseconds. With SCENARIO_TURNS,
the address of a socket, it trains only when it is let through, STEPS steps at a time (`turns.py`); while it
waits it is not stopped, which would take time from the job whose turn it is.
"""

import contextlib
import json
import mmap
import os
import runpy
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 3
PERIOD_S = 0.008


def _mine(name: str) -> str | None:
    words = [word for word in os.environ.get(name, "").split(",") if word]
    return words[int(os.environ.get("LOCAL_RANK", "0"))] if words else None


def _enter(namespace: str) -> None:
    """Only this thread and those it makes: gloo's are made later."""
    with Path("/run/netns", namespace).open("rb") as file:
        os.setns(file.fileno(), os.CLONE_NEWNET)
    os.environ["MASTER_ADDR"] = os.environ["SCENARIO_ADDRESS"]
    os.environ["GLOO_SOCKET_IFNAME"] = f"{namespace}-0"


def slow_down(factor: float, at_work: mmap.mmap) -> None:
    """Have a child process stop this one for 1 - 1 / factor of every PERIOD_S seconds, until it ends.

    Only while the one byte of `at_work`, memory that both share, is not 0.
    """
    parent = os.getpid()
    if os.fork():
        return
    while os.getppid() == parent:
        if not at_work[0]:
            time.sleep(PERIOD_S)
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent, signal.SIGSTOP)
            time.sleep(PERIOD_S * (1.0 - 1.0 / factor))
            os.kill(parent, signal.SIGCONT)
        time.sleep(PERIOD_S / factor)
    os._exit(0)


def in_turns(
    train_step: Callable[..., Any],
    *,
    address: str,
    job: str,
    steps: int = STEPS,
    at_work: mmap.mmap | None = None,
) -> Callable[..., Any]:
    """`train_step`, which waits before every `steps` steps and tells how long each of the last ones took.

    The byte of `at_work` is 0 while it waits, and 1 otherwise.
    """
    at_work = at_work or mmap.mmap(-1, 1)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    steps_s: list[float] = []

    def tell(value: object) -> None:
        connection.sendall(json.dumps(value).encode() + b"\n")

    def waiting_train_step(*args: Any, **kwargs: Any) -> Any:
        if len(steps_s) % steps == 0:
            tell(steps_s)
            steps_s.clear()
            at_work[0] = 0
            connection.recv(16)
            at_work[0] = 1
        start = time.perf_counter()
        results = train_step(*args, **kwargs)
        steps_s.append(time.perf_counter() - start)
        return results

    tell(job)
    return waiting_train_step


if __name__ == "__main__":
    import megatron.training

    core, namespace = _mine("SCENARIO_CORES"), _mine("SCENARIO_NAMESPACES")
    if namespace is not None:
        _enter(namespace)
    if core is not None:
        os.sched_setaffinity(0, {int(core)})
    at_work = mmap.mmap(-1, 1)
    at_work[0] = 1
    slowdown = float(_mine("SCENARIO_SLOWDOWN") or 1.0)
    if slowdown > 1.0:
        slow_down(slowdown, at_work)
    if "SCENARIO_TURNS" in os.environ:
        training = megatron.training.training
        training.train_step = in_turns(
            training.train_step,
            address=os.environ["SCENARIO_TURNS"],
            job=os.environ["SCENARIO_JOB"],
            at_work=at_work,
        )
    runpy.run_path(
        str(Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"), run_name="__main__"
    )
