"""Puts the parts of the CPU device in place, in the order in which they depend on each other."""

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from quartet_plugin.errors import SeamError

_installed = False


def is_installed() -> bool:
    """Whether this process trains on the CPU device."""
    return _installed


def install() -> None:
    """Redirect torch's CUDA surface to the CPU, in this process and in what it spawns, and import Megatron.

    Must run before Megatron is imported, because Megatron binds torch's names when it is imported; best also
    before torch, part of whose import is then left out. A second call changes nothing. Raises `SeamError`
    when Megatron came first or is not installed.
    """
    global _installed
    if _installed:
        return
    if "megatron.core" in sys.modules:
        raise SeamError(
            "megatron.core is already imported: the CPU device must be installed before it; "
            "start the script through `-m quartet_plugin.megatron`"
        )
    for name in ("torch", "megatron"):
        if importlib.util.find_spec(name) is None:
            raise SeamError(
                f"{name} is not installed, and the CPU device trains Megatron: "
                "pip install 'quartet-plugin[megatron]'"
            )
    with _collector_at_rest():
        _redirect_and_import()
    _installed = True


def _redirect_and_import() -> None:
    from quartet_plugin.megatron.cpu_device import startup

    startup.leave_out_compilers()
    import torch

    from quartet_plugin.megatron.cpu_device import checkpoints, collectives, cuda, spawn, tensors
    from quartet_plugin.rank import device

    device.declare_cpu()
    torch.set_num_threads(1)
    # Megatron asserts it with tensor or context parallelism; it means nothing to a CPU.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    tensors.redirect()
    cuda.redirect()
    collectives.redirect()
    spawn.carry_to_children()
    startup.import_megatron()
    checkpoints.resume_with_torch_adam()


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Imports make a million objects that stay: collecting among them, then or later, finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
