"""Reads a trial's folder: the attempt that counts, its measurements, and the progress of a running one."""

import contextlib
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from quartet_plugin.errors import QuartetError
from quartet_plugin.launchers.device_slices import DeviceSlice
from quartet_plugin.launchers.running_process import is_of_other_boot, runs_on
from quartet_plugin.model.history import LeaseHolder, RankMemory, TrialRow, WorkerRow
from quartet_plugin.model.plan import Plan, read_plan
from quartet_plugin.protocol.environment import EXPIRY_S
from quartet_plugin.protocol.rank_files import RankReport, reader_of
from quartet_plugin.trial.attempt import PREFIX, attempt_number, open_attempt, read_result
from quartet_plugin.trial.lease import LOCK_NAME, read_holder
from quartet_plugin.trial.request import PHASES, TrialResult
from quartet_plugin.tuner.trial_backend import SETTLED
from quartet_plugin.tuner.workers.work_queue import WorkQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptState:
    """The attempt of a trial's folder that counts: the settled one, else the latest.

    `began_at` is seconds since 1970; `phase` and `iteration` are the slowest process's of one that runs.
    """

    folder: Path
    attempt: int
    num_attempts: int
    plan: Plan | None = None
    result: TrialResult | None = None
    reports: tuple[RankReport, ...] = ()
    began_at: float | None = None
    phase: str = "launch"
    iteration: int = 0
    num_iterations: int = 0

    def row(self, number: int) -> TrialRow:
        """The trial's row from its folder only."""
        result = self.result
        row = TrialRow(
            number=number,
            plan=self.plan,
            num_attempts=self.num_attempts,
            phase=self.phase,
            folder=str(Path(*self.folder.parts[-3:])),
        )
        if result is None:
            return row
        return replace(
            row,
            phase=result.phase,
            outcome=result.outcome.value,
            reason=result.reason,
            iterations_s=result.iteration_s if result.is_measured else (),
            iteration_s=statistics.median(result.iteration_s) if result.is_measured else None,
            peak_memory_bytes=result.peak_memory_bytes,
            memory_excess_bytes=result.memory_excess_bytes,
            ranks=tuple(
                RankMemory(rank=report.rank, peak_bytes=report.peak_memory_bytes)
                for report in sorted(self.reports, key=lambda report: report.rank)
            ),
            wall_s=result.wall_s,
            is_cut=result.is_cut,
        )


def read_launch(folder: Path, *, faults: list[str]) -> AttemptState:
    """The trial's folder, superseded attempts left out; what cannot be read is added to `faults`."""
    attempts = sorted((path for path in folder.glob(f"{PREFIX}*") if path.is_dir()), key=attempt_number)
    results: list[tuple[Path, TrialResult | None]] = []
    for path in attempts:
        try:
            results.append((path, read_result(path)))
        except QuartetError as error:
            faults.append(str(error))
            results.append((path, None))
    results = [pair for pair in results if pair[1] is None or not pair[1].is_superseded]
    if not results:
        return AttemptState(folder=folder, attempt=0, num_attempts=len(attempts))
    settled = [pair for pair in results if pair[1] is not None and pair[1].outcome in SETTLED]
    path, result = (settled or results)[-1]
    plan, reports = _plan_and_reports(path, result, faults=faults)
    launch = AttemptState(
        folder=path,
        attempt=attempt_number(path),
        num_attempts=len(attempts),
        plan=plan,
        result=result,
        reports=reports,
    )
    return launch if result is not None else _with_progress(launch, faults=faults)


def _plan_and_reports(
    path: Path, result: TrialResult | None, *, faults: list[str]
) -> tuple[Plan | None, tuple[RankReport, ...]]:
    plan: Plan | None = None
    reports: tuple[RankReport, ...] = ()
    try:
        if (path / "plan.json").exists():
            plan = read_plan(path / "plan.json")
        if result is not None:
            reports = tuple(result.rank_files().reports.values())
    except QuartetError as error:
        faults.append(str(error))
    return plan, reports


def _with_progress(launch: AttemptState, *, faults: list[str]) -> AttemptState:
    try:
        attempt = open_attempt(launch.folder)
        if attempt is None:
            return launch
        beats = reader_of(launch.folder, attempt_id=attempt.spec.attempt_id).scan().beats.values()
    except QuartetError as error:
        faults.append(str(error))
        return launch
    spec = attempt.spec
    slowest = min(beats, key=lambda beat: (PHASES.index(beat.phase), beat.iteration), default=None)
    return replace(
        launch,
        began_at=attempt.command.time,
        num_iterations=spec.num_iterations,
        phase=slowest.phase if slowest else "launch",
        iteration=slowest.iteration if slowest else 0,
    )


def holder_of(folder: Path, *, now: float) -> LeaseHolder | None:
    """The holder of the run's lease; None if no process holds it, or if lock.json cannot be read.

    A holder of another boot with this host's name counts as ended once its lease has expired.
    """
    with contextlib.suppress(FileNotFoundError, QuartetError):
        if (holder := read_holder(folder)) is None:
            return None
        renewed_s = now - (folder / LOCK_NAME).lstat().st_mtime
        # A lock far in the future is of a time before this host's clock was set.
        has_expired = abs(renewed_s) > EXPIRY_S and is_of_other_boot(holder, host=holder.host)
        return LeaseHolder(
            host=holder.host,
            pid=holder.pid,
            generation=holder.generation,
            is_alive=False if has_expired else runs_on(holder, host=holder.host),
            renewed_s=max(0.0, renewed_s),
        )
    return None


def workers_of(folder: Path, *, now: float) -> tuple[WorkerRow, ...]:
    """The workers of a run, each with the trial it measures; empty where the run takes none."""
    queue = WorkQueue(folder=folder)
    if not queue.is_there:
        return ()
    with contextlib.suppress(QuartetError):
        claims = [queue.claim_of(queued) for queued in queue.queued_trials()]
        held = {claim.worker: claim.trial for claim in claims if claim is not None}
        return tuple(
            WorkerRow(
                name=worker.name,
                host=worker.host,
                pid=worker.identity.pid,
                devices=DeviceSlice.of(worker.share).label,
                trial=held.get(worker.name),
                renewed_s=max(0.0, now - (queue.beat_of(worker) or 0) / 1e9),
            )
            for worker in queue.workers()
        )
    return ()
