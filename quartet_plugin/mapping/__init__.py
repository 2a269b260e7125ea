"""Axis 4: chooses the physical slot of every rank."""
