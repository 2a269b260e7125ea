"""Starts the gathers of parameters that the distributed optimizer has updated, ahead of the forwards."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any


class ParamGather:
    """Starts the gather of every chunk's parameters one chunk ahead of its first forward.

    A device's chunks have their first forwards in ascending order, and those of the first two are gathered
    from the beginning of the step, as Megatron does.
    """

    def __init__(self, chunks: Sequence[Any], starts: Sequence[Callable[..., Any]]) -> None:
        """`starts` are Megatron's functions of the chunks; empty where ranks gather without alignment.

        DDP's hooks then gather the bucket groups of a chunk one after the other in its first forward: the
        first of them is started here.
        """
        whole = [partial(start, chunk.parameters()) for chunk, start in zip(chunks, starts, strict=False)]
        self._starts = whole or [partial(_start_first_groups, chunk) for chunk in chunks]
        for start in self._starts[:2]:
            start()

    def before_forward(self, chunk: int) -> None:
        """The first forward of a chunk is next."""
        if 0 < chunk < len(self._starts) - 1:
            self._starts[chunk + 1]()


def _start_first_groups(chunk: Any) -> None:
    # Without DDP's hooks nobody would wait for it: they are off without overlap and in the first step.
    if not getattr(chunk, "remove_forward_pre_hook_handles", None):
        return
    for groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
        # The gathers of a chunk begin at its last group, which holds its first layers.
        if groups and not groups[-1].param_gather_dispatched:
            groups[-1].start_param_sync()
