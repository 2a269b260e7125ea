"""Microbatches by number, out of an iterator that only knows the next one."""

from collections.abc import Iterator
from typing import Any


class MicrobatchIterator:
    """Gives every action the data of its own microbatch, whatever the order of the actions.

    Only needed where a stage's forwards do not run in ascending order. Samples that were drawn on the way to
    a later microbatch are kept until theirs is chosen.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        """`source` yields the microbatches in ascending order, one sample each."""
        self._source = source
        self._drawn: dict[int, Any] = {}
        self._num_drawn = 0
        self._chosen = 0

    def choose(self, microbatch: int) -> None:
        """The next sample asked for is this microbatch's."""
        self._chosen = microbatch

    def __iter__(self) -> "MicrobatchIterator":
        return self

    def __next__(self) -> Any:
        while self._num_drawn <= self._chosen:
            self._drawn[self._num_drawn] = next(self._source)
            self._num_drawn += 1
        return self._drawn.pop(self._chosen)
