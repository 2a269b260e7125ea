"""What a rank's device is: NVML's answer where its library is there, torch's or the system's otherwise."""

import contextlib
import importlib
import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch

_CPU_INFO = Path("/proc/cpuinfo")


def describe(device: torch.device, *, local_rank: int) -> dict[str, Any]:
    """`name`, `memory_bytes` and `compute_units` of the device; a core has its share of the memory."""
    if device.type == "cuda":
        return _gpu(device, local_rank=local_rank)
    cores = len(os.sched_getaffinity(0))
    share = psutil.virtual_memory().total // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", cores)))
    return {"name": processor_name(), "memory_bytes": int(share), "compute_units": 1, "power_watts": None}


def _gpu(device: torch.device, *, local_rank: int) -> dict[str, Any]:
    known = torch.cuda.get_device_properties(device)
    found = {
        "name": str(known.name),
        "memory_bytes": int(known.total_memory),
        "compute_units": int(known.multi_processor_count),
        "power_watts": None,
    }
    with contextlib.suppress(Exception):
        # Optional, and a driver may refuse any of its questions: what torch says is enough to go on.
        found |= _nvml(local_rank)
    return found


def _nvml(local_rank: int) -> dict[str, Any]:
    pynvml: Any = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        index = int(visible[local_rank]) if len(visible) > local_rank and visible[0].isdigit() else local_rank
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = pynvml.nvmlDeviceGetName(handle)
        return {
            "name": name.decode() if isinstance(name, bytes) else str(name),
            "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            "power_watts": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        }
    finally:
        pynvml.nvmlShutdown()


def processor_name() -> str:
    """The processor's model, as the system names it."""
    with contextlib.suppress(OSError):
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "processor"
