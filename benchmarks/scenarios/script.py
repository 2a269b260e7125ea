"""`examples/pretrain_gpt.py` on chosen cores and in chosen network namespaces; otherwise untouched.

The environment says where the process with LOCAL_RANK i goes, so a permuted mapping moves RANKs over devices
that stay: SCENARIO_CORES="0,1,1" pins it, after the imports, which pinned processes do slowly;
SCENARIO_NAMESPACES="quartet-a,quartet-b" and SCENARIO_ADDRESS (of the first) move it.
"""

import os
import runpy
from pathlib import Path


def _mine(name: str) -> str | None:
    words = [word for word in os.environ.get(name, "").split(",") if word]
    return words[int(os.environ.get("LOCAL_RANK", "0"))] if words else None


def _enter(namespace: str) -> None:
    """Only this thread and those it makes: gloo's are made later."""
    with Path("/run/netns", namespace).open("rb") as file:
        os.setns(file.fileno(), os.CLONE_NEWNET)
    os.environ["MASTER_ADDR"] = os.environ["SCENARIO_ADDRESS"]
    os.environ["GLOO_SOCKET_IFNAME"] = f"{namespace}-0"


if __name__ == "__main__":
    import megatron.training  # noqa: F401

    core, namespace = _mine("SCENARIO_CORES"), _mine("SCENARIO_NAMESPACES")
    if namespace is not None:
        _enter(namespace)
    if core is not None:
        os.sched_setaffinity(0, {int(core)})
    runpy.run_path(
        str(Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"), run_name="__main__"
    )
