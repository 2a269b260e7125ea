"""The imports of a rank of DeepSpeed that do not depend on its arguments, for a trial server."""

import importlib
import os

from quartet_plugin.deepspeed.cpu import use_cpu
from quartet_plugin.model.accelerator import shows_accelerator

# What a rank imports in a trial, beside the user's script: the adapter's modules and DeepSpeed's.
_MODULES = (
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.pipe.module",
    "quartet_plugin.deepspeed.api",
    "quartet_plugin.deepspeed.entry",
    "quartet_plugin.deepspeed.execution",
    "quartet_plugin.deepspeed.measure",
    "quartet_plugin.deepspeed.parity",
    "quartet_plugin.deepspeed.planning",
    "quartet_plugin.deepspeed.seams",
    "quartet_plugin.rank.files",
)


def preload(*, on_cpu: bool) -> None:
    """Import what every rank imports, after the choice of the CPU where a rank would choose it.

    Raises what the imports raise.
    """
    if on_cpu or not shows_accelerator(os.environ):
        use_cpu()
    for name in _MODULES:
        importlib.import_module(name)
