"""The results of jobs, read from their runs' folders; nothing is written and no lease is taken."""

import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quartet_plugin.batch.job_file import BatchFile, BatchJob, JobFile, read_batch_file, read_job_file
from quartet_plugin.errors import QuartetError
from quartet_plugin.model.batch import BatchPaths, BatchResults, BatchState, JobResult
from quartet_plugin.model.history import RunHistory, TrialRow
from quartet_plugin.report.formatting import clean
from quartet_plugin.report.trial_table import label_of
from quartet_plugin.space.plan_label import plan_label
from quartet_plugin.tuner.attempts import holder_of
from quartet_plugin.tuner.history import read_history
from quartet_plugin.tuner.history_rows import read_events
from quartet_plugin.tuner.run_folder import RunFolder

_MAX_WORDS = 300


def history_of(run: Path) -> RunHistory | None:
    """The run in a folder; None where none was begun, or where it cannot be read."""
    with contextlib.suppress(QuartetError):
        return read_history(run) if (run / "config.json").is_file() else None
    return None


def is_out_of_time(run: Path) -> bool:
    """Whether the run's latest search left out a trial or a final round because too little time was left."""
    ends = [event for event in read_events(RunFolder(path=run).events_file) if event["kind"] == "end"]
    return bool(ends) and ends[-1].get("out_of_time") is True


def result_of(job: BatchJob, file: JobFile | None, *, paths: BatchPaths) -> JobResult:
    """The result of a job so far; for a finished job the result written at its end."""
    if file is None:
        return JobResult(name=job.name, kind=job.kind, state="waiting", priority=job.priority)
    if file.result is not None:
        return file.result
    result = JobResult(
        name=job.name,
        kind=job.kind,
        state=file.state,
        priority=job.priority,
        started_from=file.started_from,
        exit_code=file.exit_code,
        reason=clean(file.reason),
    )
    run = paths.runs / job.name
    history = history_of(run)
    return result if history is None else with_history(result, history, run=run)


def with_history(result: JobResult, history: RunHistory, *, run: Path) -> JobResult:
    """The result with what its run has measured."""
    best, winner = history.best, history.winner
    measured = None if winner is None else winner.measurement
    if winner is not None and measured is not None:
        result = replace(
            result,
            best=clean(plan_label(winner), limit=_MAX_WORDS),
            iteration_s=measured.plan.iteration_s.median,
            predicted_s=None if winner.prediction is None else winner.prediction.iteration_s,
            tokens_per_s=measured.plan.tokens_per_s,
            ratio=measured.speedup.median,
            speedup=measured.speedup,
            peak_memory_bytes=measured.plan.peak_memory_bytes,
            plan=str(run / "best" / "plan.json"),
        )
    else:
        kept = history.baseline if history.state == "finished" else best
        result = result if kept is None else _with_row(result, kept, history)
    return replace(
        result,
        num_trials=history.num_spent,
        num_asked=history.num_asked,
        elapsed_s=round(history.search_s, 3),
        time_left_s=None if history.time_left_s is None else round(history.time_left_s, 3),
        run=str(run),
    )


def _with_row(result: JobResult, row: TrialRow, history: RunHistory) -> JobResult:
    """The result with one trial: the best so far, or the baseline if no trial is faster."""
    words = label_of(row)
    return replace(
        result,
        best=clean(words, limit=_MAX_WORDS),
        iteration_s=row.iteration_s,
        predicted_s=row.predicted_iteration_s,
        tokens_per_s=row.tokens_per_s,
        ratio=history.versus_baseline(row),
        peak_memory_bytes=row.peak_memory_bytes or None,
    )


def time_left_of(jobs: Sequence[JobResult], *, num_at_once: int) -> float | None:
    """The seconds that a batch still takes, if its jobs take as long as those that are done; None before."""
    done = [job.elapsed_s for job in jobs if job.state == "done" and job.kind == "tune"]
    usual_s = statistics.mean(done) if done else None
    left_s = 0.0
    for job in jobs:
        if job.is_over:
            continue
        if job.state == "running" and job.time_left_s is not None:
            left_s += job.time_left_s
        elif usual_s is None:
            return None
        else:
            left_s += max(0.0, usual_s - job.elapsed_s)
    return round(left_s / num_at_once, 3)


def results_of(
    content: BatchFile, results: Sequence[JobResult], *, state: BatchState, elapsed_s: float
) -> BatchResults:
    """The results of a batch whose jobs are in these states."""
    is_live = state in ("running", "elsewhere")
    return BatchResults(
        batch=content.name,
        state=state,
        is_plan_only=content.is_plan_only,
        jobs=tuple(results),
        elapsed_s=round(elapsed_s, 3),
        time_left_s=time_left_of(results, num_at_once=content.num_at_once) if is_live else None,
    )


def read_batch_state(paths: BatchPaths) -> BatchResults:
    """The state of the batch in a folder, while it runs or after. Raises ConfigError where there is none."""
    content = read_batch_file(paths)
    results = [result_of(job, read_job_file(paths, job.name), paths=paths) for job in content.jobs]
    holder = holder_of(paths.path, now=time.time())
    state: BatchState
    if holder is None:
        state = "finished" if all(result.is_over for result in results) else "stopped"
    else:
        state = "elsewhere" if holder.is_alive is None else "running" if holder.is_alive else "lost"
    return results_of(content, results, state=state, elapsed_s=sum(result.elapsed_s for result in results))
