"""The files of an attempt, read as untrusted input: strict types, size caps, no links followed.

docs/formats.md describes each. What a trial's own processes wrote may be torn or hostile; every refusal
is one ConfigError line that names the file, the field, the value and the rule.
"""

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from quartet_plugin.errors import ConfigError, StorageError
from quartet_plugin.model.files import parse_json
from quartet_plugin.model.schema import ADDED, Bounds, Length, Matches, Number, parse, record
from quartet_plugin.protocol.measured_window import EarlyEnd, EarlyEndReason, first_measured, why_enough

# The steady iterations by which a running trial knows that its start is over.
_LEAST_SEEN = 2
MAX_RANKS = 65_536
MAX_ITERATIONS = 100_000
MAX_BYTES = 64 * 2**20


Version = Literal[1]
AttemptId = Annotated[str, Matches(pattern=r"[0-9a-f]{32}")]
PlanKey = Annotated[str, Matches(pattern=r"[0-9a-f]{64}")]
Rank = Annotated[int, Bounds(ge=0, lt=MAX_RANKS)]
Count = Annotated[int, Bounds(ge=0, le=2**53)]
Pid = Annotated[int, Bounds(ge=1, le=2**31)]
Seconds = Annotated[float, Bounds(ge=0, le=1e10)]
# What an attempt's folder holds beside the files of the ranks.
TRIAL_FILE, COMMAND_FILE, RESULT_FILE, PLAN_FILE = "trial.json", "command.json", "result.json", "plan.json"
PROCESSES_FILE, LOG_FILE, STOP_FILE = "processes.json", "stdout.log", "STOP"
# Beside weights that a trial kept.
KEPT_FILE = "kept.json"

Name = Annotated[str, Length(most=512)]
FilePath = Annotated[str, Length(most=4096)]
Text = Annotated[str, Length(most=100_000)]


@record
class TrialSpec:
    """trial.json: the trial that the ranks run.

    `weights` names a weights-only checkpoint that every rank starts from, `save_weights` a folder where one
    is written before the first step, and then started from; with either, dropout and jitter are off and the
    ranks leave what the parity gate compares. With `num_compared` that holds for this many iterations of the
    warm-up: the trial then goes on under the command's own settings, and its measured iterations are the
    command's; weights that it has written are not read back.

    A GPU computes for `device_warmup_s` before the first step. `warmup` iterations are not measured, and
    `measure` are. With `max_warmup` the measured ones begin where iterations are steady, after `warmup` to
    `max_warmup` of them; with `early_end` they are `measure` at most. `modules` are the classes whose forward
    ran in the user's command. The trial has `batch_divisor` times fewer nodes than the training, and as
    much less of its global batch and, where one is larger than the trial, of a replica's stages. Raises
    ConfigError for paths that are not absolute, for compared iterations outside of the warm-up, and for a
    `max_warmup` below `warmup`.
    """

    attempt_id: AttemptId
    folder: FilePath
    warmup: Annotated[int, Bounds(ge=0, le=MAX_ITERATIONS)]
    measure: Annotated[int, Bounds(ge=1, le=MAX_ITERATIONS)]
    plan_key: PlanKey | None
    weights: FilePath | None = None
    save_weights: FilePath | None = None
    schema_version: Version = 1
    num_compared: Annotated[int, Bounds(ge=1, le=MAX_ITERATIONS)] | None = field(default=None, metadata=ADDED)
    device_warmup_s: Seconds | None = field(default=None, metadata=ADDED)
    max_warmup: Annotated[int, Bounds(ge=0, le=MAX_ITERATIONS)] | None = field(default=None, metadata=ADDED)
    early_end: EarlyEnd | None = field(default=None, metadata=ADDED)
    modules: Annotated[tuple[Name, ...], Length(most=10_000)] | None = field(default=None, metadata=ADDED)
    batch_divisor: Annotated[int, Bounds(ge=2, le=MAX_RANKS)] | None = field(default=None, metadata=ADDED)

    def __post_init__(self) -> None:
        if self.num_compared is not None and self.num_compared > self.warmup:
            raise ConfigError(
                f"num_compared: {self.num_compared}; must be at most warmup ({self.warmup}): "
                "a compared iteration is not measured"
            )
        if self.most_warmup < self.warmup:
            raise ConfigError(f"max_warmup: {self.max_warmup}; must be at least warmup ({self.warmup})")
        for name in ("folder", "weights", "save_weights"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_absolute():
                raise ConfigError(f"{name}: {path[:200]!r}; must be an absolute path")

    @property
    def num_iterations(self) -> int:
        """The most iterations, warm-up and measured ones together."""
        return self.most_warmup + self.measure

    @property
    def most_warmup(self) -> int:
        """The most iterations that are not measured."""
        return self.warmup if self.max_warmup is None else self.max_warmup

    @property
    def least_measured(self) -> int:
        """The fewest measured iterations of a trial that was not ended before."""
        return self.measure if self.early_end is None else min(self.early_end.least, self.measure)

    def measured(self, times: Sequence[float]) -> range:
        """Which of the iterations, whose seconds are `times`, are measured; the first is number 0."""
        begin = first_measured(
            times, least=self.warmup, most=self.most_warmup, num_measured=self.least_measured
        )
        return range(min(begin, len(times)), min(begin + self.measure, len(times)))

    def why_enough(
        self, times: Sequence[float], *, num_later: int
    ) -> EarlyEndReason | Literal["complete"] | None:
        """Why a trial may end `num_later` iterations after those of `times`; None where it goes on."""
        if self.max_warmup is None and self.early_end is None:
            return "complete" if len(times) + num_later >= self.num_iterations else None
        begin = first_measured(times, least=self.warmup, most=self.most_warmup, num_measured=_LEAST_SEEN)
        if len(times) + num_later >= begin + self.measure:
            return "complete"
        return (
            None if self.early_end is None else why_enough(times[begin:], self.early_end, num_later=num_later)
        )

    @property
    def is_compared(self) -> bool:
        """Whether this is a trial of the parity gate alone, which compares every iteration."""
        return self.num_compared is None and (self.weights is not None or self.save_weights is not None)


@record
class CommandRecord:
    """command.json: what was started (secrets masked), when (seconds since 1970) and its limits.

    `engine` is the launcher's name where it started the command on nodes.
    """

    attempt_id: AttemptId
    argv: Annotated[tuple[Text, ...], Length(most=100_000)]
    cwd: FilePath
    environment: dict[Name, Text]
    starter: Literal["torchrun", "python", "deepspeed", "other"]
    num_processes: Annotated[int, Bounds(ge=1, le=MAX_RANKS)] | None
    time: Seconds
    deadline_s: Seconds
    predicted_iteration_s: Seconds | None
    timeouts: dict[Name, Seconds]
    max_spread: Seconds
    schema_version: Version = 1
    engine: Name | None = field(default=None, metadata=ADDED)


@record
class ResultRecord:
    """result.json: the outcome of an attempt.

    `start` says whether its processes were forked from a trial server, `cold_reason` why they were not where
    they should have been; before them the server's imports took `import_s`, for later attempts as well.
    `is_cut`: it was ended early, since the plan was clearly slower than the best.
    `is_superseded`: it does not count, since its final round, or its comparison at full size, was interrupted
    and then launched again.
    """

    attempt_id: AttemptId
    plan_key: PlanKey | None
    outcome: Literal[
        "OK", "INFEASIBLE", "UNSTABLE", "WRONG", "NOT_AS_PLANNED", "INFRA", "HARNESS", "CANCELLED"
    ]
    reason: Text
    phase: Literal["launch", "import", "init", "warmup", "measure", "done"]
    memory_excess_bytes: Count
    iteration_s: tuple[Seconds, ...]
    loss: tuple[Number, ...]
    grad_norm: tuple[Number, ...]
    peak_memory_bytes: Count
    wall_s: Seconds
    schema_version: Version = 1
    untracked_memory_bytes: Count | None = field(default=None, metadata=ADDED)
    start: Literal["warm", "cold"] | None = field(default=None, metadata=ADDED)
    cold_reason: Text | None = field(default=None, metadata=ADDED)
    import_s: Seconds | None = field(default=None, metadata=ADDED)
    num_compared: Count | None = field(default=None, metadata=ADDED)
    is_cut: bool | None = field(default=None, metadata=ADDED)
    is_superseded: bool | None = field(default=None, metadata=ADDED)


@record
class KeptWeights:
    """kept.json, beside weights that a trial kept of its first step, once they are whole: whose they are."""

    attempt_id: AttemptId
    schema_version: Version = 1


def read_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file. Raises FileNotFoundError; ConfigError for a link, what is no
    regular file, or one that is too long; StorageError when the disk fails.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path}: is a symbolic link; a trial's files must be regular") from error
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path}: not a regular file; files of a trial must be")
    with os.fdopen(descriptor, "rb") as file:
        try:
            content = b"" if status.st_size > max_bytes else file.read(max_bytes + 1)
        except OSError as error:
            raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    if max(status.st_size, len(content)) > max_bytes:
        raise ConfigError(f"{path}: longer than {max_bytes} bytes, the most a file of this kind may have")
    return content


def read_shared[T](kind: type[T], path: Path, *, max_bytes: int = MAX_BYTES) -> T:
    """The record in the file `path`. Raises FileNotFoundError, ConfigError or StorageError."""
    return parse(kind, parse_json(read_bytes(path, max_bytes=max_bytes), where=path), where=str(path))
