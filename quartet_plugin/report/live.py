"""A run while it runs: a live table on a terminal, one line an event elsewhere."""

import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quartet_plugin.model.launch import LaunchPosition, LaunchRecord, Phase
from quartet_plugin.model.plan import Plan
from quartet_plugin.protocol.terminal import terminal_line
from quartet_plugin.report.formatting import (
    SECONDS_HEAD,
    SPEEDUP_HEAD,
    drift_note,
    duration,
    iteration_words,
    speedup_sentence,
    speedup_words,
)
from quartet_plugin.report.launch_words import launch_words
from quartet_plugin.report.screen import Lines, Screen, has_screen, print_line
from quartet_plugin.space.plan_label import plan_label

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

MAX_ROWS = 24
# A terminal with fewer columns gets the table without those that say the same twice.
WIDE = 116
RUNNING = "running"
_SHOWN_PHASES = ("init", "measure")
_COLUMNS = {
    "trial": "left",
    "shape": "left",
    "layout": "left",
    "split": "left",
    "schedule": "left",
    "mapping": "left",
    "outcome": "left",
    SECONDS_HEAD: "right",
    "tokens/s": "right",
    SPEEDUP_HEAD: "right",
}
_WIDE_ALONE = ("outcome", "tokens/s")
# What a narrow terminal does without, in this order, so that every number stays whole.
_LEFT_OUT_FIRST = ("mapping", "split", "shape", "schedule", "layout")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedLaunch:
    """A launch without a result yet; `began_s` on the watcher's clock, `plan` None for the user's command."""

    label: str
    phase: Phase
    plan: Plan | None
    began_s: float
    time_left_s: float | None
    position: LaunchPosition | None = None
    rank_phase: str = "launch"
    iteration: int = 0
    num_iterations: int = 0

    def sentence(self, *, now_s: float, names_plan: bool = False) -> str:
        """The launch's phase, iteration, elapsed and remaining time; with `names_plan` also its plan."""
        number = self.label.partition(" ")[0]
        name = launch_words(
            self.phase, number=int(number) if number.isdecimal() else 0, position=self.position
        )
        step = f" {self.iteration}/{self.num_iterations}" if self.num_iterations else ""
        elapsed_s = now_s - self.began_s
        left = "" if self.time_left_s is None else f"; about {duration(self.time_left_s - elapsed_s)} left"
        plan = f"{plan_label(self.plan)}: " if names_plan and self.plan is not None else ""
        return f"{name}: {plan}{self.rank_phase}{step}, {duration(elapsed_s)}{left}"


class PlainLines(Lines):
    """One line an event: for logs and pipes."""

    def __init__(self, write: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(write)
        self._clock = clock
        self._running: WatchedLaunch | None = None

    def plan_started(
        self,
        label: str,
        plan: Plan | None,
        *,
        phase: Phase,
        time_left_s: float | None,
        position: LaunchPosition | None = None,
        measured_share: float | None = None,
    ) -> None:
        """Write a line that says which launch begins, with which plan, and what share of time measured."""
        began_s = self._clock()
        self._running = WatchedLaunch(
            label=label, phase=phase, plan=plan, began_s=began_s, time_left_s=time_left_s, position=position
        )
        words = self._running.sentence(now_s=began_s, names_plan=True)
        share = "" if measured_share is None else f"; {share_words(measured_share)}"
        self._write(terminal_line(f"{words}{share}"))

    def progressed(self, phase: str, *, iteration: int, num_iterations: int) -> None:
        """Write a line where a process enters another phase, not one for each iteration."""
        running = self._running
        if running is None or running.rank_phase == phase or phase not in _SHOWN_PHASES:
            return
        self._running = replace(running, rank_phase=phase, iteration=iteration, num_iterations=num_iterations)
        self._write(terminal_line(self._running.sentence(now_s=self._clock())))

    def plan_finished(self, launch: LaunchRecord) -> None:
        """Write a line with the result of the launch."""
        self._running = None
        self._write(terminal_line(sentence(launch)))


class LiveTable(Screen):
    """A table of the latest launches, those that run included, and below it how far they are."""

    def __init__(self, console: "Console", *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console)
        self._clock = clock
        self._rows: list[LaunchRecord] = []
        self._running: dict[str, WatchedLaunch] = {}
        self._measured_share: float | None = None

    def __exit__(self, *exception: object) -> None:
        """Leave the last table on the screen."""
        self._running.clear()
        self._measured_share = None
        super().__exit__(*exception)

    def plan_started(
        self,
        label: str,
        plan: Plan | None,
        *,
        phase: Phase,
        time_left_s: float | None,
        position: LaunchPosition | None = None,
        measured_share: float | None = None,
    ) -> None:
        """Show the launch below the table, and the share of the time so far in measured iterations."""
        self._drop(label)
        self._measured_share = measured_share
        self._running[label] = WatchedLaunch(
            label=label,
            phase=phase,
            plan=plan,
            began_s=self._clock(),
            time_left_s=time_left_s,
            position=position,
        )

    def progressed(self, phase: str, *, iteration: int, num_iterations: int) -> None:
        """Move the latest one on."""
        label = next(reversed(self._running), None)
        if label is not None:
            self._running[label] = replace(
                self._running[label], rank_phase=phase, iteration=iteration, num_iterations=num_iterations
            )

    def plan_finished(self, launch: LaunchRecord) -> None:
        """Put it into the table; a launch that was not measured also says why."""
        self._drop(launch.label)
        self._rows.append(launch)
        if launch.iteration_s is None:
            self.message(sentence(launch))

    def render(self) -> "RenderableType":
        """The screen now."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        is_wide = self._console.width >= WIDE
        gap = 2 if is_wide else 1
        shown = self._shown()
        rows = [row_cells(row, split_width=24 if is_wide else 10) for row in shown]
        names = self._columns(rows, gap=gap)
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
        for name in names:
            table.add_column(name, justify="right" if _COLUMNS[name] == "right" else "left", no_wrap=True)
        best = max((row.versus_baseline or 0.0 for row in self._rows), default=0.0)
        for row, cells in zip(shown, rows, strict=True):
            is_best = row.versus_baseline is not None and row.versus_baseline == best
            if row.plan is None and "shape" not in names:
                cells["layout"] = cells["shape"]
            is_lost = row.iteration_s is None and row.outcome != RUNNING
            style = "bold" if is_best else "dim" if is_lost else ""
            table.add_row(*(Text(terminal_line(cells[name])) for name in names), style=style)
        notes = [Text(note, style="dim") for note in self._notes()]
        under_way = [Text(terminal_line(words), style="cyan") for words in self._under_way()]
        return Group(table, *notes, *under_way)

    def _notes(self) -> list[str]:
        """The meaning of the marks in the table, and the share of the time that measured."""
        drift = drift_note(row.drift for row in self._rows if row.versus_baseline is not None)
        share = None if self._measured_share is None else share_words(self._measured_share)
        notes = [note for note in (drift, share) if note is not None]
        return [line for note in notes for line in textwrap.wrap(note, self._console.width)]

    def _columns(self, rows: list[dict[str, str]], *, gap: int) -> list[str]:
        """The columns for which the terminal has room."""
        is_wide = self._console.width >= WIDE
        names = [name for name in _COLUMNS if is_wide or name not in _WIDE_ALONE]
        widths = {name: max(map(len, [name, *(row[name] for row in rows)])) for name in names}
        for name in _LEFT_OUT_FIRST:
            if sum(widths[kept] + gap for kept in names) <= self._console.width:
                break
            names.remove(name)
        return names

    def _under_way(self) -> list[str]:
        """The running launch in one line; for several launches only their labels."""
        running, now_s = list(self._running.values()), self._clock()
        if len(running) <= 1:
            return [launch.sentence(now_s=now_s) for launch in running]
        longest_s = max(now_s - launch.began_s for launch in running)
        left_s = running[-1].time_left_s
        left = "" if left_s is None else f"; about {duration(left_s - now_s + running[-1].began_s)} left"
        latest = running[-1].position
        place = "" if latest is None else f", {latest.index} of {latest.count}"
        return [f"trials {', '.join(self._running)}{place}: {duration(longest_s)}{left}"]

    def _drop(self, label: str) -> None:
        """Forget a launch, and the runs that were made for it (its label with more words)."""
        for name in [name for name in self._running if name == label or name.startswith(f"{label} ")]:
            del self._running[name]

    def _shown(self) -> list[LaunchRecord]:
        """The baseline, the latest rows and what runs, as many as the screen has room for."""
        running = [
            LaunchRecord(label=launch.label, plan=launch.plan, outcome=RUNNING)
            for launch in self._running.values()
        ]
        rows = [*self._rows, *running]
        num_rows = max(4, min(MAX_ROWS, self._console.height - 3 - len(self._notes())))
        return rows if len(rows) <= num_rows else [rows[0], *rows[-(num_rows - 1) :]]


def share_words(measured_share: float) -> str:
    """The share of the time so far that was spent in measured iterations, not in starts, gate or waiting."""
    return f"{100 * measured_share:.0f} % of the time so far spent in measured iterations"


def row_cells(launch: LaunchRecord, *, split_width: int) -> dict[str, str]:
    """The cells of one row by column; a launch that was not measured has its outcome in the last one."""
    ratio = launch.versus_baseline
    reached = "" if launch.iteration_s is not None else launch.outcome.lower()
    if ratio is not None:
        reached = speedup_words(ratio, drift=launch.drift)
    names = ("shape", "layout", "split", "schedule", "mapping")
    return {
        "trial": launch.label,
        **dict(zip(names, plan_cells(launch.plan, split_width=split_width), strict=True)),
        "outcome": launch.outcome.lower(),
        SECONDS_HEAD: "" if launch.iteration_s is None else iteration_words(launch.iteration_s),
        "tokens/s": "" if launch.tokens_per_s is None else f"{launch.tokens_per_s:,.0f}",
        SPEEDUP_HEAD: reached,
    }


def sentence(launch: LaunchRecord) -> str:
    """The launch in one line."""
    words = "your command" if launch.plan is None else plan_label(launch.plan)
    if launch.iteration_s is None:
        return f"trial {launch.label}: {words}: {launch.outcome}: {launch.reason}"
    speed = "" if launch.tokens_per_s is None else f", {launch.tokens_per_s:,.0f} tokens/s"
    ratio = ""
    if launch.versus_baseline is not None:
        ratio = f", {speedup_sentence(launch.versus_baseline, drift=launch.drift)}"
    note = "" if launch.outcome == "OK" else f" ({launch.outcome.lower()}: {launch.reason})"
    if launch.outcome == "OK" and launch.reason.startswith("cut short"):
        note = f" ({launch.reason})"
    seconds = iteration_words(launch.iteration_s)
    return f"trial {launch.label}: {words}: {seconds} s/iteration{speed}{ratio}{note}"


def plan_cells(plan: Plan | None, *, split_width: int = 24) -> tuple[str, str, str, str, str]:
    """Shape, layout, split, schedule and mapping of a plan; the user's command has none."""
    if plan is None:
        return ("your", "command", "", "", "")
    split = plan.split.label
    return (
        plan.shape_label,
        plan.layout.label,
        split if len(split) <= split_width else f"{split[: split_width - 3]}...",
        plan.schedule.label,
        plan.mapping.label,
    )


def reporter(console: "Console", *, clock: Callable[[], float] = time.monotonic) -> PlainLines | LiveTable:
    """A live table on a terminal, plain lines elsewhere."""
    return LiveTable(console, clock=clock) if has_screen(console) else PlainLines(print_line, clock=clock)
