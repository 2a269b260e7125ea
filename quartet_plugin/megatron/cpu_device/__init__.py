"""Trains unmodified `megatron.training` on CPU and gloo, to rehearse a GPU command where there is no GPU.

Importing this package does nothing and imports neither torch nor Megatron. A rank calls, in this order:

1. `ensure_environment()`, before torch is imported: allocator and thread settings that libraries read when
   a process starts;
2. `install()`, before Megatron is imported: torch's CUDA surface then answers for the CPU;
3. the training script, with `required_flags()` appended to its arguments;
4. `exit_now()`, when the script has ended well.

`uninstall()` restores every redirected name; modules that have imported one of the replacements keep it.
"""

import gc
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

from quartet_plugin.errors import SeamError
from quartet_plugin.megatron.cpu_device.process import (
    ensure_environment,
    exit_now,
    required_flags,
)
from quartet_plugin.rank.seams import Installation, Redirect, redirect

__all__ = [
    "ensure_environment",
    "exit_now",
    "install",
    "is_installed",
    "required_flags",
    "uninstall",
]

_installations: list[Installation] = []


def is_installed() -> bool:
    """Whether this process trains on the CPU device."""
    return bool(_installations)


def uninstall() -> None:
    """Restore every name that `install` has redirected. Raises SeamError where one was replaced since."""
    while _installations:
        _installations[-1].uninstall()
        _installations.pop()


def install(*, training: bool = True) -> None:
    """Redirect torch's CUDA surface to the CPU, in this process and in what it spawns, and import Megatron.

    Must run before Megatron is imported, because Megatron binds torch's names when it is imported; best also
    before torch, part of whose import is then left out. A second call changes nothing. Without `training`
    Megatron-Core alone is imported, for a training loop that is not `megatron.training`. Raises `SeamError`,
    with nothing redirected, when Megatron came first or is not installed, or when a name is missing.
    """
    if _installations:
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
    try:
        with _garbage_collection_off():
            _redirect_and_import(training=training)
    except BaseException:
        uninstall()
        raise


def _redirect_and_import(*, training: bool) -> None:
    from quartet_plugin.megatron.cpu_device import startup

    startup.defer_compilers(_installations.append)
    import torch

    from quartet_plugin.megatron.cpu_device import attention, checkpoints, cuda, latent_attention, norms
    from quartet_plugin.rank import device

    device.declare_cpu()
    torch.set_num_threads(1)
    # Megatron asserts it with tensor or context parallelism; it means nothing to a CPU.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _installations.append(redirect(redirects()))
    cuda.silence_fork_warning()
    startup.import_megatron(training=training)
    _redirect_where_imported()
    _installations.append(
        redirect(
            [
                *(startup.COMPILE_HELPERS, norms.L2_NORM, norms.TORCH_NORM),
                *attention.REDIRECTS,
                *latent_attention.redirects(),
                *checkpoints.redirects(),
            ]
        )
    )


def _redirect_where_imported() -> None:
    """Redirect what not every Megatron has and not every script imports, each module once it is imported."""
    from quartet_plugin.megatron.cpu_device import hybrid_layers, startup, state_space

    entries = (*state_space.REDIRECTS, *hybrid_layers.REDIRECTS)
    for name in dict.fromkeys(entry.module for entry in entries):
        of_module = [entry for entry in entries if entry.module == name]
        startup.after_import(name, lambda module, of_module=of_module: _redirect_known(module, of_module))  # type: ignore[misc]


def _redirect_known(module: ModuleType, entries: Iterable[Redirect]) -> None:
    if _installations:
        _installations.append(redirect(entry for entry in entries if hasattr(module, entry.name)))


def redirects() -> list[Redirect]:
    """Every name of torch, and one of multiprocessing, that answers for the CPU."""
    from quartet_plugin.megatron.cpu_device import collectives, cuda, spawn, startup, tensors

    return [
        *startup.COMPILERS,
        *tensors.redirects(),
        *cuda.redirects(),
        *collectives.REDIRECTS,
        spawn.REDIRECT,
    ]


@contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """Imports make a million objects that stay: collecting among them, then or later, finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
