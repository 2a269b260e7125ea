"""Bytes of activations and boundary tensors that a step keeps alive, as the simulator counts them.

Three kinds of tensors count: those that autograd saves in a forward, those that a queue of deferred weight
gradients holds between I and W, and those between stages. Each storage counts once, from its first tensor
until its last one is gone. Parameters do not count.
"""

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch


class ActivationTracker:
    """Live bytes now and at the peak. Costs some microseconds a tensor: meant for a single step."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.live_bytes = 0
        self._users: dict[int, int] = {}
        self._left_out: set[int] = set()

    def leave_out(self, tensors: Iterable[Any]) -> None:
        """Do not count these tensors, the parameters: autograd saves them like any activation."""
        self._left_out |= {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def saving(self) -> AbstractContextManager[Any]:
        """A context in which the tensors that autograd saves are counted."""
        hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(
            self._saved, lambda tensor: tensor
        )
        return hooks

    def hold(self, tensors: Iterable[Any]) -> None:
        """Count tensors while these very objects live; None among them is skipped."""
        for tensor in tensors:
            if tensor is not None:
                self._note(tensor)

    def _saved(self, tensor: Any) -> Any:
        self._note(tensor)
        return tensor

    def _note(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if not size or key in self._left_out:
            return
        self._users[key] = self._users.get(key, 0) + 1
        if self._users[key] == 1:
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(tensor, self._gone, key, size).atexit = False

    def _gone(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self.live_bytes -= size
