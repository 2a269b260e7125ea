"""Stands for Transformer Engine 2.9; see tests/twins/__init__.py."""

from transformer_engine import common, pytorch

__version__ = "2.9.0"
__all__ = ["common", "pytorch"]
