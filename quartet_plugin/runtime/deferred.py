"""Weight gradients later: what an I action leaves out, kept for the W of its stage and microbatch."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any


class DeferredGradients[P](ABC):
    """The queues of one process: open while an I action runs, worked off by its W.

    A layer whose backward finds `open` to be a list appends what its weight's gradient needs (P) to it.
    """

    def __init__(self) -> None:
        self.open: list[P] | None = None
        self._pending: dict[tuple[int, int], list[P]] = {}

    @abstractmethod
    def accumulate(self, pending: P) -> None:
        """Compute one layer's weight gradient and add it to what the weight has."""

    def tensors_of(self, pending: P) -> Iterable[Any]:
        """What one layer keeps until its W, for a ledger; nothing unless said."""
        del pending
        return ()

    def held(self, stage: int, microbatch: int) -> list[Any]:
        """The tensors that are kept for a W to come."""
        pending = self._pending.get((stage, microbatch), [])
        return [tensor for one in pending for tensor in self.tensors_of(one)]

    def begin(self) -> None:
        """From now on the layers defer."""
        assert self.open is None
        self.open = []

    def end(self, stage: int, microbatch: int) -> None:
        """The I action is over; what was deferred belongs to this W."""
        assert self.open is not None
        self._pending[stage, microbatch], self.open = self.open, None

    def run(self, stage: int, microbatch: int) -> None:
        """Compute the weight gradients of one microbatch on one stage."""
        for pending in self._pending.pop((stage, microbatch)):
            self.accumulate(pending)

    def clear(self) -> None:
        """Forget everything: a step was broken off."""
        self.open = None
        self._pending.clear()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left."""
        return self.open is None and not self._pending
