"""Axis 2: layers to stages."""
