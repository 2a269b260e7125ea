"""The imports of a rank of Megatron that do not depend on its arguments, for a trial server."""

import importlib

from quartet_plugin.megatron import cpu_device, support

# What a rank imports in a trial, beside the user's script: the adapter's modules and Megatron's.
_MODULES = (
    "megatron.training.training",
    "megatron.core.models.gpt",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "quartet_plugin.megatron.entry",
    "quartet_plugin.megatron.apply",
    "quartet_plugin.megatron.compared_iterations",
    "quartet_plugin.megatron.execution",
    "quartet_plugin.megatron.measure",
    "quartet_plugin.megatron.parity",
    "quartet_plugin.megatron.runtime",
    "quartet_plugin.megatron.seams.declared",
    "quartet_plugin.megatron.side_effects",
    "quartet_plugin.rank.files",
)


def preload(*, on_cpu: bool) -> None:
    """Import what every rank imports, after the CPU device where a rank would install it.

    Raises what the imports raise, and SeamError where Megatron is not installed.
    """
    if on_cpu:
        cpu_device.ensure_environment()
        cpu_device.install()
    for name in _MODULES:
        importlib.import_module(name)
    support.read_sources()
