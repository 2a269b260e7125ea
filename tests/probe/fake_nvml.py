"""NVML of a machine that has none, for the probe's tests."""

import ctypes
import struct
from types import SimpleNamespace
from typing import Any


class FakeNvml:
    """Stands in for pynvml on a machine without a GPU: fills what the driver would."""

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

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        """A name as older releases give it."""
        return b"NVIDIA GB200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        """Its memory."""
        return SimpleNamespace(total=189_471 * 2**20)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:  # noqa: N802
        """Milliwatts."""
        return 1_200_000

    def nvmlDeviceGetGpuFabricInfo(self, handle: int, reference: Any) -> int:  # noqa: N802
        """Write nvmlGpuFabricInfo_t (25 bytes and padding) to the caller's memory."""
        if not self.knows_fabrics:
            raise RuntimeError("Not Supported")
        packed = struct.pack("<16sIIB3x", self.identity, 0, self.clique, self.state)
        target = reference._obj
        assert ctypes.sizeof(target) == len(packed)
        ctypes.memmove(ctypes.addressof(target), packed, len(packed))
        return 0
