"""Draws docs/img/live-table.svg: the live table of `quartet tune` on a terminal of 80 columns.

The trials are those of the recorded run in tests/golden; the time left and the
share of time are examples. The drawing fetches nothing: it uses a monospaced font of the reader's machine.
"""

import io
from collections.abc import Iterable
from html import escape
from pathlib import Path

from rich.console import Console
from rich.segment import Segment

from quartet_plugin.model.history import RunHistory
from quartet_plugin.model.launch import LaunchPosition, LaunchRecord
from quartet_plugin.report.live import LiveTable
from quartet_plugin.tuner.history import read_history

RUN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "run_0.1.0"
COLUMNS, ROWS = 80, 24
NUM_ROUNDS, TIME_LEFT_S, MEASURED_SHARE = 3, 214.0, 0.41
# Pixels.
CHARACTER, LINE, MARGIN, BAR, FONT = 8.4, 19, 14, 28, 14
GROUND, LETTERS, DIM, RUNNING = "#1e1e2e", "#dcdce6", "#8f90a6", "#7fd6e6"
TITLE = "quartet tune --config q.yaml -- torchrun --nproc-per-node 2 pretrain_gpt.py"


def live_table_picture() -> str:
    """The picture as SVG."""
    console = Console(file=io.StringIO(), force_terminal=True, width=COLUMNS, height=ROWS, color_system=None)
    lines = console.render_lines(table_of(read_history(RUN), console).render(), pad=False)
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, BAR + len(lines) * LINE + MARGIN
    top = BAR + FONT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img"'
            ' aria-label="The live table of quartet tune on a terminal">',
            f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>',
            f'<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{FONT}" fill="{LETTERS}">',
            f'<text x="{MARGIN}" y="{FONT + 4}" font-size="12" fill="{DIM}">{escape(TITLE)}</text>',
            *(text_line(line, y=top + index * LINE) for index, line in enumerate(lines)),
            "</g>",
            "</svg>",
            "",
        ]
    )


def table_of(history: RunHistory, console: Console) -> LiveTable:
    """The table in the second final round of the recorded run's last trial."""
    table = LiveTable(console, clock=lambda: 0.0)
    for row in history.trials:
        launch = LaunchRecord(
            label=str(row.number),
            plan=row.plan if row.number else None,
            outcome=row.outcome,
            iteration_s=row.iteration_s,
            tokens_per_s=row.tokens_per_s,
            versus_baseline=history.versus_baseline(row),
        )
        table.plan_finished(launch)
    last = history.trials[-1]
    place = LaunchPosition.of_round(1, num_rounds=NUM_ROUNDS)
    table.plan_started(
        f"{last.number} round 2",
        last.plan,
        phase="final",
        time_left_s=TIME_LEFT_S,
        position=place,
        measured_share=MEASURED_SHARE,
    )
    table.progressed("measure", iteration=4, num_iterations=13)
    return table


def text_line(segments: Iterable[Segment], *, y: float) -> str:
    """A line of the terminal: every run of letters of one style at its column."""
    parts, column = [], 0
    for segment in segments:
        style, text = segment.style, segment.text
        if text.strip():
            start = column + len(text) - len(text.lstrip())
            words = text.strip()
            colour = RUNNING if style and style.color else DIM if style and style.dim else LETTERS
            weight = ' font-weight="bold"' if style and style.bold else ""
            parts.append(
                f'<tspan x="{MARGIN + start * CHARACTER:g}" textLength="{len(words) * CHARACTER:g}"'
                f' fill="{colour}"{weight}>{escape(words)}</tspan>'
            )
        column += len(text)
    return f'<text y="{y:g}" xml:space="preserve">{"".join(parts)}</text>'
