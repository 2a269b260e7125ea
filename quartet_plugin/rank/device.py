"""The device that this process trains on: its name and the memory that was used on it."""

import contextlib
import ctypes
import gc
import sys
import time
from pathlib import Path

from quartet_plugin.protocol.rank_files import DeviceMemory

_CPU = "cpu"
# Products of this size take some milliseconds, and a few of them are enqueued at a time.
_WARMING_SIZE, _WARMING_PRODUCTS = 4096, 16
_state: dict[str, str] = {}
_forked: dict[str, int] = {}


def declare_forked(file_bytes: dict[str, int]) -> None:
    """This process was forked from a trial server that had these bytes of files, such as libraries, in RAM.

    A fork begins without them, and a process that was started anew has them.
    """
    _forked.update(file_bytes)


# The least that is reported as the peak: what `keep_peak_memory` saw.
_kept: dict[str, int] = {}


def declare_cpu() -> None:
    """Torch's CUDA surface answers for the CPU from now on, so it must not be asked what it is."""
    _state["name"] = _CPU


def device_name() -> str:
    """`cpu`, or the CUDA device's name."""
    return _CPU if is_on_cpu() else str(sys.modules["torch"].cuda.get_device_name())


def is_on_cpu() -> bool:
    """Whether this process trains on the CPU."""
    torch = sys.modules.get("torch")
    return _state.get("name") == _CPU or torch is None or not torch.cuda.is_available()


def peak_memory_bytes() -> int:
    """The most bytes of tensors on the CUDA device; on the CPU the process's peak."""
    memory = device_memory()
    if memory is not None:
        return memory.peak_allocated_bytes
    return max(_kept.get(_CPU, 0), peak_resident_bytes())


def device_memory() -> DeviceMemory | None:
    """The peak memory of the CUDA device; None on the CPU, and before CUDA is used."""
    torch = sys.modules.get("torch")
    if torch is None or device_name() == _CPU or not torch.cuda.is_initialized():
        return None
    cuda = torch.cuda
    free, total = cuda.mem_get_info()
    return DeviceMemory(
        peak_allocated_bytes=max(_kept.get("allocated", 0), cuda.max_memory_allocated()),
        peak_reserved_bytes=max(_kept.get("reserved", 0), cuda.max_memory_reserved()),
        untracked_bytes=max(0, total - free - cuda.memory_reserved()),
    )


def keep_peak_memory() -> None:
    """Store the peak so far: `reset_peak_memory` then ignores only memory that is used after this call."""
    memory = device_memory()
    if memory is None:
        _kept[_CPU] = peak_memory_bytes()
    else:
        _kept.update(allocated=memory.peak_allocated_bytes, reserved=memory.peak_reserved_bytes)


def reset_peak_memory() -> None:
    """Count the peak from now on: what was needed before, such as to read a checkpoint, is left out.

    On the CPU the kernel forgets the process's peak; where it does not let a process ask for that, the peak
    of the whole process stays.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None or device_name() == _CPU:
        _release_free_heap()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    elif torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _release_free_heap() -> None:
    """Give freed memory back to the kernel, which counts it as the process's; nothing without glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def warm_device(seconds: float) -> None:
    """Let the CUDA device compute for `seconds`: its clocks fall as it gets warm. Nothing on the CPU."""
    torch = sys.modules.get("torch")
    if not seconds or torch is None or device_name() == _CPU:
        return
    # Not random: the state of the generators is the training's.
    factors = torch.linspace(-1.0, 1.0, _WARMING_SIZE**2, device="cuda").view(_WARMING_SIZE, -1).bfloat16()
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for _ in range(_WARMING_PRODUCTS):
            factors @ factors
        torch.cuda.synchronize()


def peak_resident_bytes() -> int:
    """The most bytes of this process that were in RAM; 0 where the kernel does not count them.

    Of a forked process as if it had read in itself the files that its trial server had in memory.
    """
    # Not getrusage: its peak is inherited from the launcher across fork and exec.
    peak_bytes = _status_bytes("VmHWM")
    if not peak_bytes or not _forked:
        return peak_bytes
    present = resident_files()
    return peak_bytes + sum(max(0, size - present.get(path, 0)) for path, size in _forked.items())


def resident_files() -> dict[str, int]:
    """The bytes in RAM of each file, such as a library, that this process has mapped; empty if unknown."""
    sizes: dict[str, int] = {}
    path = ""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
            words = line.split(maxsplit=5)
            if "-" in words[0]:
                path = words[5] if len(words) > 5 else ""
            elif words[0] == "Rss:" and path.startswith("/"):
                sizes[path] = sizes.get(path, 0) + int(words[1]) * 1024
    return sizes


def _status_bytes(name: str) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0
