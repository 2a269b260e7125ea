"""The imports of a rank of DeepSpeed that do not depend on its arguments, for a trial server."""

import importlib
import os

from quartet_plugin.deepspeed import seams
from quartet_plugin.deepspeed.cpu import use_cpu
from quartet_plugin.model.accelerator import shows_accelerator

# What a rank imports in a trial, beside the user's script: the adapter's modules and DeepSpeed's, and torch's
# compiler, which torch imports as soon as an optimizer is made.
_MODULES = (
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.pipe.module",
    "quartet_plugin.deepspeed.api",
    "quartet_plugin.deepspeed.entry",
    "quartet_plugin.deepspeed.execution",
    "quartet_plugin.deepspeed.measure",
    "quartet_plugin.deepspeed.parity",
    "quartet_plugin.deepspeed.planning",
    "quartet_plugin.rank.files",
    "torch._dynamo",
)


def preload(*, on_cpu: bool) -> None:
    """Import what every rank imports, after the choice of the CPU where a rank would choose it.

    DeepSpeed's functions are compared with the seams: a rank that is forked then has the answer. Raises what
    the imports raise, and SeamError for a DeepSpeed that is not supported.
    """
    if on_cpu or not shows_accelerator(os.environ):
        use_cpu()
    for name in _MODULES:
        importlib.import_module(name)
    seams.check()
