"""Workers without processes: they take, renew and finish as a test says, and measure what a machine says."""

import os
import secrets
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from quartet_plugin.launchers.running_process import boot_id, current_identity
from quartet_plugin.protocol.process_identity import Identity
from quartet_plugin.protocol.work_queue_files import Claim, Done, QueuedTrial, SliceRecord, WorkerRecord
from quartet_plugin.trial.request import Outcome, TrialResult
from quartet_plugin.tuner.trial_backend import SETTLED
from quartet_plugin.tuner.workers.work_queue import WorkQueue

HERE, ELSEWHERE = "here", "elsewhere"
COORDINATOR = Identity(pid=2, process_start=1.0, boot_id="b")
_TICKS = count(1)


def identity(pid: int) -> Identity:
    """A process of this boot that only tests know."""
    return Identity(pid=pid, process_start=float(pid), boot_id=boot_id())


def contained_identity() -> Identity:
    """A process of another container of this machine, which this process cannot see."""
    me = current_identity()
    assert me.pid_namespace is not None
    return replace(me, pid=2**30, pid_namespace=me.pid_namespace + 1)


def identity_of_other_boot() -> Identity:
    """A process of this machine before a reboot, or of another machine with its host name."""
    return replace(current_identity(), boot_id="another")


def worker_record(name: str, *, pid: int, host: str = HERE, is_joined: bool = False) -> WorkerRecord:
    """A worker that has registered."""
    return WorkerRecord(
        name=name,
        host=host,
        identity=identity(pid),
        parent=COORDINATOR,
        share=SliceRecord(device="cpu", cores=(0, 1)),
        is_joined=is_joined,
    )


@dataclass
class Disk:
    """What attempts left; the part of the launches that a dispatcher needs."""

    results: dict[Path, TrialResult] = field(default_factory=dict)
    recovered: list[Path] = field(default_factory=list)

    def read(self, attempt: Path) -> TrialResult | None:
        """The result of an attempt."""
        return self.results.get(attempt)

    def recorded(self, folder: Path, *, plan_key: str | None) -> TrialResult | None:
        """The settled result of a trial's folder, as `Launches.recorded` finds it."""
        for attempt in sorted(self.results, key=lambda path: path.name, reverse=True):
            result = self.results[attempt]
            if attempt.parent == folder and result.plan_key == plan_key and result.outcome in SETTLED:
                return result
        return None

    def recover(self, folder: Path, **options: Any) -> None:
        """Nothing runs, so nothing is ended."""
        self.recovered.append(folder)


@dataclass
class Hand:
    """One worker's hands."""

    queue: WorkQueue
    disk: Disk
    record: WorkerRecord
    queued: QueuedTrial | None = None
    claim: Claim | None = None

    def take(self) -> bool:
        """Take an order; whether there was one."""
        assert self.claim is None
        taken = self.queue.take(self.record)
        if taken is not None:
            self.queued, self.claim = taken
        return taken is not None

    def renew(self) -> bool:
        """Say that it lives. The time of a file is set apart from every other by hand: tests are fast."""
        assert self.claim is not None
        is_held = self.queue.renew(self.claim)
        if is_held:
            tick = next(_TICKS) * 1_000_000_000
            os.utime(self.queue.path / "claims" / f"{self.claim.stem}.json", ns=(tick, tick))
        return is_held

    def measure(self, outcome: Outcome = Outcome.OK) -> TrialResult:
        """Leave a result in an attempt's folder of the trial."""
        assert self.queued is not None
        folder = self.queue.trial_folder(self.queued.trial) / f"attempt-{self.queued.attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        result = TrialResult(
            attempt_id=self.queued.fence + secrets.token_hex(8),
            plan_key=self.queued.plan_key,
            outcome=outcome,
            reason=outcome.value,
            phase="done",
            iteration_s=(0.1, 0.1) if outcome is Outcome.OK else (),
            folder=folder,
        )
        self.disk.results[folder] = result
        return result

    def report(self) -> bool:
        """Say that it is done; whether that counts."""
        assert self.queued is not None
        assert self.claim is not None
        is_told = self.queue.finish(self.claim, Done(fence=self.queued.fence, attempt=self.queued.attempt))
        self.queued = self.claim = None
        return is_told

    def give_up(self, error: str) -> bool:
        """Say that trials cannot be run here."""
        assert self.claim is not None
        done = Done(fence=self.claim.fence, attempt=None, error=error, exit_code=6)
        is_told = self.queue.finish(self.claim, done)
        self.queued = self.claim = None
        return is_told
