"""What one node of a cluster has, before anything trains there; no other library is needed but for its speed.

    python -m quartet_plugin.probe.node_checks FOLDER

`quartet doctor --nodes` starts it on every node through the launcher. Each writes FOLDER/node-INDEX.json,
facts that the command compares and prints. The first node answers the others on MASTER_PORT, so that the
port, the name of the first node and the clocks are tried as a training would.
"""

import contextlib
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.protocol.masking import masked

# Distributions whose versions must be equal on all nodes.
PACKAGES = (
    "quartet-plugin",
    "torch",
    "megatron-core",
    "transformer-engine",
    "deepspeed",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
PROGRAMS = ("srun", "sbatch", "ssh", "torchrun", "nvidia-smi", "ibstat")
PROGRAM_S, MEET_S = 20.0, 60.0
# Longer values are cut.
_LONGEST_VALUE = 200
_INFINIBAND, _NETWORK = Path("/sys/class/infiniband"), Path("/sys/class/net")
_DRIVER = Path("/proc/driver/nvidia/version")


def node_facts(folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The facts of this node that need no other one."""
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "kernel": platform.release(),
        "packages": installed_versions(),
        "programs": [name for name in PROGRAMS if shutil.which(name)],
        "num_cores": len(os.sched_getaffinity(0)),
        "devices": devices(),
        "driver": _first_line(_DRIVER),
        "ports": infiniband_ports(_INFINIBAND),
        "interfaces": interfaces(_NETWORK),
        "limits": limits(),
        "free_bytes": {str(place): shutil.disk_usage(place).free for place in _places(folder)},
        "storage_s": storage_s(folder),
        "product_s": product_s(),
        "nccl_variables": sorted(name for name in environment if name.startswith("NCCL_")),
        "nccl_values": {
            name: masked(value)[:_LONGEST_VALUE]
            for name, value in sorted(environment.items())
            if name.startswith("NCCL_")
        },
    }


def installed_versions() -> dict[str, str]:
    """The versions of `PACKAGES` that are installed for this python."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def devices() -> list[str]:
    """The accelerators as nvidia-smi names them, in its order; none without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PROGRAM_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvidia-smi does not answer: {type(error).__name__}"]
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def infiniband_ports(folder: Path) -> dict[str, str]:
    """The state of each port of an InfiniBand or RoCE device, such as `4: ACTIVE`, and its rate."""
    ports = {}
    for state in sorted(folder.glob("*/ports/*/state")):
        rate = _first_line(state.with_name("rate"))
        ports[f"{state.parts[-4]}:{state.parts[-2]}"] = f"{_first_line(state)}, {rate}"
    return ports


def interfaces(folder: Path) -> dict[str, str]:
    """The state of each network interface but the loopback."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return {name: _first_line(folder / name / "operstate") for name in names if name != "lo"}


def limits() -> dict[str, int]:
    """The limits of processes that trainings run into; -1 for none."""
    kinds = {
        "open files": resource.RLIMIT_NOFILE,
        "processes": resource.RLIMIT_NPROC,
        "locked memory": resource.RLIMIT_MEMLOCK,
        "shared memory": None,
    }
    values = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items() if kind is not None}
    with contextlib.suppress(OSError):
        values["shared memory"] = shutil.disk_usage("/dev/shm").total  # noqa: S108
    return values


def product_s() -> list[float]:
    """Seconds of the fastest of a few equal runs of matrix products on each device; none without torch.

    On the CPU it is one time, of all cores. A device that cannot compute them is left out.
    """
    try:
        import torch
    except (ImportError, OSError):
        # Without torch, or with one whose libraries are not here.
        return []
    from quartet_plugin.rank.product_time import product_times

    if not torch.cuda.is_available():
        times = product_times()
        return [] if times is None else [min(times)]
    seconds = []
    for device in range(torch.cuda.device_count()):
        times = None
        # A device that another process holds alone refuses already here.
        with contextlib.suppress(RuntimeError), torch.cuda.device(device):
            times = product_times()
        if times is not None:
            seconds.append(min(times))
    return seconds


def storage_s(folder: Path) -> float:
    """Seconds to write a small file in the shared folder, bring it to the disk, and rename it."""
    began = time.monotonic()
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.write(b"quartet")
        file.flush()
        os.fsync(file.fileno())
    renamed = Path(file.name).with_suffix(".renamed")
    Path(file.name).rename(renamed)
    renamed.unlink()
    return time.monotonic() - began


def meet(environment: Mapping[str, str], *, limit_s: float = MEET_S) -> dict[str, Any]:
    """The node's place, and the others' way to the first one: whether it is reached, and the clock there.

    `clock_offset_s` is the first node's clock minus this one's.
    """
    number, index = int(environment.get("NNODES", "1")), int(environment.get("NODE_RANK", "0"))
    address, port = environment.get("MASTER_ADDR", "localhost"), int(environment.get("MASTER_PORT", "0"))
    place: dict[str, Any] = {"index": index, "num_nodes": number, "address": address, "port": port}
    if number == 1:
        return place
    try:
        if index == 0:
            answered = _answer(port, num_others=number - 1, limit_s=limit_s)
            return {**place, "answered": answered}
        return {**place, "clock_offset_s": _clock_offset(address, port, limit_s=limit_s)}
    except OSError as error:
        peer = f"port {port} of {address}" if index else f"port {port}"
        return {**place, "unreached": f"{peer}: {error.strerror or type(error).__name__}"}


def _answer(port: int, *, num_others: int, limit_s: float) -> int:
    """Tell each other node the time; how many have asked."""
    end, answered = time.monotonic() + limit_s, 0
    with socket.create_server(("", port), backlog=1024) as server:
        while answered < num_others and (left_s := end - time.monotonic()) > 0:
            server.settimeout(left_s)
            try:
                connection, _ = server.accept()
            except TimeoutError:
                break
            with connection:
                connection.settimeout(5.0)
                with contextlib.suppress(OSError):
                    connection.recv(1)
                    connection.sendall(repr(time.time()).encode())
                    answered += 1
    return answered


def _clock_offset(address: str, port: int, *, limit_s: float) -> float:
    end = time.monotonic() + limit_s
    while True:
        try:
            with socket.create_connection((address, port), timeout=5.0) as connection:
                asked = time.time()
                connection.sendall(b"?")
                text = connection.makefile("rb").read()
                return float(text) - (asked + time.time()) / 2
        except (OSError, ValueError) as error:
            if time.monotonic() >= end:
                raise error if isinstance(error, OSError) else OSError(0, "no answer") from error
            time.sleep(0.2)


def _places(folder: Path) -> list[Path]:
    return list(dict.fromkeys([folder, Path(tempfile.gettempdir())]))


def _first_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").partition("\n")[0].strip()[:200]
    except OSError:
        return ""


def main() -> None:
    """Write the facts of this node."""
    folder = Path(sys.argv[1])
    place: dict[str, Any] = {}
    # The others wait for the first node's answer while it looks at itself.
    meeting = threading.Thread(target=lambda: place.update(meet(os.environ)))
    meeting.start()
    facts = node_facts(folder, os.environ)
    meeting.join()
    write_json_atomic(folder / f"node-{place['index']}.json", {**facts, **place})


if __name__ == "__main__":
    main()
