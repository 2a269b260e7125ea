"""A run while it runs: a live table on a terminal, one line an event elsewhere."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, Self

from quartet_plugin.model.plan import Plan
from quartet_plugin.report.tables import shape_label

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

Stage = Literal["baseline", "search", "final"]

MAX_ROWS = 24
_TOLD_PHASES = ("init", "measure")
_COLUMNS = (
    "trial",
    "shape",
    "layout",
    "split",
    "schedule",
    "mapping",
    "outcome",
    "s/iter",
    "tokens/s",
    "vs baseline",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A launch that ended."""

    label: str
    plan: Plan | None
    outcome: str
    reason: str
    iteration_s: float | None
    tokens_per_s: float | None
    versus_baseline: float | None

    def cells(self) -> tuple[str, ...]:
        """The table's cells; a measured launch shows numbers where another one shows its outcome."""
        return (
            self.label,
            *plan_cells(self.plan),
            self.outcome.lower(),
            "" if self.iteration_s is None else f"{self.iteration_s:.3f}",
            "" if self.tokens_per_s is None else f"{self.tokens_per_s:,.0f}",
            "" if self.versus_baseline is None else f"{self.versus_baseline:.2f}x",
        )

    def sentence(self) -> str:
        """The launch in one line."""
        what = "your own command" if self.plan is None else ", ".join(plan_cells(self.plan))
        if self.iteration_s is None or self.tokens_per_s is None:
            return f"trial {self.label}: {what}: {self.outcome}: {self.reason}"
        ratio = "" if self.versus_baseline is None else f", {self.versus_baseline:.2f}x the baseline"
        note = "" if self.outcome == "OK" else f" ({self.outcome.lower()}: {self.reason})"
        return (
            f"trial {self.label}: {what}: {self.iteration_s:.3f} s/iteration, "
            f"{self.tokens_per_s:,.0f} tokens/s{ratio}{note}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The launch that runs now."""

    label: str
    plan: Plan | None
    stage: Stage
    began_s: float
    time_left_s: float | None
    phase: str = "launch"
    iteration: int = 0
    num_iterations: int = 0

    def sentence(self, *, now_s: float) -> str:
        """Where it is and what is left, in one line."""
        kind = {"baseline": "baseline", "search": "trial", "final": "final, trial"}[self.stage]
        name = kind if self.stage == "baseline" else f"{kind} {self.label}"
        step = f" {self.iteration}/{self.num_iterations}" if self.num_iterations else ""
        elapsed_s = now_s - self.began_s
        left = "" if self.time_left_s is None else f"; about {_duration(self.time_left_s - elapsed_s)} left"
        return f"{name}: {self.phase}{step}, {_duration(elapsed_s)}{left}"


class Reporter(Protocol):
    """What the command line shows a run with; a context manager."""

    def __enter__(self) -> Self:
        """Begin to show."""

    def __exit__(self, *exception: object) -> None:
        """Leave the screen as it should stay."""

    def message(self, text: str) -> None:
        """One line for the user."""

    def plan_started(self, label: str, plan: Plan | None, *, stage: Stage, time_left_s: float | None) -> None:
        """A launch begins."""

    def progressed(self, phase: str, *, iteration: int, num_iterations: int) -> None:
        """Where the running launch is."""

    def plan_finished(
        self,
        label: str,
        plan: Plan | None,
        *,
        outcome: str,
        reason: str,
        iteration_s: float | None,
        tokens_per_s: float | None,
        versus_baseline: float | None,
    ) -> None:
        """A launch ended."""


class PlainLines:
    """One line an event: for logs and pipes."""

    def __init__(self, write: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._running: Running | None = None

    def __enter__(self) -> Self:
        """Nothing to prepare."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing to clean up."""

    def message(self, text: str) -> None:
        """One line."""
        self._write(text)

    def plan_started(self, label: str, plan: Plan | None, *, stage: Stage, time_left_s: float | None) -> None:
        """One line."""
        self._running = Running(
            label=label, plan=plan, stage=stage, began_s=self._clock(), time_left_s=time_left_s
        )
        self._write(self._running.sentence(now_s=self._clock()))

    def progressed(self, phase: str, *, iteration: int, num_iterations: int) -> None:
        """A line where the wait changes its kind, not one for each iteration."""
        running = self._running
        if running is None or running.phase == phase or phase not in _TOLD_PHASES:
            return
        self._running = replace(running, phase=phase, iteration=iteration, num_iterations=num_iterations)
        self._write(self._running.sentence(now_s=self._clock()))

    def plan_finished(
        self,
        label: str,
        plan: Plan | None,
        *,
        outcome: str,
        reason: str,
        iteration_s: float | None,
        tokens_per_s: float | None,
        versus_baseline: float | None,
    ) -> None:
        """One line."""
        self._running = None
        row = Row(
            label=label,
            plan=plan,
            outcome=outcome,
            reason=reason,
            iteration_s=iteration_s,
            tokens_per_s=tokens_per_s,
            versus_baseline=versus_baseline,
        )
        self._write(row.sentence())


class LiveTable:
    """A table of the latest launches, and below it the one that runs."""

    def __init__(self, console: "Console", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._rows: list[Row] = []
        self._running: Running | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        """Show the table until the end of the block."""
        from rich.live import Live

        self._live = Live(
            get_renderable=self.render, console=self._console, refresh_per_second=4, transient=False
        )
        self._live.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the last table on the screen."""
        self._running = None
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def message(self, text: str) -> None:
        """A line above the table."""
        from rich.text import Text

        self._console.print(Text(text))

    def plan_started(self, label: str, plan: Plan | None, *, stage: Stage, time_left_s: float | None) -> None:
        """Show the launch below the table."""
        self._running = Running(
            label=label, plan=plan, stage=stage, began_s=self._clock(), time_left_s=time_left_s
        )

    def progressed(self, phase: str, *, iteration: int, num_iterations: int) -> None:
        """Move it on."""
        if self._running is not None:
            self._running = replace(
                self._running, phase=phase, iteration=iteration, num_iterations=num_iterations
            )

    def plan_finished(
        self,
        label: str,
        plan: Plan | None,
        *,
        outcome: str,
        reason: str,
        iteration_s: float | None,
        tokens_per_s: float | None,
        versus_baseline: float | None,
    ) -> None:
        """Put it into the table; a launch that was not measured also says why."""
        self._running = None
        row = Row(
            label=label,
            plan=plan,
            outcome=outcome,
            reason=reason,
            iteration_s=iteration_s,
            tokens_per_s=tokens_per_s,
            versus_baseline=versus_baseline,
        )
        self._rows.append(row)
        if row.iteration_s is None:
            self.message(row.sentence())

    def render(self) -> "RenderableType":
        """The screen now."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        for name in _COLUMNS:
            right = name in ("s/iter", "tokens/s", "vs baseline")
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
        best = max((row.versus_baseline or 0.0 for row in self._rows), default=0.0)
        for row in self._shown():
            is_best = row.versus_baseline is not None and row.versus_baseline == best
            style = "bold" if is_best else "dim" if row.iteration_s is None else ""
            table.add_row(*(Text(cell) for cell in row.cells()), style=style)
        if self._running is None:
            return table
        return Group(table, Text(self._running.sentence(now_s=self._clock()), style="cyan"))

    def _shown(self) -> list[Row]:
        """The baseline and the latest rows."""
        if len(self._rows) <= MAX_ROWS:
            return self._rows
        return [self._rows[0], *self._rows[-(MAX_ROWS - 1) :]]


def plan_cells(plan: Plan | None) -> tuple[str, str, str, str, str]:
    """Shape, layout, split, schedule and mapping of a plan; the user's own command has none."""
    if plan is None:
        return ("your own", "command", "", "", "")
    split = plan.split.label
    return (
        shape_label(plan.shape),
        plan.layout.label,
        split if len(split) <= 24 else f"{split[:21]}...",
        plan.schedule.label,
        plan.mapping.label,
    )


def reporter(console: "Console", *, clock: Callable[[], float] = time.monotonic) -> Reporter:
    """A live table on a terminal, plain lines elsewhere."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveTable(console, clock=clock)
    return PlainLines(lambda text: print(text, flush=True), clock=clock)


def _duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
