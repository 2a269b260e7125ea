"""The jobs of a batch as its folder holds them: their results, and the file that `results.json` is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from quartet_plugin.model.measurement import Interval
from quartet_plugin.model.schema import Bounds, Length, Matches, record

# A job's name is that of a folder.
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}"
NAME_RULE = "letters, digits, '.', '_' and '-', at most 100, beginning with a letter or digit"
MAX_JOBS = 1000
RESULTS_NAME = "results.json"

# `tune`: trials of a command; `plan`: the planner alone.
JobKind = Literal["tune", "plan"]
JobState = Literal["waiting", "running", "done", "failed", "stopped"]
BatchState = Literal["running", "finished", "stopped", "lost", "elsewhere"]

JobName = Annotated[str, Matches(pattern=NAME_PATTERN)]
_Words = Annotated[str, Length(most=2_000)]
_Path = Annotated[str, Length(most=8_192)]
_Count = Annotated[int, Bounds(ge=0, le=10**9)]
_Bytes = Annotated[int, Bounds(ge=0, le=2**63)]
_Seconds = Annotated[float, Bounds(ge=0.0)]
_Positive = Annotated[float, Bounds(gt=0.0)]


@record
class JobResult:
    """A job of a batch: its state and what it has come to. Times are seconds, None where nothing is known.

    `num_trials` of `num_asked` plans were tried; `iteration_s` is the best plan's (predicted where `kind` is
    `plan`), `best` that plan in words. `ratio` is its speedup over the job's own command, `speedup` the same
    with its interval once it was measured in turns. `plan` is the winner's file; a tuned job without one
    keeps its own command. `started_from` is the job whose measurements the job began with. `reason` says why
    it failed, `exit_code` is its process's.
    """

    name: JobName
    kind: JobKind
    state: JobState
    priority: int = 0
    num_trials: _Count = 0
    num_asked: _Count = 0
    best: _Words = ""
    iteration_s: _Positive | None = None
    predicted_s: _Positive | None = None
    tokens_per_s: _Positive | None = None
    ratio: _Positive | None = None
    speedup: Interval | None = None
    peak_memory_bytes: _Bytes | None = None
    plan: _Path | None = None
    run: _Path | None = None
    started_from: JobName | None = None
    elapsed_s: _Seconds = 0.0
    time_left_s: _Seconds | None = None
    exit_code: int | None = None
    reason: _Words = ""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do for the job."""
        return self.state in ("done", "failed")


@record
class BatchResults:
    """The jobs of a batch, in the order of its file; content of results.json."""

    batch: JobName
    state: BatchState
    is_plan_only: bool
    jobs: Annotated[tuple[JobResult, ...], Length(most=MAX_JOBS)]
    elapsed_s: _Seconds = 0.0
    time_left_s: _Seconds | None = None
    schema_version: Literal[1] = 1

    def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state; states without a job are left out."""
        states: tuple[JobState, ...] = ("done", "failed", "running", "stopped", "waiting")
        counts = {state: sum(job.state == state for job in self.jobs) for state in states}
        return {state: count for state, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class BatchPaths:
    """The places of a batch's folder."""

    path: Path

    @property
    def batch_file(self) -> Path:
        """What the batch was begun with."""
        return self.path / "batch.json"

    @property
    def events_file(self) -> Path:
        """A line an event."""
        return self.path / "events.jsonl"

    @property
    def runs(self) -> Path:
        """The run folders of the jobs, by name."""
        return self.path / "runs"

    @property
    def results_file(self) -> Path:
        """The results as JSON."""
        return self.path / RESULTS_NAME

    @property
    def table_file(self) -> Path:
        """The results as CSV."""
        return self.path / "results.csv"

    @property
    def page_file(self) -> Path:
        """The results for reading."""
        return self.path / "report.html"

    def job(self, name: str) -> Path:
        """The folder of one job: state, output, and the plan of one that is only planned."""
        return self.path / "jobs" / name
