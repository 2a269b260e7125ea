"""Axis 2: layers to pipeline stages."""
