"""Axis 1: enumerates model shapes of an equal budget."""
