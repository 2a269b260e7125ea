"""A batch while it runs: a live table on a terminal, a line an event elsewhere."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from quartet_plugin.model.batch import BatchResults, JobResult, JobState
from quartet_plugin.protocol.terminal import terminal_line
from quartet_plugin.report.batch_table import counts_line, heads_of, table_rows

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_STYLES: dict[JobState, str] = {
    "done": "green",
    "failed": "red",
    "running": "bold",
    "stopped": "yellow",
    "waiting": "dim",
}
# What is looked at first on a screen that has no room for all jobs.
_FIRST: tuple[JobState, ...] = ("running", "failed", "stopped", "waiting", "done")


class BatchLines:
    """A line an event, and none for what only moves on: for logs and pipes."""

    is_live = False

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def __enter__(self) -> Self:
        """Enter the block; lines need no preparation."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the block; lines need no cleaning up."""

    def message(self, text: str) -> None:
        """Write `text` as a line of its own."""
        self._write(terminal_line(text))

    def changed(self, results: BatchResults) -> None:
        """Do nothing: a message has said what happened."""


class BatchScreen:
    """A table of the jobs, as many as the screen has room for, and their numbers below it."""

    is_live = True

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._results: BatchResults | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        """Show the table until the end of the block."""
        from rich.live import Live

        self._live = Live(get_renderable=self.render, console=self._console, refresh_per_second=2)
        self._live.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the last table on the screen."""
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def message(self, text: str) -> None:
        """Print a line above the table."""
        from rich.text import Text

        self._console.print(Text(terminal_line(text)))

    def changed(self, results: BatchResults) -> None:
        """Show these results from now on."""
        self._results = results

    def render(self) -> "RenderableType":
        """The screen now."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        if self._results is None:
            return Text("")
        results = self._results
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for head in heads_of(results):
            is_number = head.startswith(">")
            table.add_column(head.removeprefix(">"), justify="right" if is_number else "left", no_wrap=True)
        shown = shown_jobs(results, num_rows=max(4, self._console.height - 4))
        rows = dict(zip(results.jobs, table_rows(results, width=self._console.width), strict=True))
        for job in shown:
            table.add_row(*(Text(terminal_line(cell)) for cell in rows[job]), style=_STYLES[job.state])
        more = len(results.jobs) - len(shown)
        notes = [Text(f"and {more} more", style="dim")] if more else []
        return Group(table, *notes, Text(counts_line(results), style="cyan"))


def shown_jobs(results: BatchResults, *, num_rows: int) -> list[JobResult]:
    """The jobs for which a screen has room, in the file's order: those that run first, then the others."""
    jobs = sorted(results.jobs, key=lambda job: _FIRST.index(job.state))[:num_rows]
    return [job for job in results.jobs if job in jobs]


def batch_observer(console: "Console") -> BatchLines | BatchScreen:
    """A live table on a terminal, plain lines elsewhere."""
    if console.is_terminal and not console.is_dumb_terminal:
        return BatchScreen(console)
    return BatchLines(lambda text: print(text, flush=True))
