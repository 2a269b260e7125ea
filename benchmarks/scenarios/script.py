"""`examples/pretrain_gpt.py` on chosen cores and in chosen network namespaces; otherwise untouched.

The environment says where the process with LOCAL_RANK i goes, so a permuted mapping moves RANKs over devices
that stay: SCENARIO_CORES="0,1,1" pins it, after the imports, which pinned processes do slowly;
SCENARIO_NAMESPACES="quartet-a,quartet-b" and SCENARIO_ADDRESS (of the first) move it;
SCENARIO_CPU_GROUPS, folders of control groups, give it a share of its core (`cpu_shares.py`). With
SCENARIO_TURNS, the address of a socket, it trains only when it is let through, STEPS steps at a time
(`turns.py`).
"""

import json
import os
import runpy
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 3


def _mine(name: str) -> str | None:
    words = [word for word in os.environ.get(name, "").split(",") if word]
    return words[int(os.environ.get("LOCAL_RANK", "0"))] if words else None


def _enter(namespace: str) -> None:
    """Only this thread and those it makes: gloo's are made later."""
    with Path("/run/netns", namespace).open("rb") as file:
        os.setns(file.fileno(), os.CLONE_NEWNET)
    os.environ["MASTER_ADDR"] = os.environ["SCENARIO_ADDRESS"]
    os.environ["GLOO_SOCKET_IFNAME"] = f"{namespace}-0"


def in_turns(
    train_step: Callable[..., Any], *, address: str, job: str, steps: int = STEPS
) -> Callable[..., Any]:
    """`train_step`, which waits before every `steps` steps and tells how long each of the last ones took."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    steps_s: list[float] = []

    def tell(value: object) -> None:
        connection.sendall(json.dumps(value).encode() + b"\n")

    def waiting_train_step(*args: Any, **kwargs: Any) -> Any:
        if len(steps_s) % steps == 0:
            tell(steps_s)
            steps_s.clear()
            connection.recv(16)
        start = time.perf_counter()
        results = train_step(*args, **kwargs)
        steps_s.append(time.perf_counter() - start)
        return results

    tell(job)
    return waiting_train_step


if __name__ == "__main__":
    import megatron.training

    core, namespace, group = map(_mine, ("SCENARIO_CORES", "SCENARIO_NAMESPACES", "SCENARIO_CPU_GROUPS"))
    if namespace is not None:
        _enter(namespace)
    if core is not None:
        os.sched_setaffinity(0, {int(core)})
    if group is not None:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    if "SCENARIO_TURNS" in os.environ:
        training = megatron.training.training
        training.train_step = in_turns(
            training.train_step,
            address=os.environ["SCENARIO_TURNS"],
            job=os.environ["SCENARIO_JOB"],
        )
    runpy.run_path(
        str(Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"), run_name="__main__"
    )
