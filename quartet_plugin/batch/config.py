"""JOBS.yaml: the jobs of a batch, what they share, and its limits.

The file is read with the safe YAML loader and a strict schema; an unknown key, a name that is no file's name
or a word that no process can be given is one ConfigError line. No value reaches a shell.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from quartet_plugin.batch.matrix import MatrixConfig, expanded
from quartet_plugin.batch.words import words_of
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.batch import MAX_JOBS, NAME_PATTERN, NAME_RULE, JobKind
from quartet_plugin.model.files import shown
from quartet_plugin.model.schema import unknown_key
from quartet_plugin.model.sections import Section, load_yaml, validate

_NAME = re.compile(NAME_PATTERN, re.ASCII)
_UNNAMED = re.compile(r"[^A-Za-z0-9_.-]", re.ASCII)


def _job_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(NAME_RULE)
    return value


def _path_text(value: str) -> str:
    if not value.isprintable():
        raise ValueError("a path must be printable text on one line")
    return value


Name = Annotated[str, AfterValidator(_job_name)]
PathText = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_path_text)]
Words = Annotated[list[str], BeforeValidator(words_of)]
Minutes = Annotated[float, Field(ge=0.1, le=1e6)]
NumTrials = Annotated[int, Field(ge=1, le=100_000)]


class JobConfig(Section):
    """One job: a `command` to tune, a described `job` to plan, or a command with further sections.

    `job` is the name of a JOB.yaml, or its sections. `like` names a job whose measurements this one begins
    with, once that has ended.
    """

    name: Name
    command: Words | None = None
    job: PathText | dict[str, Any] | None = None
    config: PathText | None = None
    priority: int = Field(default=0, ge=-1_000_000, le=1_000_000)
    like: Name | None = None
    max_minutes: Minutes | None = None
    trials: NumTrials | None = None


class LimitsConfig(Section):
    """Limits: of the whole batch (`jobs_at_once`, `minutes` of a session), and of each job."""

    jobs_at_once: int = Field(default=1, ge=1, le=MAX_JOBS)
    minutes: Minutes | None = None
    max_minutes: Minutes | None = None
    trials: NumTrials | None = None


class BatchConfig(Section):
    """All of JOBS.yaml. `config` is the q.yaml of every job that names none."""

    batch: Name | None = None
    config: PathText | None = None
    share: Literal["auto", "off"] = "auto"
    jobs: list[JobConfig] = Field(default=[], max_length=MAX_JOBS)
    matrix: MatrixConfig | None = None
    limits: LimitsConfig = LimitsConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job of a batch, its limits the narrower of its own and the batch's.

    `words` are the command's, empty for one that is only described; `described` are the sections of its
    JOB.yaml, whose files lie in `folder`. `position` is its place in the file, counted from 0.
    """

    name: str
    position: int
    words: tuple[str, ...] = ()
    described: dict[str, Any] | Path | None = None
    folder: Path
    config: Path | None = None
    priority: int = 0
    like: str | None = None
    max_minutes: float | None = None
    trials: int | None = None

    @property
    def kind(self) -> JobKind:
        """`tune` for a job with a command, `plan` for a job that is only described."""
        return "tune" if self.words else "plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch as its file has it; `num_at_once` jobs run at a time, at most `max_minutes` a session."""

    name: str
    jobs: tuple[Job, ...]
    shares: bool = True
    num_at_once: int = 1
    max_minutes: float | None = None
    max_trials: int | None = None


def read_batch(path: Path) -> Batch:
    """The batch in `path`. Raises ConfigError in one line."""
    data = load_yaml(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a batch is a mapping with jobs or a matrix; this is {shown(data)}")
    return parse_batch(data, where=str(path), folder=path.parent.absolute(), stem=path.stem)


def parse_batch(data: dict[Any, Any], *, where: str, folder: Path, stem: str = "batch") -> Batch:
    """Plain data as a batch; files that it names lie in `folder`. Raises ConfigError in one line."""
    kept = {key: value for key, value in data.items() if not (key in ("jobs", "limits") and value is None)}
    config = validate(BatchConfig, kept, where=where)
    written = list(config.jobs)
    if config.matrix is not None:
        for sections in expanded(config.matrix, where=f"{where}: matrix"):
            written.append(validate(JobConfig, sections, where=f"{where}: matrix: {sections['name']}"))
    if not written:
        raise ConfigError(f"{where}: jobs: none; write at least one job, or a matrix")
    if len(written) > MAX_JOBS:
        raise ConfigError(f"{where}: jobs: {len(written)}; must be at most {MAX_JOBS}")
    _check_names(written, where=where)
    limits = config.limits
    jobs = tuple(
        _job(job, position, config=config, folder=folder, where=f"{where}: jobs: {job.name}")
        for position, job in enumerate(written)
    )
    name = config.batch or _UNNAMED.sub("-", stem).strip("-._")[:100]
    return Batch(
        name=name if _NAME.fullmatch(name) else "batch",
        jobs=jobs,
        shares=config.share == "auto",
        num_at_once=limits.jobs_at_once,
        max_minutes=limits.minutes,
        max_trials=limits.trials,
    )


def _job(job: JobConfig, position: int, *, config: BatchConfig, folder: Path, where: str) -> Job:
    if job.command is None and job.job is None:
        raise ConfigError(
            f"{where}: neither command nor job; write the command to tune, or the job to plan for"
        )
    settings = job.config if job.config is not None else config.config
    return Job(
        name=job.name,
        position=position,
        words=tuple(job.command or ()),
        described=folder / job.job if isinstance(job.job, str) else job.job,
        folder=folder,
        config=None if settings is None else folder / settings,
        priority=job.priority,
        like=job.like,
        max_minutes=_least(job.max_minutes, config.limits.max_minutes),
        trials=job.trials,
    )


def _least(*limits: float | None) -> float | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _check_names(jobs: list[JobConfig], *, where: str) -> None:
    """Refuse names that differ only in case, and a `like` that names no job or forms a cycle."""
    seen: set[str] = set()
    for job in jobs:
        if job.name.casefold() in seen:
            raise ConfigError(
                f"{where}: jobs: {job.name}: the name is used twice (case is ignored); rename one job"
            )
        seen.add(job.name.casefold())
    likes = {job.name: job.like for job in jobs if job.like is not None}
    for name, like in likes.items():
        if like not in {job.name for job in jobs}:
            rule = unknown_key(like, known=[job.name for job in jobs]).replace("unknown key", "no such job")
            raise ConfigError(f"{where}: jobs: {name}: like: {like}: {rule}")
        chain = [name]
        while (following := likes.get(chain[-1])) is not None:
            if following in chain:
                raise ConfigError(
                    f"{where}: jobs: {name}: like: {' -> '.join([*chain, following])}: forms a cycle; "
                    "remove one `like`"
                )
            chain.append(following)
