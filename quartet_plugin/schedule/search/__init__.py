"""Search over placement, split and order."""

from quartet_plugin.schedule.search.engine import search
from quartet_plugin.schedule.search.problem import NamedResult, SearchResult

__all__ = ["NamedResult", "SearchResult", "search"]
