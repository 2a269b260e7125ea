"""Every trial of a run: as a table, and as data for other programs."""

import csv
import io
from functools import partial
from typing import Any

from quartet_plugin.model.history import PARTS, RunHistory, TrialRow
from quartet_plugin.model.launch import FORBIDDEN
from quartet_plugin.model.printable import escaped
from quartet_plugin.protocol.masking import masked
from quartet_plugin.report.formatting import (
    MEMORY_HEAD,
    SECONDS_HEAD,
    SPEEDUP_HEAD,
    clean,
    drift_note,
    iteration_words,
    rate,
    size,
    speedup_words,
)
from quartet_plugin.report.summary import aligned
from quartet_plugin.report.tables import changes
from quartet_plugin.space.plan_label import SEPARATOR, plan_label

# The columns of `number_cells`.
NUMBER_HEADS = (
    SECONDS_HEAD,
    "predicted",
    "expected gain",
    "tokens/s",
    SPEEDUP_HEAD,
    "FLOP/s/device",
    MEMORY_HEAD,
)
_GAIN_NOTE = (
    "expected gain: over the best plan known when it was proposed, weighted by probability; the planner "
    "tries the plan with the largest. Empty if the exploring sampler chose the plan."
)
_HEAD = (">trial", "class", "plan", "outcome", *(f">{head}" for head in NUMBER_HEADS))


def label_of(row: TrialRow) -> str:
    """A trial's plan by labelled parts; where its file is gone, by the parts that the study has kept."""
    if row.number == 0:
        return "your command"
    if row.plan is not None:
        return plan_label(row.plan)
    parts = (f"{part} {row.labels[part]}" for part in PARTS if row.labels.get(part))
    return SEPARATOR.join(parts) or "unknown"


def class_of(row: TrialRow) -> str:
    """How far a plan may change the training, A to D; "-" where it changes nothing or is not known."""
    if row.plan is None:
        return "-"
    return max((change.change_class for change in changes(row.plan)), default="-")


def outcome_of(row: TrialRow) -> str:
    """A trial's outcome in a word or two."""
    if row.is_running:
        return "running"
    if row.outcome == FORBIDDEN:
        return "forbidden"
    if row.repeats is not None:
        return f"as trial {row.repeats}"
    if row.source is not None:
        return f"{row.outcome}, {clean(row.source, limit=60)}"
    return row.outcome or "unfinished"


def table_lines(history: RunHistory) -> list[str]:
    """A row a trial, what its marks mean, then the reasons of the trials that were refused or failed."""
    rows = [list(_HEAD), *(_cells(row, history) for row in history.trials)]
    lines = aligned(rows) + notes_of(history)
    reasons = [row for row in history.trials if row.reason and not row.is_measured and row.repeats is None]
    if reasons:
        lines.append("")
        lines += [f"trial {row.number}: {outcome_of(row)}: {clean(row.reason)}" for row in reasons]
    return lines


def records(history: RunHistory) -> dict[str, Any]:
    """Every trial as plain data, in seconds, bytes and FLOP/s as measured; see docs/report.md."""
    return {
        "schema_version": 1,
        "run": history.name,
        "objective": history.objective,
        "storage": history.storage,
        "trials": [_record(row, history) for row in history.trials],
    }


def csv_text(history: RunHistory) -> str:
    """The same data as CSV with a header, a row a trial; a plan's parts are columns `plan.PART`.

    CSV has no way to write a control character: it is escaped as Python does.
    """
    rows = [{**_flat(row.pop("plan")), **row} for row in records(history)["trials"]]
    text = io.StringIO()
    names = list(rows[0]) if rows else ["trial"]
    writer = csv.DictWriter(text, fieldnames=["trial", *(name for name in names if name != "trial")])
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {name: escaped(value) if isinstance(value, str) else value for name, value in row.items()}
        )
    return text.getvalue()


def _flat(parts: dict[str, Any]) -> dict[str, Any]:
    return {f"plan.{part}": value for part, value in parts.items()}


def _cells(row: TrialRow, history: RunHistory) -> list[str]:
    return [
        str(row.number),
        class_of(row),
        clean(label_of(row), limit=90),
        outcome_of(row),
        *number_cells(row, history),
    ]


def number_cells(row: TrialRow, history: RunHistory) -> list[str]:
    """Seconds, predicted seconds, expected gain, tokens/s, speedup, FLOP/s per device, peak memory; or ""."""
    numbers = (
        (row.iteration_s, iteration_words),
        (row.predicted_iteration_s, iteration_words),
        (row.expected_improvement, lambda share: f"{100 * share:.1f} %"),
        (row.tokens_per_s, "{:,.0f}".format),
        (history.versus_baseline(row), partial(speedup_words, drift=row.drift)),
        (row.model_flops_per_s_per_device, rate),
        (row.peak_memory_bytes or None, size),
    )
    return ["" if value is None else words(value) for value, words in numbers]


def drift_note_of(history: RunHistory) -> str | None:
    """The meaning of the marks in the column of speedups, in one line; None where there are none."""
    return drift_note(row.drift for row in history.trials if history.versus_baseline(row) is not None)


def notes_of(history: RunHistory) -> list[str]:
    """The meaning of marks in the columns of speedups and expected gains, if there are any."""
    drift = drift_note_of(history)
    has_gains = any(row.expected_improvement is not None for row in history.trials)
    return [*([] if drift is None else [drift]), *([_GAIN_NOTE] if has_gains else [])]


def _record(row: TrialRow, history: RunHistory) -> dict[str, Any]:
    return {
        "trial": row.number,
        "state": "running" if row.is_running else "finished" if row.verdict else "unfinished",
        "class": class_of(row),
        "plan": {part: row.labels.get(part) for part in PARTS},
        "verdict": row.verdict or None,
        "outcome": row.outcome or None,
        "reason": masked(row.reason) or None,
        "iteration_s": row.iteration_s,
        "predicted_iteration_s": row.predicted_iteration_s,
        "expected_gain": row.expected_improvement,
        "tokens_per_s": row.tokens_per_s,
        "model_flops_per_s_per_device": row.model_flops_per_s_per_device,
        "versus_baseline": history.versus_baseline(row),
        "drift": row.drift,
        "peak_memory_bytes": row.peak_memory_bytes or None,
        "predicted_peak_memory_bytes": row.predicted_memory_bytes,
        "memory_excess_bytes": row.memory_excess_bytes,
        "repeats": row.repeats,
        "source": row.source,
        "num_attempts": row.num_attempts,
        "wall_s": row.wall_s,
        "folder": row.folder or None,
    }
