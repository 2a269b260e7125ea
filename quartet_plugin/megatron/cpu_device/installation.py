"""Puts the parts of the CPU device in place, in the order in which they depend on each other."""

import sys

from quartet_plugin.errors import SeamError

_installed = False


def is_installed() -> bool:
    """Whether this process trains on the CPU device."""
    return _installed


def install() -> None:
    """Redirect torch's CUDA surface to the CPU, in this process and in what it spawns.

    Must run before Megatron is imported, because Megatron binds torch's names when it is imported. A second
    call changes nothing. Raises `SeamError` when Megatron came first.
    """
    global _installed
    if _installed:
        return
    if "megatron.core" in sys.modules:
        raise SeamError(
            "megatron.core is already imported: the CPU device must be installed before it; "
            "start the script through `-m quartet_plugin.megatron`"
        )
    from quartet_plugin.megatron.cpu_device import startup

    startup.defer_imports()
    import torch

    from quartet_plugin.megatron.cpu_device import collectives, cuda, spawn, tensors

    torch.set_num_threads(1)
    tensors.redirect()
    cuda.redirect()
    collectives.redirect()
    startup.skip_compilers()
    spawn.carry_to_children()
    _installed = True
