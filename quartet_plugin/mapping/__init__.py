"""Axis 4: the physical slot of every rank."""
