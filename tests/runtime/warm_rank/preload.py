"""The imports of the tests' ranks without a framework."""

import importlib


def preload(*, on_cpu: bool) -> None:
    """Import torch alone: nothing in it is replaced. The server adds what the ranks' program imports."""
    importlib.import_module("torch.distributed")
