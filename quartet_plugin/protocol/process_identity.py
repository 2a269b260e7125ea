"""Which process a file means: its pid alone is given to others later."""

from dataclasses import dataclass, field
from typing import Annotated

from quartet_plugin.model.schema import ADDED, Bounds, record
from quartet_plugin.protocol.attempt_files import Name, Pid, Seconds, Version

# Only where the system does not count ticks: a start time in seconds moves when the clock is set.
_START_TOLERANCE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Identity:
    """The identity of a process: a pid that is used again has another start time or boot.

    `start_ticks` counts clock ticks from the boot to the start, which no setting of the clock changes; None
    where nobody has looked. `process_start` is the same in seconds since 1970. `pid` is a number of the pid
    namespace with the inode `pid_namespace`, one for each container; None where the system has none.
    """

    pid: Pid
    process_start: Seconds
    boot_id: Name
    start_ticks: Annotated[int, Bounds(ge=0)] | None = field(default=None, compare=False)
    pid_namespace: Annotated[int, Bounds(ge=0)] | None = field(default=None, compare=False, metadata=ADDED)

    def is_same(self, other: "Identity | None") -> bool:
        """Whether two identities of one pid and one boot are the same process."""
        if other is None:
            return False
        if self.start_ticks is not None and other.start_ticks is not None:
            return self.start_ticks == other.start_ticks
        return abs(self.process_start - other.process_start) <= _START_TOLERANCE_S


@record
class Holder(Identity):
    """lock.json: the process that holds the run, and how often the run has changed hands."""

    host: Name
    generation: Annotated[int, Bounds(ge=1, le=2**53)]
    schema_version: Version = 1

    @property
    def identity(self) -> Identity:
        """The process alone."""
        return Identity(
            pid=self.pid,
            process_start=self.process_start,
            boot_id=self.boot_id,
            start_ticks=self.start_ticks,
            pid_namespace=self.pid_namespace,
        )

    def __str__(self) -> str:
        """The holder's name for messages."""
        return f"process {self.pid} on {self.host}"
