"""A batch while it runs: a live table on a terminal, a line an event elsewhere."""

from typing import TYPE_CHECKING

from quartet_plugin.model.batch import BatchResults, JobResult, JobState
from quartet_plugin.protocol.terminal import terminal_line
from quartet_plugin.report.batch_table import counts_line, heads_of, table_rows
from quartet_plugin.report.screen import Lines, Screen, has_screen, print_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_STYLES: dict[JobState, str] = {
    "done": "green",
    "failed": "red",
    "running": "bold",
    "stopped": "yellow",
    "waiting": "dim",
}
# What is looked at first on a screen that has no room for all jobs.
_FIRST: tuple[JobState, ...] = ("running", "failed", "stopped", "waiting", "done")


class BatchLines(Lines):
    """A line an event, and none for what only moves on: for logs and pipes."""

    is_live = False

    def changed(self, results: BatchResults) -> None:
        """Do nothing: a message has said what happened."""


class BatchScreen(Screen):
    """A table of the jobs, as many as the screen has room for, and their numbers below it."""

    is_live = True
    refresh_per_second = 2

    def __init__(self, console: "Console") -> None:
        super().__init__(console)
        self._results: BatchResults | None = None

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
    return BatchScreen(console) if has_screen(console) else BatchLines(print_line)
