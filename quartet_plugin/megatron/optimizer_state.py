"""Saves optimizer state from its right places in the gradient buffers, which Megatron up to 0.19 misses.

A gradient buffer is a row of buckets, each padded to a multiple of the data parallel size. With
`--dist-ckpt-optim-fully-reshardable` the buckets' contents are put together without that padding, but a
weight's place in them counts it: behind a padded bucket every master weight and moment is saved shifted, and
a training that resumes starts from them. A plan's split or data parallelism may bring padding about that the
command has not. Megatron mended it after 0.19 (its pull request 5077).
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from quartet_plugin.megatron.seams import Seam, Wrapper, known_function
from quartet_plugin.megatron.seams.declared import OPTIMIZER_STATE
from quartet_plugin.megatron.support import has_known_parameters


def wrappers() -> dict[Seam, Wrapper]:
    """The repair; nothing where Megatron saves no such state, or by other values than any known release."""
    if not has_known_parameters(OPTIMIZER_STATE) or known_function(OPTIMIZER_STATE) is None:
        return {}
    return {OPTIMIZER_STATE: _with_right_places}


def _with_right_places(sharded_state: Callable[..., Any]) -> Callable[..., Any]:
    if not fills_with_zeros(inspect.getsource(sharded_state)):
        return sharded_state

    @wraps(sharded_state)
    def with_right_places(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for buffer in optimizer.buffers:
                stack.enter_context(_places_without_padding(buffer))
            return sharded_state(optimizer, *args, **kwargs)

    return with_right_places


def fills_with_zeros(source: str) -> bool:
    """Whether a function fills what it reads past a buffer's end with zeros, which only wrong places need."""
    tree = ast.parse(textwrap.dedent(source))
    return any(isinstance(node, ast.Attribute) and node.attr == "pad" for node in ast.walk(tree))


@contextmanager
def _places_without_padding(buffer: Any) -> Iterator[None]:
    """A block in which weights have their places among the buckets' contents alone."""
    padded = buffer.param_index_map
    shifts = [0]
    for bucket in buffer.buckets:
        shifts.append(shifts[-1] + bucket.grad_data.numel() - bucket.numel_unpadded)
    buffer.param_index_map = {
        weight: (start - shifts[bucket], end - shifts[bucket], bucket)
        for weight, (start, end, bucket) in padded.items()
    }
    try:
        yield
    finally:
        buffer.param_index_map = padded
