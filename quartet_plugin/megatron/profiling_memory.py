"""How many bytes each part of a model keeps from its forward to its backward."""

from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch


class ActivationLedger:
    """Counts the tensors that autograd saves, each storage once, for the part that saves it first.

    Parameters are left out, and views of them. While `is_open`, one forward is counted, the first of each
    part: all that it saves lives until its backward, so that a storage's address tells it apart.
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
        """Storages that are there anyway."""
        self._parameters |= {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def bytes_of(self, part: str) -> int:
        """What the part keeps for one microbatch."""
        return self._bytes.get(part, 0)

    def enter(self, part: str) -> None:
        """From now on what is saved belongs to `part`."""
        if not self.is_open:
            return
        self._finish_part()
        self._part = part
        if self._stack is None:
            self._seen = set()
            self._stack = ExitStack()
            self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))

    def leave(self) -> None:
        """The chunk's forward is over."""
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
            place = storage.data_ptr()
            if place not in self._seen and place not in self._parameters:
                self._seen.add(place)
                self._bytes[self._part] += storage.nbytes()
        return tensor


def _unpack(tensor: Any) -> Any:
    return tensor
