"""Axis 4: which physical slot plays which rank."""
