"""report.html of a batch: every job with its winner, the speedup with its interval, and why a job failed."""

from quartet_plugin.model.batch import BatchResults, JobResult
from quartet_plugin.report import markup
from quartet_plugin.report.batch_table import cells_of, counts_line, outcome_words
from quartet_plugin.report.document import document
from quartet_plugin.report.formatting import SECONDS_HEAD, SPEEDUP_HEAD, clean, duration, speedup_spread

_NUMBERS = frozenset({"trials", SECONDS_HEAD, "predicted", SPEEDUP_HEAD, "tokens/s", "time"})
_HEADS = ("job", "state", "trials", SECONDS_HEAD, "predicted", SPEEDUP_HEAD, "tokens/s", "time", "plan")
_TAGS = {"done": "good", "failed": "bad", "stopped": "warn", "running": "warn", "waiting": ""}


def batch_page(results: BatchResults) -> str:
    """The whole file."""
    mode = "planned, nothing was started" if results.is_plan_only else "tuned"
    head = (
        f"<h1>{markup.text(results.batch)}</h1>\n"
        f'<p class="sub">{markup.text(f"{counts_line(results)}; {mode}")}</p>'
    )
    sections = (
        head,
        markup.section(
            "Jobs",
            markup.grid(_HEADS, [_row(job) for job in results.jobs], label="Jobs", numbers=_NUMBERS),
        ),
        _failed(results),
        _started_from(results),
    )
    return document(f"{results.batch}: quartet batch", sections)


def _row(job: JobResult) -> str:
    values = {**cells_of(job), "time": duration(job.elapsed_s) if job.elapsed_s else ""}
    if job.speedup is not None:
        values[SPEEDUP_HEAD] = speedup_spread(job.speedup)
    cells = [markup.cell(_cell(job, head, values), style=_style(head)) for head in _HEADS]
    style = "best" if job.speedup is not None else "faint" if job.state != "done" else ""
    return f'<tr class="{style}">{"".join(cells)}</tr>'


def _cell(job: JobResult, head: str, values: dict[str, str]) -> str:
    if head == "plan":
        is_told = job.state == "done" and job.kind == "tune" and job.speedup is None
        return markup.breakable(outcome_words(job) if is_told else clean(job.best))
    if head == "state":
        return f'<span class="tag {_TAGS[job.state]}">{markup.text(job.state)}</span>'
    return markup.text(values[head])


def _style(head: str) -> str:
    return "number" if head in _NUMBERS else "plain" if head == "plan" else ""


def _failed(results: BatchResults) -> str:
    rows = [
        (job.name, "" if job.exit_code is None else str(job.exit_code), clean(job.reason))
        for job in results.jobs
        if job.state == "failed"
    ]
    table = markup.table(("job", "exit code", "reason"), rows, label="Failed") if rows else ""
    return markup.section("Failed", table)


def _started_from(results: BatchResults) -> str:
    rows = [(job.name, job.started_from) for job in results.jobs if job.started_from is not None]
    table = markup.table(("job", "from"), rows, label="Started from") if rows else ""
    return markup.section("Started from the measurements of", table)
