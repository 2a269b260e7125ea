"""Modules, each in a file of its name."""
