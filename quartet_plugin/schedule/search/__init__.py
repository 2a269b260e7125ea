"""Search over placement, split and order."""

from quartet_plugin.schedule.search.engine import Named, SearchResult, search

__all__ = ["Named", "SearchResult", "search"]
