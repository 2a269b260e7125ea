"""Imports the module that a test names."""

import importlib
import os


def preload(*, on_cpu: bool) -> None:
    """Import what LIGHT_PRELOAD names."""
    if name := os.environ.get("LIGHT_PRELOAD"):
        importlib.import_module(name)
