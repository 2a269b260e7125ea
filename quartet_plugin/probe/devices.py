"""A rank's device: its name and size, and its rates while all of its node are busy."""

import contextlib
import ctypes
import importlib
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

_CPU_INFO = Path("/proc/cpuinfo")
# Side of the square products, by device and format; large enough that a larger one is no faster.
_SIDES = {
    "cpu": {"fp32": 768, "bf16": 384},
    "cuda": {"fp32": 4096, "bf16": 8192, "fp16": 8192},
}
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Beyond the last level of a processor's cache.
_COPY_BYTES = {"cpu": 128 * 2**20, "cuda": 1024 * 2**20}
_WINDOW_S = 0.4
_LEAST_REPEATS = 3


# In the driver's name of a slice of a device.
_SLICE = "MIG"
# What nvml.h calls NVML_GPU_FABRIC_STATE_COMPLETED: the device has joined its fabric.
_JOINED = 3
# Longer names are none.
_LONGEST_NAME = 200
# Slurm's place of a node in its tree of switches, and what each part of it is, in every task.
_TOPOLOGY = {"topology": "SLURM_TOPOLOGY_ADDR", "topology_pattern": "SLURM_TOPOLOGY_ADDR_PATTERN"}


class FabricInfo(ctypes.Structure):
    """nvml.h's nvmlGpuFabricInfo_t; pynvml's own of the same name has another size in some releases."""

    _fields_ = (
        ("cluster_uuid", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique_id", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


def describe(device: torch.device) -> dict[str, Any]:
    """`name`, `memory_bytes` and `compute_units` of the device; a core has its share of the memory.

    Those of a GPU are torch's, of the device or slice that CUDA_VISIBLE_DEVICES shows the process. NVML knows
    the `power_watts` and the `fabric`, where its library is there and the device is whole.
    """
    if device.type == "cuda":
        return _gpu(torch.cuda.get_device_properties(device))
    cores = len(os.sched_getaffinity(0))
    share = psutil.virtual_memory().total // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", cores)))
    return {"name": processor_name(), "memory_bytes": int(share), "compute_units": 1, "power_watts": None}


def _gpu(known: Any) -> dict[str, Any]:
    """The description of the GPU that has torch's properties `known`."""
    properties: dict[str, Any] = {
        "name": str(known.name),
        "memory_bytes": int(known.total_memory),
        "compute_units": int(known.multi_processor_count),
        "power_watts": None,
    }
    if _SLICE in properties["name"].split():
        # Power and fabric are those of the whole device.
        return properties
    with contextlib.suppress(Exception):
        # Optional, and a driver may refuse any of its questions: what torch says is enough to go on.
        properties |= _nvml(str(known.uuid))
    return properties


def _nvml(uuid: str) -> dict[str, Any]:
    """What NVML alone knows of the device with that UUID; its index is not that of CUDA_VISIBLE_DEVICES."""
    pynvml: Any = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        fabric = None
        with contextlib.suppress(Exception):
            # Older drivers and devices without a fabric refuse the question.
            fabric = _fabric(pynvml, handle)
        return {
            **({} if fabric is None else {"fabric": fabric}),
            "power_watts": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        }
    finally:
        pynvml.nvmlShutdown()


def _fabric(pynvml: Any, handle: Any) -> str | None:
    """The fabric's identity and the clique of a device, which links reach without a network; None without.

    A clique alone (a node's own switches) has no identity.
    """
    info = FabricInfo()
    pynvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    identity = bytes(info.cluster_uuid)
    if info.state != _JOINED or info.status != 0 or not any(identity):
        return None
    return f"{identity.hex()}:{info.clique_id}"


def place_of_node() -> dict[str, str]:
    """The `topology` of this node and its `topology_pattern`, where Slurm says them."""
    values = {name: os.environ.get(variable, "") for name, variable in _TOPOLOGY.items()}
    return {name: words for name, words in values.items() if 0 < len(words) <= _LONGEST_NAME}


def processor_name() -> str:
    """The processor's model, as the system names it."""
    with contextlib.suppress(OSError):
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "processor"


def measure_rates(device: torch.device) -> dict[str, Any]:
    """`matmul_flops`, the highest FLOP/s of a product by format, and `copy_bytes_per_s`, read and written."""
    flops: dict[str, float] = {}
    for precision, side in _SIDES[device.type].items():
        left = torch.randn(side, side, device=device).to(_TYPES[precision])
        seconds = _shortest_s(_product(left), device=device)
        flops[precision] = 2 * side**3 / seconds
    size = _COPY_BYTES[device.type]
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    seconds = _shortest_s(lambda: target.copy_(source), device=device)
    return {"matmul_flops": flops, "copy_bytes_per_s": 2 * size / seconds}


def _product(left: torch.Tensor) -> Callable[[], Any]:
    out = torch.empty_like(left)
    return lambda: torch.mm(left, left, out=out)


def _shortest_s(action: Callable[[], Any], *, device: torch.device) -> float:
    """The shortest time of an action in seconds, begun by all ranks together and repeated for a moment."""
    action()
    dist.barrier()
    end = time.perf_counter() + _WINDOW_S
    times: list[float] = []
    while len(times) < _LEAST_REPEATS or time.perf_counter() < end:
        begin = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)
