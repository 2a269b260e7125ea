"""A rank's CUDA memory: tensors, the pool around them, and the rest of the device."""

from types import SimpleNamespace

import pytest
import torch

from quartet_plugin.protocol.rank_files import DeviceMemory
from quartet_plugin.rank import device


@pytest.fixture
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 1000 bytes with 250 left, a pool of 600 and tensors of 400 at their peaks."""
    monkeypatch.setattr(device, "_state", {})
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
    assert device.peak_memory_bytes() == device.peak_resident_bytes()
