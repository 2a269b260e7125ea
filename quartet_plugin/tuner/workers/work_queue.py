"""The work queue of a run: the trials that its coordinator queues, their claims and results, as files.

    RUN/workers/board.json                 the run takes workers; how many devices each has
    RUN/workers/orders/000012.json         a queued trial, with its plan, 000012.plan.json; closed where
                                           nobody may take it any more
    RUN/workers/claims/000012-2.json       who took its second hand-out; renewed by its modification time
    RUN/workers/claims/000012-2.done.json  what came of it
    RUN/workers/crew/NAME.json             a worker; renewed in the same way

Only the coordinator queues trials, and with a queued trial's next generation every claim to an earlier one
is void. A claim appears whole or not at all and never over another (`link`), so a hand-out has one taker.
"""

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from quartet_plugin.errors import ConfigError, StorageError
from quartet_plugin.launchers.running_process import is_of_other_boot
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.plan import Plan, read_plan, write_plan
from quartet_plugin.model.schema import dump
from quartet_plugin.protocol.environment import EXPIRY_S, LEASE_RENEWAL_S
from quartet_plugin.protocol.work_queue_files import (
    WORKER_NAME,
    Claim,
    Done,
    QueuedTrial,
    WorkerRecord,
    WorkerRequirement,
    read,
)
from quartet_plugin.trial.lease import age_s

QUEUE_NAME = "workers"
_NUMBER = re.compile(r"([0-9]{6,})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkQueue:
    """The work queue of the run in `folder`. Each method raises StorageError when the disk fails."""

    folder: Path

    @property
    def path(self) -> Path:
        """The folder of the queue, inside of the run's."""
        return self.folder / QUEUE_NAME

    @property
    def is_there(self) -> bool:
        """Whether the run ever took workers."""
        return self.path.is_dir()

    def trial_folder(self, number: int) -> Path:
        """The folder of a trial's attempts."""
        return self.folder / "trials" / f"{number:06d}"

    # The coordinator's side

    def open(self, offer: WorkerRequirement) -> None:
        """Let workers come."""
        with self._errors():
            for name in ("orders", "claims", "crew"):
                (self.path / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json_atomic(self.path / "board.json", dump(offer))

    def sweep(self) -> None:
        """Remove what killed writers left half-written."""
        with self._errors():
            for torn in (*self.path.rglob(".*.draft"), *self.path.rglob(".*.tmp")):
                torn.unlink(missing_ok=True)

    def offer(self) -> WorkerRequirement | None:
        """The devices that workers must have; None where the run takes none now."""
        with contextlib.suppress(FileNotFoundError):
            return read(WorkerRequirement, self.path / "board.json")
        return None

    def publish(self, queued: QueuedTrial, plan: Plan) -> None:
        """Queue a plan; workers with an earlier generation of it lose their claim."""
        write_plan(plan, path=self._plan_file(queued.trial))
        write_json_atomic(self._queued_file(queued.trial), dump(queued))
        for claim in self.claims(trial=queued.trial):
            if claim.generation != queued.generation:
                self.void(claim)

    def close(self) -> None:
        """Close the queue to workers; the queued trials wait for a tuner that resumes the run."""
        with self._errors():
            (self.path / "board.json").unlink(missing_ok=True)
        for queued in self.queued_trials():
            if not queued.is_closed:
                write_json_atomic(self._queued_file(queued.trial), dump(replace(queued, is_closed=True)))
            for claim in self.claims(trial=queued.trial):
                self.void(claim)

    def withdraw(self, trial: int) -> None:
        """Remove the files of a finished trial."""
        with self._errors():
            self._queued_file(trial).unlink(missing_ok=True)
            self._plan_file(trial).unlink(missing_ok=True)
            for path in (self.path / "claims").glob(f"{trial:06d}-*"):
                path.unlink(missing_ok=True)

    def dismiss(self, worker: str) -> None:
        """Let a worker take nothing more."""
        with self._errors():
            (self.path / "crew" / f"{worker}.dismissed").touch(mode=0o600)

    def forget(self, worker: str) -> None:
        """Remove a worker that has ended."""
        with self._errors():
            (self.path / "crew" / f"{worker}.json").unlink(missing_ok=True)

    # Read by both sides

    def queued_trials(self) -> list[QueuedTrial]:
        """Every queued trial, closed ones too; a file that breaks its format is left out."""
        queued_trials = []
        for name in self._names("orders"):
            match = _NUMBER.fullmatch(name)
            queued = None if match is None else self.queued_trial(int(match[1]))
            if queued is not None:
                queued_trials.append(queued)
        return queued_trials

    def queued_trial(self, trial: int) -> QueuedTrial | None:
        """The current state of the queued trial of this number."""
        return _read_if_whole(QueuedTrial, self._queued_file(trial))

    def plan(self, queued: QueuedTrial) -> Plan:
        """The plan of a queued trial. Raises PlanError or ConfigError where it is another one."""
        plan = read_plan(self._plan_file(queued.trial))
        if plan.key != queued.plan_key:
            raise ConfigError(f"{self._plan_file(queued.trial)}: not the plan of the queued trial beside it")
        return plan

    def claims(self, *, trial: int | None = None, has_voided: bool = False) -> list[Claim]:
        """Every claim, of one trial or of all; with `has_voided` those that were taken back as well."""
        endings = (".json", ".void.json") if has_voided else (".json",)
        claims = []
        for name in self._names("claims"):
            stem, _, ending = name.partition(".")
            if f".{ending}" in endings and (trial is None or stem.startswith(f"{trial:06d}-")):
                claims.append(_read_if_whole(Claim, self.path / "claims" / name))
        return [claim for claim in claims if claim is not None]

    def claim_of(self, queued: QueuedTrial) -> Claim | None:
        """The valid claim to a queued trial."""
        claim = _read_if_whole(Claim, self._claim_file(queued))
        return claim if claim is not None and claim.fence == queued.fence else None

    def done_of(self, queued: QueuedTrial) -> Done | None:
        """The end of the present hand-out of a queued trial."""
        done = _read_if_whole(Done, self._claim_file(queued, "done."))
        return done if done is not None and done.fence == queued.fence else None

    def workers(self) -> list[WorkerRecord]:
        """Every worker that registered and was not removed."""
        names = (name for name in self._names("crew") if name.endswith(".json"))
        workers = [_read_if_whole(WorkerRecord, self.path / "crew" / name) for name in names]
        return [worker for worker in workers if worker is not None]

    def beat_of(self, holder: Claim | WorkerRecord) -> int | None:
        """When a claim or a worker was last renewed, in ns by the server's clock; None where it is gone."""
        with contextlib.suppress(OSError):
            return self._renewed_file(holder).lstat().st_mtime_ns
        return None

    def is_of_ended_boot(self, holder: Claim | WorkerRecord, *, here: str) -> bool:
        """Whether a claim or a worker is of another boot of this host, `here`, and is not renewed any more.

        A worker on another machine with this host's name renews both every few seconds.
        """
        if not is_of_other_boot(holder.identity, host=holder.host, here=here):
            return False
        # The tuner's own lease is renewed less often than they are, and may have been waited for.
        least_s = EXPIRY_S - 2 * LEASE_RENEWAL_S
        return age_s(self._renewed_file(holder)) > least_s

    # A worker's side

    def register(self, worker: WorkerRecord) -> None:
        """Write a worker's file, after which it may take queued trials."""
        if not WORKER_NAME.fullmatch(worker.name):
            raise ConfigError(f"worker {worker.name[:60]!r}: letters, digits, '.', '_' and '-' alone")
        with self._errors():
            (self.path / "crew" / f"{worker.name}.dismissed").unlink(missing_ok=True)
        write_json_atomic(self.path / "crew" / f"{worker.name}.json", dump(worker))

    def is_dismissed(self, worker: WorkerRecord) -> bool:
        """Whether the worker is to take nothing more, or was removed."""
        folder = self.path / "crew"
        is_dismissed = (folder / f"{worker.name}.dismissed").exists()
        return is_dismissed or not (folder / f"{worker.name}.json").exists()

    def beat(self, worker: WorkerRecord) -> None:
        """Renew a worker."""
        with contextlib.suppress(OSError):
            os.utime(self.path / "crew" / f"{worker.name}.json")

    def take(self, worker: WorkerRecord) -> tuple[QueuedTrial, Claim] | None:
        """A queued trial without a claim, now the worker's; None where there is none."""
        for queued in self.queued_trials():
            if queued.is_closed or queued.host not in (None, worker.host):
                continue
            if self._claim_file(queued).exists():
                continue
            claim = Claim(
                trial=queued.trial,
                generation=queued.generation,
                fence=queued.fence,
                worker=worker.name,
                host=worker.host,
                identity=worker.identity,
            )
            if not self._link(claim):
                continue
            if self.queued_trial(queued.trial) == queued:
                return queued, claim
            self._claim_file(claim).unlink(missing_ok=True)  # it was taken back in this moment
        return None

    def renew(self, claim: Claim) -> bool:
        """Renew a claim; False where the claim is void, and then the trial must end.

        Raises StorageError where the file system fails, which says nothing of the claim.
        """
        queued = self.queued_trial(claim.trial)
        if queued is None or queued.fence != claim.fence or queued.is_closed:
            return False
        with self._errors():
            try:
                os.utime(self._claim_file(claim))
            except FileNotFoundError:
                return False
        return True

    def finish(self, claim: Claim, done: Done) -> bool:
        """Write the end of a claim; False where it is void: its result is kept on disk and does not count."""
        if not self.renew(claim):
            return False
        write_json_atomic(self._claim_file(claim, "done."), dump(done))
        return True

    # Files

    def _renewed_file(self, holder: Claim | WorkerRecord) -> Path:
        if isinstance(holder, WorkerRecord):
            return self.path / "crew" / f"{holder.name}.json"
        return self._claim_file(holder)

    def _queued_file(self, trial: int) -> Path:
        return self.path / "orders" / f"{trial:06d}.json"

    def _plan_file(self, trial: int) -> Path:
        return self.path / "orders" / f"{trial:06d}.plan.json"

    def _claim_file(self, hand_out: QueuedTrial | Claim, kind: str = "") -> Path:
        return self.path / "claims" / f"{hand_out.stem}.{kind}json"

    def void(self, claim: Claim) -> None:
        """Withdraw a claim; it identifies the processes that were left behind on its host."""
        with self._errors(), contextlib.suppress(FileNotFoundError):
            self._claim_file(claim).replace(self._claim_file(claim, "void."))

    def _link(self, claim: Claim) -> bool:
        """Make the claim's file, whole, unless there is one."""
        target = self._claim_file(claim)
        draft = target.with_name(f".{claim.stem}.{secrets.token_hex(4)}.draft")
        with self._errors():
            try:
                write_json_atomic(draft, dump(claim))
                os.link(draft, target)
            except (FileExistsError, FileNotFoundError):
                return False
            finally:
                draft.unlink(missing_ok=True)
        return True

    def _names(self, folder: str) -> list[str]:
        with self._errors(), contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(self.path / folder))  # noqa: PTH208
        return []

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read or written: {error.strerror}") from error


def _read_if_whole[Message](kind: type[Message], path: Path) -> Message | None:
    """A message; None where the file is gone or breaks its format."""
    with contextlib.suppress(FileNotFoundError, ConfigError):
        return read(kind, path)
    return None
