"""Whoever shows a batch while it runs."""

from typing import Protocol

from quartet_plugin.model.batch import BatchResults


class BatchObserver(Protocol):
    """Whoever shows a batch that runs; only a live one is shown what merely moves on."""

    is_live: bool

    def message(self, text: str) -> None:
        """Show a line."""

    def changed(self, results: BatchResults) -> None:
        """Show the state of every job."""
