"""Axis 3: actions, named schedules, the family, simulation, lowering and search."""
