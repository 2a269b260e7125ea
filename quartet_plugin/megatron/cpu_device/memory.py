"""Memory of a CPU rank: what the process holds in RAM, in bytes, for `torch.cuda`'s memory queries."""

from pathlib import Path
from typing import Any

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def resident_bytes(device: Any = None) -> int:
    """Bytes of this process that are in RAM now."""
    del device
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes(device: Any = None) -> int:
    """The most bytes of this process that were in RAM since its start or since `reset_peak`."""
    del device
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resident_bytes()  # a kernel without the counter, such as a sandbox's


def reset_peak(device: Any = None) -> None:
    """Let `peak_resident_bytes` start anew; kept as it is where the kernel does not allow it."""
    del device
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return


def free_and_total_bytes(device: Any = None) -> tuple[int, int]:
    """Bytes free and installed on the machine, which its ranks share."""
    del device
    machine = psutil.virtual_memory()
    return int(machine.available), int(machine.total)


def statistics(device: Any = None) -> dict[str, int]:
    """The keys of `torch.cuda.memory_stats` that Megatron logs; counts that a CPU does not keep are 0."""
    del device
    current, peak = resident_bytes(), peak_resident_bytes()
    return {
        "allocated_bytes.all.current": current,
        "allocated_bytes.all.peak": peak,
        "reserved_bytes.all.current": current,
        "reserved_bytes.all.peak": peak,
        "allocation.all.current": 0,
        "allocation.all.peak": 0,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }
