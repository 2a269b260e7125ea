"""Deferred weight gradients: an I action leaves them out, the W of its stage and microbatch computes them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any


class DeferredGradients[P](ABC):
    """The queues of one process: open while an I action runs, emptied by its W.

    A layer appends the inputs of its weight's gradient (P) to `open` in its backward while that is a list.
    """

    def __init__(self) -> None:
        self.open: list[P] | None = None
        # Backwards whose W has computed a gradient that its I had left out.
        self.num_split = 0
        self._pending: dict[tuple[int, int], list[P]] = {}

    @abstractmethod
    def accumulate(self, pending: P) -> None:
        """Compute one layer's weight gradient and add it to the weight's gradient."""

    def tensors_of(self, pending: P) -> Iterable[Any]:
        """The tensors that one layer keeps until its W, for an activation tracker; none by default."""
        del pending
        return ()

    def held(self, stage: int, microbatch: int) -> list[Any]:
        """The tensors that are kept for a W to come."""
        pending = self._pending.get((stage, microbatch), [])
        return [tensor for layer in pending for tensor in self.tensors_of(layer)]

    def begin(self) -> None:
        """Let the layers defer their weight gradients from now on."""
        assert self.open is None
        self.open = []

    def end(self, stage: int, microbatch: int) -> None:
        """End the I action; the deferred gradients belong to the W of this stage and microbatch."""
        assert self.open is not None
        self._pending[stage, microbatch], self.open = self.open, None

    def run(self, stage: int, microbatch: int) -> None:
        """Compute the weight gradients of one microbatch on one stage."""
        pending = self._pending.pop((stage, microbatch))
        for layer in pending:
            self.accumulate(layer)
        has_stored = self.run_stored(stage, microbatch)
        self.num_split += bool(pending) or has_stored

    def order_by_layer(self, stage: int) -> None:
        """Let the W's to come of a stage compute their gradients layer by layer, each as many as before.

        Those of the first layers are then complete before the last W begins. The sums are made as before.
        """
        keys = [key for key in self._pending if key[0] == stage]
        self._pending |= zip(keys, by_layer([self._pending[key] for key in keys]), strict=True)

    def run_stored(self, stage: int, microbatch: int) -> bool:
        """Compute the gradients that layers keep themselves; whether there were some. None by default."""
        del stage, microbatch
        return False

    def clear(self) -> None:
        """Forget all gradients, after a step that was broken off."""
        self.open = None
        self._pending.clear()


def by_layer[T](microbatches: Sequence[Sequence[T]]) -> list[list[T]]:
    """The entries of all microbatches in the order of their layers, cut into lists as long as before.

    Unchanged where microbatches have different numbers of layers.
    """
    lengths = {len(layers) for layers in microbatches}
    if len(lengths) != 1:
        return [list(layers) for layers in microbatches]
    entries = [entry for layer in zip(*microbatches, strict=True) for entry in layer]
    (size,) = lengths
    return [entries[index * size : (index + 1) * size] for index in range(len(microbatches))]
