"""job.json: the state of one job of a batch, and batch.json: what the batch was begun with."""

import secrets
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Literal

from quartet_plugin.batch.config import Batch, Job
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.batch import MAX_JOBS, BatchPaths, JobKind, JobName, JobResult, JobState
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import ADDED, Bounds, Length, Matches, dump, read_record, record
from quartet_plugin.protocol.masking import is_same_command, masked_argv
from quartet_plugin.protocol.process_identity import Identity

FILE_NAME = "job.json"

_Count = Annotated[int, Bounds(ge=0, le=10**9)]
_Time = Annotated[float, Bounds(ge=0.0)]


@record
class JobFile:
    """The state of one job; its command has its secrets masked.

    Every process of the job inherits `mark`. `process` is its tuner's, None before that was started; `state`
    is written before a process is started and after it has ended. `num_lost` tuners were killed by a signal.
    `is_shortened`: its tuner got less time than the job allows, because the session had no more.
    `started_from` is the job whose measurements this one began with, `result` what an ended job came to.
    Times are seconds since 1970.
    """

    name: JobName
    kind: JobKind
    command: Annotated[tuple[str, ...], Length(most=10_000)]
    mark: Annotated[str, Matches(pattern="[0-9a-f]{32}")]
    state: JobState = "waiting"
    process: Identity | None = None
    num_lost: _Count = 0
    is_shortened: bool | None = field(default=None, metadata=ADDED)
    started_from: JobName | None = None
    began_at: _Time | None = None
    ended_at: _Time | None = None
    exit_code: int | None = None
    reason: Annotated[str, Length(most=2_000)] = ""
    result: JobResult | None = None
    schema_version: Literal[1] = 1

    @classmethod
    def of(cls, job: Job, *, kind: JobKind) -> "JobFile":
        """The state of a job that was not started."""
        command = tuple(masked_argv(job.words))
        return cls(name=job.name, kind=kind, command=command, mark=secrets.token_hex(16))


@record
class BatchJob:
    """A job as batch.json lists it."""

    name: JobName
    kind: JobKind
    priority: int = 0


@record
class BatchFile:
    """The jobs that the batch was started with: content of batch.json. Commands start in the folder `cwd`."""

    name: JobName
    cwd: Annotated[str, Length(least=1, most=4096)]
    is_plan_only: bool
    jobs: Annotated[tuple[BatchJob, ...], Length(least=1, most=MAX_JOBS)]
    num_at_once: Annotated[int, Bounds(ge=1, le=MAX_JOBS)] = 1
    quartet_version: str = ""
    schema_version: Literal[1] = 1

    @classmethod
    def of(cls, batch: Batch, *, cwd: Path, is_plan_only: bool) -> "BatchFile":
        """The file of a batch that begins in `cwd`, or goes on there."""
        from quartet_plugin import __version__

        return cls(
            name=batch.name,
            cwd=str(cwd),
            is_plan_only=is_plan_only,
            jobs=tuple(
                BatchJob(name=job.name, kind="plan" if is_plan_only else job.kind, priority=job.priority)
                for job in batch.jobs
            ),
            num_at_once=batch.num_at_once,
            quartet_version=__version__,
        )


def read_batch_file(paths: BatchPaths) -> BatchFile:
    """The jobs that the batch was started with. Raises ConfigError if the folder is not a batch's."""
    if not paths.batch_file.is_file():
        raise ConfigError(
            f"{paths.path}: no batch: it has no batch.json; name a folder that `quartet batch` wrote"
        )
    return read_record(BatchFile, paths.batch_file)


def check_kept(begun: BatchFile, batch: Batch, *, paths: BatchPaths) -> None:
    """Raise ConfigError where a job that was begun is not in the file any more: its tuner may still run."""
    names = {job.name for job in batch.jobs}
    for job in begun.jobs:
        if job.name not in names and read_job_file(paths, job.name) is not None:
            raise ConfigError(
                f"{paths.path}: jobs: {job.name}: was begun, and is not in the file any more; keep it there"
            )


def write_batch_file(content: BatchFile, *, paths: BatchPaths) -> None:
    """Write batch.json, whole or not at all."""
    write_json_atomic(paths.batch_file, dump(content))


def read_job_file(paths: BatchPaths, name: str) -> JobFile | None:
    """A job's state; None if it was not started. Raises ConfigError for a damaged file."""
    path = paths.job(name) / FILE_NAME
    return read_record(JobFile, path) if path.exists() else None


def write_job_file(content: JobFile, *, paths: BatchPaths) -> None:
    """Write a job's state, whole or not at all. Raises ConfigError or StorageError."""
    folder = paths.job(content.name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_json_atomic(folder / FILE_NAME, dump(content))


def state_of(job: Job, *, kind: JobKind, paths: BatchPaths) -> JobFile:
    """The state that an earlier session left of a job, else that of a new one.

    Raises ConfigError where the job was begun with another command.
    """
    file = read_job_file(paths, job.name)
    if file is None or file.state == "waiting":
        new = JobFile.of(job, kind=kind)
        return new if file is None else replace(new, mark=file.mark)
    if file.kind != kind or not is_same_command(file.command, job.words):
        raise ConfigError(
            f"jobs: {job.name}: the job was started with another command; give the same one, or another name"
        )
    return file
