"""Bytes of activations and boundary tensors that a step keeps alive, as the simulator counts them.

On a CPU three kinds of tensors count: those that autograd saves in a forward, those that a queue of deferred
weight gradients holds between I and W, and those between stages. On a GPU the allocator counts them all.
Hooks on what autograd saves would be wrong there: under such hooks a backward gets the weight as another
tensor, without the attributes that fused weight gradients need.
"""

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class ActivationTracker(Protocol):
    """Counts the bytes of one step; the step calls it in this order, action by action."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive."""

    def begin(self, parameters: Iterable[Any]) -> None:
        """Begin the step; the parameters do not count."""

    def saving(self) -> AbstractContextManager[Any]:
        """A context for a forward."""

    def hold(self, tensors: Iterable[Any]) -> None:
        """Count tensors while these very objects live; None among them is skipped."""

    def end_action(self) -> None:
        """Note that the action whose tensors were counted last is over."""


def activation_tracker(*, on_cpu: bool) -> ActivationTracker:
    """The tracker for the device that this process trains on."""
    return SavedTensorTracker() if on_cpu else AllocatorTracker()


class SavedTensorTracker:
    """Each storage once, from its first tensor until its last one is gone.

    Costs some microseconds a tensor: meant for a single step.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.live_bytes = 0
        self._users: dict[int, int] = {}
        self._parameters: set[int] = set()

    def begin(self, parameters: Iterable[Any]) -> None:
        """Leave the parameters out: autograd saves them like any activation."""
        self._parameters = {tensor.untyped_storage().data_ptr() for tensor in parameters}

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

    def end_action(self) -> None:
        """Do nothing: every tensor was counted when it came."""

    def _saved(self, tensor: Any) -> Any:
        # The tensor itself may be the result of the node that keeps it: a cycle until its backward.
        packed = tensor.detach()
        self._note(packed)
        return packed

    def _note(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if not size or key in self._parameters:
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


class AllocatorTracker:
    """What the CUDA allocator holds at the ends of actions, more than when the step began.

    It sees what hooks cannot, such as the stores of Transformer Engine's layers. Buffers that live inside an
    action alone do not count, in the simulator neither.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._begin_bytes = 0

    def begin(self, parameters: Iterable[Any]) -> None:
        """Take what is allocated now for the zero: parameters, their gradients, and the optimizer's state."""
        del parameters
        self._begin_bytes = torch.cuda.memory_allocated()

    def saving(self) -> AbstractContextManager[Any]:
        """Nothing to do around a forward."""
        return nullcontext()

    def hold(self, tensors: Iterable[Any]) -> None:
        """Do nothing: the allocator knows every tensor."""

    def end_action(self) -> None:
        """Compare what is allocated now."""
        self.peak_bytes = max(self.peak_bytes, torch.cuda.memory_allocated() - self._begin_bytes)
