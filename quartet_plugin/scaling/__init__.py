"""Axis 1: model shapes of an equal budget."""
