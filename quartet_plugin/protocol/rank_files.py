"""What each rank of an attempt leaves in its folder, as records; the tuner reads them as untrusted input.

`K` in a file's name is the rank that the launcher gave the process. docs/formats.md describes each file.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from quartet_plugin.errors import ConfigError, StorageError
from quartet_plugin.model.packed_lengths import PackedTokens
from quartet_plugin.model.schema import ADDED, Bounds, Length, Matches, Number, record
from quartet_plugin.protocol.attempt_files import (
    AttemptId,
    Count,
    Name,
    Pid,
    PlanKey,
    Rank,
    Seconds,
    Text,
    Version,
    read_shared,
)
from quartet_plugin.protocol.execution import Execution
from quartet_plugin.protocol.measured_window import EarlyEndReason

MAX_ACTIONS = 5_000_000
MAX_HEARTBEAT_BYTES = 64 * 1024

RankPhase = Literal["import", "init", "warmup", "measure", "done"]
ErrorKind = Literal["out-of-memory", "refused", "plan", "seam", "network", "error"]
StepPart = Literal["iteration", "forward_backward", "finalize", "optimizer"]

_NAME = re.compile(r"rank-(0|[1-9][0-9]{0,4})(\.beat|\.err|)\.json", re.ASCII)
_ACTION = re.compile(r"([0-9]{1,5})([FIWB])[0-9]{1,6}", re.ASCII)
_Times = Annotated[tuple[Seconds, ...], Length(most=MAX_ACTIONS)]
_PartSeconds = Annotated[float, Bounds(ge=0, le=1e6)]


@record
class Heartbeat:
    """rank-K.beat.json: where a rank's process is. `rank` is the launcher's.

    `progress` grows as long as a first step goes on; no other step has it.
    """

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
    progress: Count | None = field(default=None, metadata=ADDED)


@record
class Iteration:
    """One iteration as a rank saw it; `loss` only on ranks of the last stage.

    `packed`: the tokens of its microbatches where they are packed sequences; None where nothing says so.
    """

    iteration: Count
    iteration_s: Seconds
    loss: Number | None
    grad_norm: Number | None
    skipped: bool
    packed: PackedTokens | None = field(default=None, metadata=ADDED)


@record
class DeviceMemory:
    """What a rank's CUDA device held: tensors, the allocator's pool around them, and all the rest.

    Both peaks are of the process. A pool grows to what it can get: it says nothing of what training needs.
    `untracked_bytes` at the end lie outside of it: the driver's context, communicators, other processes.
    """

    peak_allocated_bytes: Count
    peak_reserved_bytes: Count
    untracked_bytes: Count


@record
class CoreLimit:
    """A control group of Linux that lets its processes keep at most `num_cores` cores busy on average."""

    group: Text
    num_cores: Annotated[float, Bounds(ge=0, le=1e6)]


@record
class RankReport:
    """rank-K.json: what a rank measured, warm-up included, and what it did. `job` is on RANK 0 alone.

    `cores` are the processor cores that a rank that trains on them may use, `core_limit` says how much of
    them; None without a limit. `network_namespace` is the inode of the network namespace of such a rank.
    `ended_early` is why RANK 0 ended the trial before its last iteration. `product_s` are the seconds of
    equal runs of matrix products after the last iteration; None where the training ended by itself.
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
    core_limit: CoreLimit | None = field(default=None, metadata=ADDED)
    network_namespace: Count | None = field(default=None, metadata=ADDED)
    memory: DeviceMemory | None = field(default=None, metadata=ADDED)
    execution: Execution | None = field(default=None, metadata=ADDED)
    ended_early: EarlyEndReason | None = field(default=None, metadata=ADDED)
    product_s: Annotated[tuple[Seconds, ...], Length(least=1, most=1_000)] | None = field(
        default=None, metadata=ADDED
    )


def num_cores_of(reports: Iterable[RankReport]) -> int:
    """The processor cores that ranks of a host share: those that they may use, within their limits.

    A part of a core counts as the nearest number of whole ones, 1 at least; 0 for ranks with accelerators.
    """
    reports = tuple(reports)
    num_cores = len({core for report in reports for core in report.cores or ()})
    limits = {report.core_limit for report in reports}
    limit = sum(num_cores if limit is None else limit.num_cores for limit in limits)
    return min(num_cores, max(1, round(limit)))


@record
class FailureReport:
    """What the exception that ended a rank says."""

    kind: ErrorKind
    type: Name
    message: Text
    exit_code: Annotated[int, Bounds(ge=0, le=255)]
    peak_memory_bytes: Count
    wanted_bytes: Count
    traceback: Annotated[tuple[Text, ...], Length(most=10_000)]


@record
class CommandFailure(FailureReport):
    """rank-K.err.json outside of a trial, in the folder that `quartet train` names."""

    launch_rank: Rank
    time: Seconds


@record
class RankFailure(FailureReport):
    """rank-K.err.json: how a rank of a trial failed."""

    schema_version: Version
    attempt_id: AttemptId
    rank: Rank
    launch_rank: Rank
    host: Name
    phase: RankPhase
    iteration: Count
    time: Seconds


@record
class StepGradients:
    """The squared gradient norms of one step, of a rank's share of every part of the model.

    `expert_tokens` are those that the rank routed to each expert, by part; None where no router was counted.
    """

    squares: Annotated[dict[Name, Number], Length(most=100_000)]
    expert_tokens: (
        Annotated[
            dict[Name, Annotated[tuple[Annotated[int, Bounds(ge=0)], ...], Length(most=65_536)]],
            Length(most=100_000),
        ]
        | None
    ) = field(default=None, metadata=ADDED)


@record
class RankGradients:
    """rank-K.parity.json: what the parity gate compares beside loss and gradient norm.

    Of a trial whose first iterations alone are compared: `settings` are those that were set aside for them,
    `weights_s` the seconds that saving or loading the weights took, and `unavailable` says why nothing is
    compared.
    """

    schema_version: Version
    attempt_id: AttemptId
    launch_rank: Rank
    steps: Annotated[tuple[StepGradients, ...], Length(most=100_000)]
    settings: Annotated[tuple[Name, ...], Length(most=64)] | None = field(default=None, metadata=ADDED)
    weights_s: Seconds | None = field(default=None, metadata=ADDED)
    unavailable: Name | None = field(default=None, metadata=ADDED)


@record
class ActionTimes:
    """rank-K.actions.json: one device's actions in the last step, in seconds since `begin_at`."""

    schema_version: Version
    attempt_id: AttemptId
    launch_rank: Rank
    device: Rank
    replica: Rank
    begin_at: Seconds
    actions: Annotated[tuple[Annotated[str, Length(most=32)], ...], Length(most=MAX_ACTIONS)]
    start_s: _Times
    end_s: _Times
    waiting_s: _Times
    peak_activation_bytes: Annotated[int, Bounds(ge=0)] | None = field(default=None, metadata=ADDED)

    def __post_init__(self) -> None:
        lengths = {len(self.actions), len(self.start_s), len(self.end_s), len(self.waiting_s)}
        if len(lengths) != 1 or not self.actions:
            raise ConfigError(f"actions: {len(self.actions)}; each needs one start, end and waiting time")


@record
class PartTimes:
    """A part of the model on one rank, seconds for a microbatch; None for what was not told apart."""

    name: Annotated[str, Matches(pattern=r"(embedding|head|other|layer\.[0-9]{1,6})")]
    forward_s: _PartSeconds | None
    backward_s: _PartSeconds | None
    input_grad_s: _PartSeconds | None
    weight_grad_s: _PartSeconds | None
    num_intervals: Count
    activation_bytes: Count


@record
class RankProfile:
    """rank-K.profile.json: what each part of the model and of a step takes on a rank, seconds."""

    schema_version: Version
    attempt_id: AttemptId
    launch_rank: Rank
    rank: Rank
    pipeline_rank: Rank
    tensor_rank: Rank
    device: Name
    peak_memory_bytes: Count
    parts: Annotated[tuple[PartTimes, ...], Length(most=100_000)]
    steps: Mapping[StepPart, _PartSeconds | None]
    job: Mapping[str, Any]


# Attempts whose records are kept in memory: the latest one, and one that is read beside it.
_MAX_KEPT = 2

# The end of the file's name by record.
_ENDINGS: Mapping[type, str] = {
    Heartbeat: ".beat",
    RankReport: "",
    CommandFailure: ".err",
    RankFailure: ".err",
    RankGradients: ".parity",
    ActionTimes: ".actions",
    RankProfile: ".profile",
}


def rank_file(kind: type, *, folder: str | Path, launch_rank: int) -> Path:
    """Where a rank leaves its record of that kind."""
    return Path(folder, f"rank-{launch_rank}{_ENDINGS[kind]}.json")


def rank_files_of(kind: type, folder: Path) -> list[Path]:
    """The files of that kind that ranks have left in a folder, by name."""
    return sorted(folder.glob(f"rank-*{_ENDINGS[kind]}.json"))


def read_actions(folder: Path) -> list[ActionTimes]:
    """The records of one pipeline (replica 0), by device. Raises ConfigError where one is missing or torn."""
    records = [read_shared(ActionTimes, path) for path in rank_files_of(ActionTimes, folder)]
    by_device = {times.device: times for times in records if times.replica == 0}
    if not by_device:
        raise ConfigError(
            f"{folder}: no rank-K.actions.json; only trials of a plan with a custom schedule have them"
        )
    is_complete = sorted(by_device) == list(range(len(by_device)))
    if not is_complete or len({times.attempt_id for times in by_device.values()}) != 1:
        raise ConfigError(
            f"{folder}: actions of devices {sorted(by_device)}; those of one attempt are needed"
        )
    return [by_device[device] for device in range(len(by_device))]


def seconds_by_stage(records: Iterable[ActionTimes]) -> dict[tuple[int, str], list[float]]:
    """How long the actions of each stage and kind (`F`, `I`, `W`, `B`) took, seconds."""
    seconds: dict[tuple[int, str], list[float]] = {}
    for times in records:
        for text, start, end in zip(times.actions, times.start_s, times.end_s, strict=True):
            if match := _ACTION.fullmatch(text):
                seconds.setdefault((int(match[1]), match[2]), []).append(end - start)
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An attempt's records by the launcher's rank; `faults` name files that break the format.

    Files of another attempt, which a late writer may leave, are left out.
    """

    beats: Mapping[int, Heartbeat] = field(default_factory=dict)
    reports: Mapping[int, RankReport] = field(default_factory=dict)
    errs: Mapping[int, RankFailure] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


_Record = Heartbeat | RankReport | RankFailure
# By the file's name: what tells its versions apart (inode, time, size), and its record or its fault.
_Entries = dict[str, tuple[tuple[int, int, int], _Record | str]]


class RankFileReader:
    """Reads the rank files of an attempt's folder again and again; unchanged ones are not read twice."""

    def __init__(self, folder: Path, *, attempt_id: str) -> None:
        self._folder = folder
        self._attempt_id = attempt_id
        self._known: _Entries = {}

    def scan(self) -> Snapshot:
        """What is there now. Raises StorageError when the folder cannot be read."""
        entries: _Entries = {}
        try:
            with os.scandir(self._folder) as listing:
                for entry in listing:
                    match = _NAME.fullmatch(entry.name)
                    if match is None:
                        continue
                    status = entry.stat(follow_symlinks=False)
                    stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
                    before = self._known.get(entry.name)
                    if before is not None and before[0] == stamp:
                        entries[entry.name] = before
                    else:
                        entries[entry.name] = (stamp, self._read(entry.name, int(match[1])))
        except FileNotFoundError as error:
            # A rename during the listing; only the folder itself may not be gone.
            if not self._folder.is_dir():
                raise StorageError(f"{self._folder}: the attempt's folder is gone") from error
            return self._snapshot(self._known)
        except OSError as error:
            raise StorageError(f"{self._folder}: cannot be read: {error.strerror}") from error
        self._known = entries
        return self._snapshot(entries)

    def _read(self, name: str, rank: int) -> _Record | str:
        """A file's record, or the fault that it has."""
        path = self._folder / name
        entry: _Record
        try:
            if name.endswith(".beat.json"):
                entry = read_shared(Heartbeat, path, max_bytes=MAX_HEARTBEAT_BYTES)
            elif name.endswith(".err.json"):
                entry = read_shared(RankFailure, path)
            else:
                entry = read_shared(RankReport, path)
        except ConfigError as error:
            return str(error)
        stated = entry.rank if isinstance(entry, Heartbeat) else entry.launch_rank
        if stated != rank:
            return f"{path}: rank {stated}: must be the {rank} of the file's name"
        return entry

    def _snapshot(self, entries: _Entries) -> Snapshot:
        records = [entry for _, entry in entries.values()]
        current = [
            entry for entry in records if not isinstance(entry, str) and entry.attempt_id == self._attempt_id
        ]
        return Snapshot(
            beats={entry.rank: entry for entry in current if isinstance(entry, Heartbeat)},
            reports={entry.launch_rank: entry for entry in current if isinstance(entry, RankReport)},
            errs={entry.launch_rank: entry for entry in current if isinstance(entry, RankFailure)},
            faults=tuple(sorted(entry for entry in records if isinstance(entry, str))),
        )


@lru_cache(maxsize=_MAX_KEPT)
def reader_of(folder: Path, *, attempt_id: str) -> RankFileReader:
    """The reader of an attempt's folder that the whole process shares.

    Many parts of a tuner look at an attempt that has ended: at 1,024 ranks each new reading is a wait.
    """
    return RankFileReader(folder, attempt_id=attempt_id)
