"""How many bytes of activations and boundary tensors a step keeps alive, as the simulator counts them.

Counted are the tensors that autograd saves in a forward, those that a queue of deferred weight gradients
holds between I and W, and those on their way between stages: each storage once, from when it is first held
until the last tensor that was noted is gone. Parameters are left out.
"""

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch


class ActivationTracker:
    """Live bytes now and at the peak. Costs some microseconds a tensor: for one step, not for every one."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.live_bytes = 0
        self._users: dict[int, int] = {}
        self._left_out: set[int] = set()

    def leave_out(self, tensors: Iterable[Any]) -> None:
        """Do not count these, the parameters: autograd hands out what it saves without saying what it is."""
        self._left_out |= {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def saving(self) -> AbstractContextManager[Any]:
        """While this is open, what autograd saves is noted."""
        hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(self._saved, _as_it_is)
        return hooks

    def hold(self, tensors: Iterable[Any]) -> None:
        """Note tensors for as long as these very objects live; None among them is nothing."""
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


def _as_it_is(tensor: Any) -> Any:
    return tensor
