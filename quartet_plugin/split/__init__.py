"""Axis 2: divides the layers between the pipeline stages."""
