"""Checkpoints of tests' trainings that are written without another process.

Megatron's writer hands its results over in a process of its own, which is started anew and makes the
training's imports, for seconds on every rank. `test_training_on_cpu` and the first checkpoint of
`test_checkpoint_resume` are written as Megatron does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from quartet_plugin.megatron import parity


@contextmanager
def local_writer() -> Iterator[None]:
    """Let Megatron's writer, which this imports, hand its results over inside of this process."""
    import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    with parity._local_results():
        yield
