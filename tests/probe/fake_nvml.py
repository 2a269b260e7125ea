"""NVML of a machine that has none, for the probe's tests."""

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

UUID = "5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"


def properties(**changes: Any) -> SimpleNamespace:
    """What torch says of a device: of the one with UUID, where nothing is changed."""
    usual = {
        "name": "NVIDIA GB200",
        "total_memory": 189_471 * 2**20,
        "multi_processor_count": 148,
        "uuid": UUID,
    }
    return SimpleNamespace(**{**usual, **changes})


class FakeNvml:
    """Stands in for pynvml on a machine without a GPU: fills what the driver would.

    The node has two devices: another one, and the one with UUID.
    """

    def __init__(
        self,
        *,
        identity: bytes = bytes(range(16)),
        clique: int = 7,
        state: int = 3,
        knows_fabrics: bool = True,
    ) -> None:
        self.identity, self.clique = identity, clique
        self.state, self.knows_fabrics = state, knows_fabrics

    def nvmlInit(self) -> None:  # noqa: N802
        """Nothing to begin."""

    def nvmlShutdown(self) -> None:  # noqa: N802
        """Nothing to end."""

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        """The number is its handle."""
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        """The driver's index of a whole device."""
        return {f"GPU-{UUID[::-1]}": 0, f"GPU-{UUID}": 1}[uuid]

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        """A name as older releases give it."""
        return (b"NVIDIA GB300", b"NVIDIA GB200")[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        """The memory of the whole device."""
        return SimpleNamespace(total=(284_208 * 2**20, 189_471 * 2**20)[handle])

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:  # noqa: N802
        """Milliwatts."""
        return (1_400_000, 1_200_000)[handle]

    def nvmlDeviceGetGpuFabricInfo(self, handle: int, reference: Any) -> int:  # noqa: N802
        """Write nvmlGpuFabricInfo_t (25 bytes and padding) to the caller's memory."""
        if not self.knows_fabrics:
            raise RuntimeError("Not Supported")
        packed = struct.pack("<16sIIB3x", self.identity, 0, self.clique, self.state)
        target = reference._obj
        assert ctypes.sizeof(target) == len(packed)
        ctypes.memmove(ctypes.addressof(target), packed, len(packed))
        return 0
