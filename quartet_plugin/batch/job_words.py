"""The words of `quartet tune` for a job: a list, in which the job's own words stay as they are."""

from pathlib import Path

from quartet_plugin.batch.config import Job
from quartet_plugin.tuner.config import TuneConfig

# What `quartet tune` takes at least, in minutes.
LEAST_MINUTES = 0.1


def tune_words(
    job: Job,
    *,
    config: TuneConfig,
    runs: Path,
    max_trials: int | None,
    minutes: float | None,
    started_from: str | None,
    is_begun: bool,
    takes_over: bool = False,
) -> list[str]:
    """The words behind `quartet` that tune a job in the folder `runs`, at most for `minutes`.

    `is_begun`: the job's run is there and goes on, with `takes_over` also where another host had it. A value
    is joined to its option, so that none can be taken for another option.
    """
    trials = num_trials_of(job, config=config, max_trials=max_trials)
    words = ["tune", f"--run-dir={runs}", f"--name={job.name}"]
    words += [] if job.config is None else [f"--config={job.config}"]
    # A run that goes on keeps its own number, unless another one is said.
    words += [f"--trials={trials}"] if is_begun or trials != config.study.trials else []
    words += [] if minutes is None else [f"--max-minutes={minutes:.3f}"]
    words += [] if started_from is None else [f"--from={started_from}"]
    words += ["--resume"] if is_begun else []
    words += ["--takeover"] if is_begun and takes_over else []
    return [*words, "--", *job.words]


def num_trials_of(job: Job, *, config: TuneConfig, max_trials: int | None) -> int:
    """The plans that a job tries: its own number, else its q.yaml's, and no more than the batch allows."""
    asked = job.trials or config.study.trials
    return asked if max_trials is None else min(asked, max_trials)


def minutes_of(job: Job, *, spent: float, left: float | None) -> float | None:
    """The minutes that a job's tuner may take, None without a limit.

    The job's own limit counts what earlier sessions have `spent` on it; `left` is what the batch has.
    """
    limits = [limit for limit in (left,) if limit is not None]
    if job.max_minutes is not None:
        limits.append(job.max_minutes - spent)
    return max(LEAST_MINUTES, min(limits)) if limits else None
