"""Shows the jobs of a batch as a table of at most 80 columns, as CSV, and in single lines."""

import csv
import io
from dataclasses import fields

from quartet_plugin.model.batch import BatchResults, JobResult
from quartet_plugin.model.measurement import Interval
from quartet_plugin.model.printable import escaped
from quartet_plugin.report.formatting import (
    MEMORY_HEAD,
    SECONDS_HEAD,
    SPEEDUP_HEAD,
    clean,
    duration,
    iteration_words,
    size,
    speedup_spread,
    speedup_words,
)
from quartet_plugin.report.summary import aligned

WIDTH = 80
# Heads of columns; those of numbers begin with ">".
_TUNED = ("job", "state", ">trials", f">{SECONDS_HEAD}", f">{SPEEDUP_HEAD}", ">left")
_MIXED = ("job", "state", ">trials", f">{SECONDS_HEAD}", ">predicted", f">{SPEEDUP_HEAD}", ">left")
_PLANNED = ("job", "state", ">predicted", f">{SPEEDUP_HEAD}", ">tokens/s", f">{MEMORY_HEAD}")
_LEAST_NAME = 8
_NO_BETTER = "no better plan was found"
_STATES = {
    "running": "running",
    "finished": "finished",
    "stopped": "stopped; `quartet batch JOBS.yaml --resume` continues it",
    "lost": "its process ended unexpectedly; `quartet batch JOBS.yaml --resume` continues it",
    "elsewhere": "held on another host",
}


def heads_of(results: BatchResults) -> tuple[str, ...]:
    """The columns for these jobs."""
    kinds = {job.kind for job in results.jobs}
    return _MIXED if len(kinds) > 1 else _PLANNED if kinds == {"plan"} else _TUNED


def table_lines(results: BatchResults, *, width: int = WIDTH) -> list[str]:
    """A row a job, names cut to the width, what the batch does, and a line for each job that failed."""
    heads = heads_of(results)
    rows = table_rows(results, width=width)
    return [*aligned([heads, *rows]), *foot_lines(results), *failure_lines(results)]


def table_rows(results: BatchResults, *, width: int = WIDTH) -> list[list[str]]:
    """The cells of every row, the names cut so that a row has at most `width` characters."""
    heads = [head.removeprefix(">") for head in heads_of(results)]
    rows = [[cells_of(job)[head] for head in heads] for job in results.jobs]
    others = sum(
        2 + max(len(head), *(len(row[column]) for row in rows))
        for column, head in enumerate(heads)
        if column > 0
    )
    room = max(_LEAST_NAME, width - others)
    return [[_cut(row[0], room), *row[1:]] for row in rows]


def cells_of(job: JobResult) -> dict[str, str]:
    """The cells of a job by the heads of all columns; empty where nothing is known."""
    ratio = "" if job.ratio is None else speedup_words(job.ratio)
    left = "" if job.time_left_s is None or job.is_over else duration(job.time_left_s)
    return {
        "job": job.name,
        "state": job.state,
        "trials": f"{job.num_trials}/{job.num_asked}" if job.num_asked else "",
        SECONDS_HEAD: "" if job.iteration_s is None else iteration_words(job.iteration_s),
        "predicted": "" if job.predicted_s is None else iteration_words(job.predicted_s),
        SPEEDUP_HEAD: ratio,
        "tokens/s": "" if job.tokens_per_s is None else f"{job.tokens_per_s:,.0f}",
        MEMORY_HEAD: "" if job.peak_memory_bytes is None else size(job.peak_memory_bytes),
        "left": left,
    }


def foot_lines(results: BatchResults) -> list[str]:
    """The batch's state, how many jobs are in each, and the time left."""
    return [f"batch {results.batch}: {_STATES[results.state]}", counts_line(results)]


def counts_line(results: BatchResults) -> str:
    """How many jobs are in each state, and the time left."""
    counts = ", ".join(f"{count} {state}" for state, count in results.counts().items())
    left = "" if results.time_left_s is None else f"; about {duration(results.time_left_s)} left"
    num_jobs = len(results.jobs)
    return f"{num_jobs} job{'' if num_jobs == 1 else 's'}: {counts}{left}"


def failure_lines(results: BatchResults) -> list[str]:
    """A line for each job that failed, with its reason."""
    return [ended_words(job) for job in results.jobs if job.state == "failed"]


def ended_words(job: JobResult) -> str:
    """A job that has ended, in one line."""
    if job.state != "done":
        code = "" if job.exit_code in (None, 0) else f" (exit code {job.exit_code})"
        reason = f": {clean(job.reason)}" if job.reason else ""
        return f"{job.name}: {job.state}{code}{reason}"
    return f"{job.name}: done: {outcome_words(job)}"


def outcome_words(job: JobResult) -> str:
    """The result of a finished job: speedup and plan, measured or predicted."""
    if job.kind == "plan":
        seconds = (
            "" if job.predicted_s is None else f"{iteration_words(job.predicted_s)} s/iteration predicted, "
        )
        return f"{seconds}{clean(job.best)}"
    if job.speedup is None:
        return _NO_BETTER
    return f"{speedup_spread(job.speedup)} as fast as the job's own command, {clean(job.best)}"


def csv_text(results: BatchResults) -> str:
    """The jobs as CSV with a header, a row a job; an interval is three columns.

    CSV has no way to write a control character: it is escaped as Python does.
    """
    text = io.StringIO()
    names: list[str] = []
    for field in fields(JobResult):
        bounds = tuple(part.name for part in fields(Interval)) if field.name == "speedup" else ()
        names += [f"speedup.{part}" for part in bounds] or [field.name]
    writer = csv.DictWriter(text, fieldnames=names)
    writer.writeheader()
    for job in results.jobs:
        writer.writerow({name: _csv_value(job, name) for name in names})
    return text.getvalue()


def _csv_value(job: JobResult, name: str) -> object:
    field, _, part = name.partition(".")
    value = getattr(job, field)
    if part:
        value = None if value is None else getattr(value, part)
    return escaped(value) if isinstance(value, str) else value


def _cut(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 3]}..."
