"""The report's tables: every trial, trials without a time, features left out in trials, and the sources."""

import shlex
from collections.abc import Sequence, Set

from quartet_plugin.model.history import PARTS, RunHistory, TrialRow
from quartet_plugin.protocol.masking import MASK
from quartet_plugin.report import markup
from quartet_plugin.report.formatting import SECONDS_HEAD, SPEEDUP_HEAD, clean, size
from quartet_plugin.report.tables import OBJECTIVE_WORDS
from quartet_plugin.report.trial_table import (
    NUMBER_HEADS,
    class_of,
    label_of,
    notes_of,
    number_cells,
    outcome_of,
)
from quartet_plugin.space.features import lock_lines

MAX_ROWS = 2_000
# What a narrow window shows of a row without being moved sideways.
_FIRST = (SECONDS_HEAD, SPEEDUP_HEAD)
_PLAIN = {"class", "outcome"}
# Characters of a plan's part up to which its cell is one line.
_SHORT = 40
_TAGS = {
    "OK": "good",
    "UNSTABLE": "warn",
    "INFEASIBLE": "bad",
    "WRONG": "bad",
    "NOT_AS_PLANNED": "bad",
    "INFRA": "warn",
    "HARNESS": "bad",
}


def trials(history: RunHistory) -> str:
    """The table of every trial."""
    others = [head for head in NUMBER_HEADS if head not in _FIRST]
    heads = ("trial", *_FIRST, *PARTS, "class", "outcome", *others)
    numbers = set(NUMBER_HEADS)
    best = history.best
    chosen = history.winner.provenance.trial if history.winner else best.number if best else None
    body = []
    for row in history.trials[:MAX_ROWS]:
        is_faint = not row.is_measured or row.repeats is not None
        style = "best" if row.number == chosen else "faint" if is_faint else ""
        cells = [
            markup.cell(value, style=_style_of(head, row, numbers=numbers))
            for head, value in _values(row, history, heads=heads)
        ]
        body.append(f'<tr class="{style}">{"".join(cells)}</tr>')
    more = len(history.trials) - MAX_ROWS
    notes = notes_of(history)
    if more > 0:
        notes.append(f"The first {MAX_ROWS}; {more} more are in quartet trials.")
    table = markup.grid(heads, body, label="Every trial", numbers=numbers)
    return markup.section("Every trial", table + "".join(map(markup.note, notes)))


def _values(row: TrialRow, history: RunHistory, *, heads: Sequence[str]) -> list[tuple[str, str]]:
    """The markup of each cell with its head."""
    values = {
        "trial": markup.text(str(row.number)),
        **{part: markup.breakable(clean(row.labels.get(part, ""), limit=160)) for part in PARTS},
        "class": markup.text(class_of(row)),
        "outcome": _tag(row),
        **dict(zip(NUMBER_HEADS, map(markup.text, number_cells(row, history)), strict=True)),
    }
    return [(head, values[head]) for head in heads]


def _style_of(head: str, row: TrialRow, *, numbers: Set[str]) -> str:
    if head in numbers:
        return "number"
    if head in PARTS:
        return "plain" if len(row.labels.get(head, "")) <= _SHORT else "long"
    return "plain" if head in _PLAIN else ""


def failed(history: RunHistory) -> str:
    """The table of the trials without a time, with their reasons."""
    rows = [row for row in history.trials if row.verdict and not row.is_measured and row.repeats is None]
    if not rows:
        return markup.section("Refused and failed", markup.note("None: every trial was measured."))
    body = []
    for row in rows[:MAX_ROWS]:
        excess = f" ({size(row.memory_excess_bytes)} too much)" if row.memory_excess_bytes else ""
        body.append(
            "<tr>"
            + markup.cell(markup.text(str(row.number)))
            + markup.cell(_tag(row))
            + markup.cell(markup.breakable(clean(label_of(row), limit=240)), style="long")
            + markup.cell(markup.text(row.phase))
            + f'<td class="reason">{markup.text(clean(row.reason) + excess)}</td></tr>'
        )
    heads = ("trial", "outcome", "plan", "phase", "reason")
    return markup.section("Refused and failed", markup.grid(heads, body, label="Refused and failed"))


def rank_memory(rows: Sequence[tuple[str, TrialRow]]) -> str:
    """The table of every rank's peak memory; `rows` are trials with their names, such as the best plan's."""
    known = [(name, {rank.rank: rank.peak_bytes for rank in row.ranks}) for name, row in rows if row.ranks]
    ranks = sorted({rank for _, peaks in known for rank in peaks})
    if not ranks:
        return ""
    body = [
        (str(rank), *(size(peaks[rank]) if rank in peaks else "" for _, peaks in known))
        for rank in ranks[:MAX_ROWS]
    ]
    heads = ("RANK", *(name for name, _ in known))
    table = markup.table(heads, body, label="Peak memory of every rank")
    more = len(ranks) - MAX_ROWS
    note = markup.note(f"The first {MAX_ROWS}; {more} more are in the trials' folders.") if more > 0 else ""
    return markup.details(f"Peak memory of every rank ({len(ranks)})", table + note)


def left_out(history: RunHistory) -> str:
    """The list of flags and axes that the search left as they were."""
    items = []
    if history.neutralised:
        items.append("Left out in trials, back in training: " + ", ".join(history.neutralised))
    items += [f"{words[:1].upper()}{words[1:]}" for words in lock_lines(history.locked)]
    others = [feature for feature in history.features if feature not in history.locked.values()]
    if others:
        items.append("Features of the job that keep no further axis: " + ", ".join(others))
    if history.config.get("search", {}).get("scaling") is None:
        items.append("Width and depth were not searched, because another shape is another model.")
    items.append(f"Knobs beside these, and why each is kept: quartet knobs {history.name}")
    return markup.section(
        "Flags and axes left out",
        "<ul>" + "".join(f"<li>{markup.text(item)}</li>" for item in items) + "</ul>",
    )


def provenance(history: RunHistory, fault: str | None) -> str:
    """The table of the run's command, folder, study and nodes, and the files that could not be read."""
    study = history.config.get("study", {})
    nodes = ", ".join(f"{node.host} ({node.node_class})" for node in history.nodes[:8])
    more = f" and {len(history.nodes) - 8} more" if len(history.nodes) > 8 else ""
    facts = [
        # A masked value needs no quotes: it is not one to copy.
        ("command", " ".join(word if MASK in word else shlex.quote(word) for word in history.command)),
        ("started in", history.cwd),
        ("run folder", history.path),
        ("study", history.storage),
        ("seed", str(study.get("seed", ""))),
        ("objective", OBJECTIVE_WORDS[history.objective]),
        ("nodes", nodes + more),
        ("quartet", history.quartet_version),
    ]
    faults = [*([fault] if fault else []), *history.faults[:20]]
    rows = [(name, clean(value, limit=4000)) for name, value in facts if value]
    listed = "".join(f"<li>{markup.text(clean(fault))}</li>" for fault in faults)
    unread = f"<p>Not readable, and so not shown:</p><ul>{listed}</ul>" if faults else ""
    return markup.section("Provenance", markup.table(("", ""), rows, label="Provenance") + unread) + (
        "<footer>Made by quartet_plugin. This file is self-contained: it loads nothing and runs no script."
        "</footer>"
    )


def _tag(row: TrialRow) -> str:
    colour = _TAGS.get(row.outcome, "") if row.repeats is None else ""
    return f'<span class="tag {colour}">{markup.text(outcome_of(row))}</span>'
