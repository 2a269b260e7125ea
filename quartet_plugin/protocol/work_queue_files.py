"""The files of a work queue, a dataclass each: offers, queued trials, claims, their results, workers."""

import json
import re
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import parse_json
from quartet_plugin.model.schema import ADDED, Bounds, Length, Matches, dump, parse, record
from quartet_plugin.protocol.attempt_files import Count, Name, PlanKey, Seconds, Text, Version, read_shared
from quartet_plugin.protocol.measured_window import EarlyEnd
from quartet_plugin.protocol.process_identity import Identity

_MAX_BYTES = 1 << 20

WORKER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")

Fence = Annotated[str, Matches(pattern=r"[0-9a-f]{16}")]
Generation = Annotated[int, Bounds(ge=1, le=2**31)]
WorkerName = Annotated[str, Matches(pattern=WORKER_NAME.pattern)]


@record
class WorkerRequirement:
    """board.json: the devices a worker must have, so that its times compare with the baseline's."""

    device: Literal["cpu", "cuda"]
    num_devices: Annotated[int, Bounds(ge=0, le=65_536)]
    schema_version: Version = 1


@record
class _HandOut:
    """The common part of a queued trial and its claims: the trial, its generation and fence."""

    trial: Count
    generation: Generation
    fence: Fence

    @property
    def stem(self) -> str:
        """The stem of the names of its hand-out's files."""
        return f"{self.trial:06d}-{self.generation}"


@record
class QueuedTrial(_HandOut):
    """A plan to be measured once. `fence` begins the ids of its attempts, the first of them `attempt`.

    `host` is the only one that may take it, where the plan's mapping names slots there.
    """

    attempt: Annotated[int, Bounds(ge=1, le=100_000)]
    plan_key: PlanKey
    host: Name | None
    warmup: Count
    measure: Annotated[int, Bounds(ge=1, le=100_000)]
    deadline_s: Seconds
    predicted_iteration_s: Seconds | None
    slow_above_s: Seconds | None
    timeouts: Annotated[dict[Name, Seconds], Length(most=64)]
    is_closed: bool = False
    max_warmup: Count | None = field(default=None, metadata=ADDED)
    early_end: EarlyEnd | None = field(default=None, metadata=ADDED)
    modules: Annotated[tuple[Name, ...], Length(most=10_000)] | None = field(default=None, metadata=ADDED)
    schema_version: Version = 1


@record
class Claim(_HandOut):
    """A worker's claim to a queued trial."""

    worker: WorkerName
    host: Name
    identity: Identity
    schema_version: Version = 1

    def __str__(self) -> str:
        """The worker, for the user."""
        return f"worker {self.worker} (process {self.identity.pid} on {self.host})"


@record
class Done:
    """The end of a claim: the attempt that counts, or why the worker gave up."""

    fence: Fence
    attempt: Annotated[int, Bounds(ge=1, le=2**31)] | None
    error: Text | None = None
    exit_code: Annotated[int, Bounds(ge=0, le=255)] = 0
    schema_version: Version = 1


@record
class SliceRecord:
    """The devices of a worker, as its file names them."""

    device: Literal["cpu", "cuda"]
    index: Annotated[int, Bounds(ge=0, le=65_536)] = 0
    count: Annotated[int, Bounds(ge=1, le=65_536)] = 1
    cores: Annotated[tuple[Count, ...], Length(most=65_536)] = ()
    devices: Annotated[tuple[Name, ...], Length(most=65_536)] = ()
    is_alone: bool = True
    nodes: Annotated[tuple[Name, ...], Length(most=65_536)] = ()
    num_nodes: Annotated[int, Bounds(ge=0, le=65_536)] = 0


@record
class WorkerRecord:
    """crew/NAME.json: a worker. `parent` started it and is a coordinator, or the process that joined."""

    name: WorkerName
    host: Name
    identity: Identity
    parent: Identity
    share: SliceRecord
    is_joined: bool
    schema_version: Version = 1


@record
class Task:
    """The task of a worker's process, sent when it starts; never on disk, for the command's secrets."""

    command: Annotated[tuple[str, ...], Length(most=100_000)]
    share: SliceRecord
    parent: Identity
    is_joined: bool
    schema_version: Version = 1


def read[Message](kind: type[Message], path: Path) -> Message:
    """A message of the queue. Raises FileNotFoundError, and what `read_shared` does."""
    return read_shared(kind, path, max_bytes=_MAX_BYTES)


def task_text(task: Task) -> bytes:
    """A task as it is sent."""
    return json.dumps(dump(task)).encode()


def read_task(text: bytes) -> Task:
    """A task as it was sent. Raises ConfigError."""
    try:
        return parse(Task, parse_json(text, where="work"), where="work")
    except ConfigError as error:
        raise ConfigError("work: no task on the standard input; it is started by quartet tune") from error


def worker_name(host: str, *rest: str | int) -> str:
    """A worker's name, fit for a file."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "-", host).strip("-._") or "host"
    return "-".join([plain[:100], *map(str, rest)])
