"""Axis 2: layers to stages, embedding and head included."""

from quartet_plugin.split.layers import (
    Split,
    balanced_split,
    check_split,
    device_loads,
    even_split,
    minimum_counts,
    move,
)

__all__ = ["Split", "balanced_split", "check_split", "device_loads", "even_split", "minimum_counts", "move"]
