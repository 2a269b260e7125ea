"""Tunes shape, split, pipeline schedule and rank mapping of LLM pretraining with short live trials.

Importing this package patches nothing and imports neither torch nor Megatron.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("quartet-plugin")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"
