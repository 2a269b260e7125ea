"""The bytes that each part of a model keeps of one microbatch, from its forward to its backward.

On the CPU hooks count the tensors that autograd saves. On a GPU the allocator does: under such hooks a
backward gets weights as other tensors, without the attributes that fused weight gradients need.
"""

from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from quartet_plugin.rank.device import device_name


class PartActivations(Protocol):
    """Counts while `is_open`."""

    is_open: bool

    def leave_out(self, parameters: Iterable[Any]) -> None:
        """Exclude the storages of parameters."""

    def bytes_of(self, part: str) -> int:
        """The bytes that the part keeps for one microbatch."""

    def enter(self, part: str) -> None:
        """Count what is kept from now on for `part`."""

    def leave(self) -> None:
        """End the count of a chunk's forward."""


def part_activations() -> PartActivations:
    """The count for the device that this process trains on."""
    return SavedPartActivations() if device_name() == "cpu" else AllocatedPartActivations()


class SavedPartActivations:
    """The bytes that autograd saves for each part of the model; a storage counts for its first part.

    Parameters and their views are left out. While `is_open`, the first forward of each part is counted: its
    storages live until its backward, so that their addresses identify them.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._stack: ExitStack | None = None
        self._part = ""
        self._seen: set[int] = set()
        self._bytes: dict[str, int] = defaultdict(int)
        self._counted: set[str] = set()
        self._parameters: set[int] = set()

    def leave_out(self, parameters: Iterable[Any]) -> None:
        """Exclude the storages of parameters."""
        self._parameters |= {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def bytes_of(self, part: str) -> int:
        """The bytes that the part keeps for one microbatch."""
        return self._bytes.get(part, 0)

    def enter(self, part: str) -> None:
        """Count tensors that are saved from now on for `part`."""
        if not self.is_open:
            return
        self._finish_part()
        self._part = part
        if self._stack is None:
            self._seen = set()
            self._stack = ExitStack()
            self._stack.enter_context(
                torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
            )

    def leave(self) -> None:
        """End the count of a chunk's forward."""
        self._finish_part()
        if self._stack is not None:
            self._stack.close()
            self._stack = None

    def _finish_part(self) -> None:
        if self._part:
            self._counted.add(self._part)
        self._part = ""

    def _pack(self, tensor: Any) -> Any:
        if self._part and self._part not in self._counted:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address not in self._seen and address not in self._parameters:
                self._seen.add(address)
                self._bytes[self._part] += storage.nbytes()
        # The tensor itself may be the result of the node that keeps it: a cycle until its backward.
        return tensor.detach()


class AllocatedPartActivations:
    """What the CUDA allocator holds more after a part's forward than before it.

    The last forward counts: buffers that are made once and stay belong to the first.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._part = ""
        self._begin_bytes = 0
        self._bytes: dict[str, int] = {}

    def leave_out(self, parameters: Iterable[Any]) -> None:
        """Do nothing: no forward allocates parameters."""

    def bytes_of(self, part: str) -> int:
        """The bytes that the part keeps for one microbatch."""
        return max(0, self._bytes.get(part, 0))

    def enter(self, part: str) -> None:
        """Count what is allocated from now on for `part`."""
        if not self.is_open:
            return
        allocated = torch.cuda.memory_allocated()
        if self._part:
            self._bytes[self._part] = allocated - self._begin_bytes
        self._part, self._begin_bytes = part, allocated

    def leave(self) -> None:
        """End the count of a chunk's forward."""
        if self._part:
            self.enter("")
            self._part = ""
