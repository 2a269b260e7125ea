"""The files of an attempt, read as untrusted input: strict types, size caps, no links followed.

docs/formats.md describes each. What a trial's own processes wrote may be torn or hostile; every refusal
is one ConfigError line that names the file, the field, the value and the rule.
"""

import errno
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from quartet_plugin.errors import ConfigError, StorageError
from quartet_plugin.model.files import parse_json
from quartet_plugin.model.schema import ADDED, Bounds, Length, Matches, Number, parse, record

MAX_RANKS = 65_536
MAX_BEAT_BYTES = 64 * 1024
MAX_BYTES = 64 * 2**20

RankPhase = Literal["import", "init", "warmup", "measure", "done"]
ErrorKind = Literal["out-of-memory", "refused", "plan", "seam", "network", "error"]

_NAME = re.compile(r"rank-(0|[1-9][0-9]{0,4})(\.beat|\.err|)\.json", re.ASCII)

Version = Literal[1]
AttemptId = Annotated[str, Matches(pattern=r"[0-9a-f]{32}")]
PlanKey = Annotated[str, Matches(pattern=r"[0-9a-f]{64}")]
Rank = Annotated[int, Bounds(ge=0, lt=MAX_RANKS)]
Count = Annotated[int, Bounds(ge=0, le=2**53)]
Pid = Annotated[int, Bounds(ge=1, le=2**31)]
Seconds = Annotated[float, Bounds(ge=0, le=1e10)]
Name = Annotated[str, Length(most=512)]
Text = Annotated[str, Length(most=100_000)]


@record
class Beat:
    """rank-K.beat.json: where a rank's process is. `rank` is the launcher's."""

    schema_version: Version
    attempt_id: AttemptId
    rank: Rank
    pid: Pid
    process_start: Seconds
    host: Name
    local_rank: Rank
    phase: RankPhase
    iteration: Count
    time: Seconds


@record
class Iteration:
    """One iteration as a rank saw it; `loss` only on ranks of the last stage."""

    iteration: Count
    iteration_s: Seconds
    loss: Number | None
    grad_norm: Number | None
    skipped: bool


@record
class RankReport:
    """rank-K.json: what a rank measured, warm-up included. `job` is on RANK 0 alone.

    `cores` are the processor cores that a rank that trains on them may use.
    """

    schema_version: Version
    attempt_id: AttemptId
    rank: Rank
    launch_rank: Rank
    host: Name
    local_rank: Rank
    pid: Pid
    plan_key: PlanKey | None
    device: Name
    phases_s: Annotated[dict[Name, Seconds], Length(most=64)]
    iterations: Annotated[tuple[Iteration, ...], Length(most=200_000)]
    peak_memory_bytes: Count
    job: dict[str, Any] | None
    cores: Annotated[tuple[Count, ...], Length(most=65_536)] | None = field(default=None, metadata=ADDED)


@record
class ErrReport:
    """rank-K.err.json: how a rank failed."""

    schema_version: Version
    attempt_id: AttemptId
    rank: Rank
    launch_rank: Rank
    host: Name
    phase: RankPhase
    iteration: Count
    time: Seconds
    kind: ErrorKind
    type: Name
    message: Text
    exit_code: Annotated[int, Bounds(ge=0, le=255)]
    peak_memory_bytes: Count
    wanted_bytes: Count
    traceback: Annotated[tuple[Text, ...], Length(most=10_000)]


@record
class TrialSheet:
    """trial.json: what the ranks were told."""

    attempt_id: AttemptId
    folder: Annotated[str, Length(most=4096)]
    warmup: Annotated[int, Bounds(ge=0, le=100_000)]
    measure: Annotated[int, Bounds(ge=1, le=100_000)]
    plan_key: PlanKey | None
    weights: Annotated[str, Length(most=4096)] | None = None
    save_weights: Annotated[str, Length(most=4096)] | None = None
    schema_version: Version = 1


@record
class CommandSheet:
    """command.json: what was started (secrets blanked), when (seconds since 1970) and its limits."""

    attempt_id: AttemptId
    argv: Annotated[tuple[Text, ...], Length(most=100_000)]
    cwd: Annotated[str, Length(most=4096)]
    environment: dict[Name, Text]
    starter: Literal["torchrun", "python", "deepspeed"]
    num_processes: Annotated[int, Bounds(ge=1, le=MAX_RANKS)] | None
    time: Seconds
    deadline_s: Seconds
    predicted_iteration_s: Seconds | None
    timeouts: dict[Name, Seconds]
    max_spread: Seconds
    schema_version: Version = 1


@record
class ResultSheet:
    """result.json: the outcome of an attempt."""

    attempt_id: AttemptId
    plan_key: PlanKey | None
    outcome: Literal["OK", "INFEASIBLE", "UNSTABLE", "WRONG", "INFRA", "HARNESS", "CANCELLED"]
    reason: Text
    phase: Literal["launch", "import", "init", "warmup", "measure", "done"]
    memory_excess_bytes: Count
    iteration_s: tuple[Seconds, ...]
    loss: tuple[Number, ...]
    grad_norm: tuple[Number, ...]
    peak_memory_bytes: Count
    wall_s: Seconds
    schema_version: Version = 1


@record
class PartSquares:
    """One step's squared gradient norms of a rank's share of every part of the model."""

    squares: Annotated[dict[Name, Number], Length(most=100_000)]


@record
class ParitySheet:
    """rank-K.parity.json: what the parity gate compares beside loss and gradient norm."""

    schema_version: Version
    attempt_id: AttemptId
    launch_rank: Rank
    steps: Annotated[tuple[PartSquares, ...], Length(most=100_000)]


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
            raise ConfigError(f"{path}: a link; files of a trial must be regular files") from error
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path}: not a regular file; files of a trial must be")
    with os.fdopen(descriptor, "rb") as file:
        try:
            content = file.read(max_bytes + 1)
        except OSError as error:
            raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > max_bytes:
        raise ConfigError(f"{path}: longer than {max_bytes} bytes, the most a file of this kind may have")
    return content


def read_sheet[T](kind: type[T], path: Path, *, max_bytes: int = MAX_BYTES) -> T:
    """The record in the file `path`. Raises FileNotFoundError, ConfigError or StorageError."""
    return parse(kind, parse_json(read_bytes(path, max_bytes=max_bytes), where=path), where=str(path))


@record
class Snapshot:
    """What the ranks have written, by the launcher's rank. `faults` are files that break the format.

    Files of another attempt are left out: a late writer of an old attempt is not listened to.
    """

    beats: Mapping[int, Beat] = field(default_factory=dict)
    reports: Mapping[int, RankReport] = field(default_factory=dict)
    errs: Mapping[int, ErrReport] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


class RankFileReader:
    """Reads the rank files of an attempt's folder again and again; unchanged ones are not read twice."""

    def __init__(self, folder: Path, *, attempt_id: str) -> None:
        self._folder = folder
        self._attempt_id = attempt_id
        self._known: dict[str, tuple[tuple[int, int, int], Beat | RankReport | ErrReport | str]] = {}

    def scan(self) -> Snapshot:
        """What is there now. Raises StorageError when the folder cannot be read."""
        found: dict[str, tuple[tuple[int, int, int], Beat | RankReport | ErrReport | str]] = {}
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    match = _NAME.fullmatch(entry.name)
                    if match is None:
                        continue
                    status = entry.stat(follow_symlinks=False)
                    stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
                    before = self._known.get(entry.name)
                    if before is not None and before[0] == stamp:
                        found[entry.name] = before
                    else:
                        found[entry.name] = (stamp, self._read(entry.name, int(match[1])))
        except FileNotFoundError as error:
            # A rename during the listing; only the folder itself may not be gone.
            if not self._folder.is_dir():
                raise StorageError(f"{self._folder}: the attempt's folder is gone") from error
            return self._snapshot(self._known)
        except OSError as error:
            raise StorageError(f"{self._folder}: cannot be read: {error.strerror}") from error
        self._known = found
        return self._snapshot(found)

    def _read(self, name: str, rank: int) -> Beat | RankReport | ErrReport | str:
        path = self._folder / name
        item: Beat | RankReport | ErrReport
        try:
            if name.endswith(".beat.json"):
                item = read_sheet(Beat, path, max_bytes=MAX_BEAT_BYTES)
                stated = item.rank
            elif name.endswith(".err.json"):
                item = read_sheet(ErrReport, path)
                stated = item.launch_rank
            else:
                item = read_sheet(RankReport, path)
                stated = item.launch_rank
        except ConfigError as error:
            return str(error)
        if stated != rank:
            return f"{path}: rank {stated}: must be the {rank} of the file's name"
        return item

    def _snapshot(
        self, known: Mapping[str, tuple[tuple[int, int, int], Beat | RankReport | ErrReport | str]]
    ) -> Snapshot:
        items = [item for _, item in known.values()]
        ours = [item for item in items if not isinstance(item, str) and item.attempt_id == self._attempt_id]
        return Snapshot(
            beats={item.rank: item for item in ours if isinstance(item, Beat)},
            reports={item.launch_rank: item for item in ours if isinstance(item, RankReport)},
            errs={item.launch_rank: item for item in ours if isinstance(item, ErrReport)},
            faults=tuple(sorted(item for item in items if isinstance(item, str))),
        )
