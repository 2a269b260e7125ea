"""Search over placement, split and order."""

from quartet_plugin.schedule.search.engine import compile_kernels, search
from quartet_plugin.schedule.search.result import Named, SearchResult

__all__ = ["Named", "SearchResult", "compile_kernels", "search"]
