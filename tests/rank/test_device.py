"""A rank's CUDA memory: tensors, the pool around them, and the rest of the device."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from quartet_plugin.protocol.rank_files import DeviceMemory
from quartet_plugin.rank import device


@pytest.fixture
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 1000 bytes with 250 left, a pool of 600 and tensors of 400 at their peaks."""
    monkeypatch.setattr(device, "_state", {})
    monkeypatch.setattr(device, "_kept", {})
    monkeypatch.setattr(
        torch,
        "cuda",
        SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: True,
            get_device_name=lambda: "a GPU",
            mem_get_info=lambda: (250, 1000),
            max_memory_allocated=lambda: 400,
            max_memory_reserved=lambda: 600,
            memory_reserved=lambda: 550,
        ),
    )


@pytest.mark.usefixtures("_cuda")
def test_the_pool_is_not_what_training_needs() -> None:
    assert device.peak_memory_bytes() == 400
    assert device.device_memory() == DeviceMemory(
        peak_allocated_bytes=400, peak_reserved_bytes=600, untracked_bytes=200
    )


def test_a_processor_has_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_state", {"name": "cpu"})
    assert device.device_memory() is None
    # The kernel counts pages of other threads late.
    assert device.peak_memory_bytes() == pytest.approx(device.peak_resident_bytes(), rel=0.02)


@pytest.mark.usefixtures("_cuda")
def test_a_peak_between_two_calls_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    device.keep_peak_memory()
    for name, value in (("max_memory_allocated", 900), ("max_memory_reserved", 950)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: 300 if calls else value)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name), raising=False)
    assert device.peak_memory_bytes() == 900
    device.reset_peak_memory()
    assert calls == ["empty_cache", "reset_peak_memory_stats"]
    memory = device.device_memory()
    assert memory is not None
    assert (memory.peak_allocated_bytes, memory.peak_reserved_bytes) == (400, 600)


def test_the_kernel_forgets_a_processes_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_state", {"name": "cpu"})
    monkeypatch.setattr(device, "_kept", {})
    device.reset_peak_memory()
    device.keep_peak_memory()
    before = device.peak_memory_bytes()
    large = b"1" * 2**28
    assert device.peak_memory_bytes() >= before + len(large) // 2
    size = len(large)
    del large
    device.reset_peak_memory()
    assert 0.98 * before <= device.peak_memory_bytes() < before + size // 2


_KEEPS_ITS_HEAP = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "67108864",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
}
_FREED = """
import ctypes
from quartet_plugin.rank import device

device.declare_cpu()
malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
device.reset_peak_memory()
before = device.peak_memory_bytes()
blocks = [malloc(2**20) for _ in range(256)]
for block in blocks:
    ctypes.memset(block, 1, 2**20)
held = device.peak_memory_bytes()
for block in blocks:
    free(block)
device.reset_peak_memory()
print(before, held, device.peak_memory_bytes())
"""


def test_freed_memory_that_a_heap_keeps_is_not_counted_after_a_reset() -> None:
    environment = {**os.environ, **_KEEPS_ITS_HEAP}
    words = subprocess.run(
        [sys.executable, "-c", _FREED], env=environment, check=True, capture_output=True, text=True
    ).stdout.split()
    before, held, after = (int(word) for word in words)
    assert held >= before + 2**27
    assert after < before + 2**27


def test_a_cold_device_is_warmed_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are computed until the time is over; torch's generator and the CPU's run are left alone."""
    clock = SimpleNamespace(now_s=100.0)
    clock.monotonic = lambda: clock.now_s
    waited: list[float] = []

    def synchronize() -> None:
        clock.now_s += 10.0
        waited.append(clock.now_s)

    monkeypatch.setattr(device, "_state", {})
    monkeypatch.setattr(device, "time", clock)
    monkeypatch.setattr(device, "_WARMING_SIZE", 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    linspace, state = torch.linspace, torch.get_rng_state()
    monkeypatch.setattr(torch, "linspace", lambda *words, device: linspace(*words))
    device.warm_device(25.0)
    assert waited == [110.0, 120.0, 130.0]
    assert torch.equal(state, torch.get_rng_state())
    device.warm_device(0.0)
    device.declare_cpu()
    device.warm_device(25.0)
    assert len(waited) == 3
