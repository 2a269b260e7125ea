"""The entry points of engines, by name; looking for them loads nothing."""

from importlib.metadata import EntryPoint, entry_points

GROUP = "quartet_plugin.engines"


def installed_engines() -> tuple[EntryPoint, ...]:
    """The entry points of all engines that are installed."""
    return tuple(entry_points(group=GROUP))
