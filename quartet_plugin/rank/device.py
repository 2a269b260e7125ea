"""The device that this process trains on: its name and the memory that was used on it."""

import contextlib
import sys
from pathlib import Path

_CPU = "cpu"
_state: dict[str, str] = {}


def declare_cpu() -> None:
    """Torch's CUDA surface answers for the CPU from now on, so it must not be asked what it is."""
    _state["name"] = _CPU


def device_name() -> str:
    """`cpu`, or the CUDA device's name."""
    torch = sys.modules.get("torch")
    if _state.get("name") == _CPU or torch is None or not torch.cuda.is_available():
        return _CPU
    return str(torch.cuda.get_device_name())


def peak_memory_bytes() -> int:
    """The most bytes that the allocator reserved on the CUDA device; on the CPU the process's peak."""
    torch = sys.modules.get("torch")
    if torch is not None and device_name() != _CPU and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_reserved())
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most bytes of this process that were in RAM; 0 where the kernel does not count them."""
    # Not getrusage: its peak is inherited from the launcher across fork and exec.
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
