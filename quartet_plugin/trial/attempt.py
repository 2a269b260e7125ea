"""The folder of one attempt: the files written before its launch, and its result."""

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quartet_plugin.errors import ConfigError, PlanError, StorageError
from quartet_plugin.launchers.command import Command
from quartet_plugin.launchers.local import child_environment, resolve_device
from quartet_plugin.launchers.warm import StartRecord
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.packed_lengths import packed_lengths_of
from quartet_plugin.model.plan import Plan, read_plan, write_plan
from quartet_plugin.model.schema import as_number, dump
from quartet_plugin.protocol.attempt_files import (
    COMMAND_FILE,
    LOG_FILE,
    PLAN_FILE,
    PROCESSES_FILE,
    RESULT_FILE,
    STOP_FILE,
    TRIAL_FILE,
    CommandRecord,
    ResultRecord,
    TrialSpec,
    read_shared,
)
from quartet_plugin.protocol.environment import ATTEMPT_ID, DEVICE_FLAG, PLAN_FLAG, START, TRIAL_FLAG
from quartet_plugin.protocol.masking import collect_secrets, masked_argv, recorded_environment
from quartet_plugin.protocol.rank_files import Snapshot, reader_of
from quartet_plugin.protocol.training_start import START_FILE, STARTS_FOLDER, StartFile
from quartet_plugin.trial.log import last_lines, read_tail
from quartet_plugin.trial.outcome import Verdict
from quartet_plugin.trial.request import Outcome, TrialRequest, TrialResult

PREFIX = "attempt-"
# Fields of an AttemptOutcome that result.json holds as they are.
_PLAIN_FIELDS = (
    "reason",
    "phase",
    "memory_excess_bytes",
    "iteration_s",
    "peak_memory_bytes",
    "untracked_memory_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt whose files are written and whose processes may be started."""

    folder: Path
    spec: TrialSpec
    command: CommandRecord

    @property
    def log(self) -> Path:
        """The file that the processes print to."""
        return self.folder / LOG_FILE

    @property
    def stop_file(self) -> Path:
        """The file whose existence asks the ranks to end at their next iteration."""
        return self.folder / STOP_FILE

    def read_plan(self) -> Plan | None:
        """The plan that the ranks were given; None for the baseline, and for a file of something else."""
        if self.spec.plan_key is None:
            return None
        with contextlib.suppress(PlanError):
            plan = read_plan(self.folder / PLAN_FILE)
            return plan if plan.key == self.spec.plan_key else None
        return None

    @property
    def processes_file(self) -> Path:
        """The file that lists the processes of the attempt."""
        return self.folder / PROCESSES_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The command of an attempt with its whole environment; never written to a file."""

    attempt: Attempt
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: Path


def create_attempt(
    request: TrialRequest, *, number: int, port: int | None, engine: str | None = None
) -> Launch:
    """Make the first free attempt folder from `number` on, and write its trial.json and command.json.

    `engine` is the name of the one that starts it on nodes.

    Raises StorageError when the disk is too full or fails, or the folder is not a plain one.
    """
    collect_secrets(request.command.words)
    folder = _make_folder(request, number=number)
    device = resolve_device(request.device, environment=os.environ)
    attempt_id = request.fence + secrets.token_hex(16)[len(request.fence) :]
    flags = [TRIAL_FLAG, str(folder / TRIAL_FILE), DEVICE_FLAG, device]
    if request.plan is not None:
        write_plan(request.plan, path=folder / PLAN_FILE)
        flags += [PLAN_FLAG, str(folder / PLAN_FILE)]
    environment = child_environment(device, environment=os.environ)
    argv = started_argv(request.command, flags=flags, port=port, folder=folder, environment=environment)
    environment[ATTEMPT_ID] = attempt_id
    environment.setdefault("PYTHONFAULTHANDLER", "1")
    cwd = (request.cwd or Path()).absolute()
    spec = TrialSpec(
        attempt_id=attempt_id,
        folder=str(folder),
        warmup=request.warmup,
        measure=request.measure,
        plan_key=request.plan_key,
        weights=None if request.weights is None else str(request.weights.absolute()),
        save_weights=None if request.save_weights is None else str(request.save_weights.absolute()),
        num_compared=request.num_compared,
        device_warmup_s=request.device_warmup_s or None,
        max_warmup=request.max_warmup,
        early_end=request.early_end,
        modules=request.modules,
        batch_divisor=request.command.batch_divisor if request.command.batch_divisor > 1 else None,
    )
    command = CommandRecord(
        attempt_id=attempt_id,
        argv=tuple(masked_argv(argv)),
        cwd=str(cwd),
        environment=recorded_environment({**environment, **dict(request.command.environment)}),
        starter=request.command.starter,
        num_processes=request.command.num_processes,
        time=time.time(),
        deadline_s=request.deadline_s,
        predicted_iteration_s=request.predicted_iteration_s,
        timeouts=asdict(request.timeouts),
        max_spread=request.max_spread,
        engine=engine,
    )
    write_json_atomic(folder / TRIAL_FILE, dump(spec))
    write_json_atomic(folder / COMMAND_FILE, dump(command))
    attempt = Attempt(folder=folder, spec=spec, command=command)
    return Launch(attempt=attempt, argv=tuple(argv), environment=environment, cwd=cwd)


def started_argv(
    command: Command,
    *,
    flags: Sequence[str],
    port: int | None,
    folder: Path,
    environment: MutableMapping[str, str],
) -> list[str]:
    """The words to start `command` with, so that its training gets `flags`.

    A command that the plugin cannot read is left as it is: its training processes find `flags` in a
    start.json in `folder`, which is added to `environment`. Raises StorageError.
    """
    if command.starter == "other":
        (folder / STARTS_FOLDER).mkdir(mode=0o700, exist_ok=True)
        write_json_atomic(folder / START_FILE, dump(StartFile(flags=tuple(flags))))
        environment[START] = str(folder / START_FILE)
        return list(command.words)
    return command.wrapped(flags, port=port)


def _make_folder(request: TrialRequest, *, number: int) -> Path:
    parent = request.folder.absolute()
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if parent.is_symlink():
            raise StorageError(f"{parent}: is a symbolic link; a trial needs a real folder")
        free_bytes = shutil.disk_usage(parent).free
        if free_bytes < request.min_free_bytes:
            raise StorageError(
                f"{parent}: {free_bytes >> 20} MiB free; a trial needs {request.min_free_bytes >> 20} MiB; "
                "delete old runs, or choose a run folder on another disk"
            )
        while True:
            folder = parent / f"{PREFIX}{number}"
            try:
                folder.mkdir(mode=0o700)
                return folder
            except FileExistsError:
                number += 1
    except OSError as error:
        raise StorageError(f"{parent}: cannot be created: {error.strerror}; free the disk") from error


def attempt_number(folder: Path) -> int:
    """The number of an attempt's folder; 0 for any other folder."""
    number = folder.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def open_attempt(folder: Path) -> Attempt | None:
    """An attempt whose files an earlier tuner wrote; None where the tuner ended before.

    Raises ConfigError for files that break their format or belong to another folder.
    """
    try:
        spec = read_shared(TrialSpec, folder / TRIAL_FILE)
        command = read_shared(CommandRecord, folder / COMMAND_FILE)
    except FileNotFoundError:
        return None
    if command.attempt_id != spec.attempt_id:
        raise ConfigError(f"{folder / COMMAND_FILE}: attempt_id: not that of trial.json")
    return Attempt(folder=folder, spec=spec, command=command)


def write_result(
    folder: Path, spec: TrialSpec, verdict: Verdict, *, wall_s: float, start: StartRecord | None = None
) -> TrialResult:
    """Write result.json atomically and return its content as a TrialResult; `start` None: not known.

    Raises StorageError.
    """
    record = ResultRecord(
        attempt_id=spec.attempt_id,
        plan_key=spec.plan_key,
        outcome=verdict.outcome.value,
        loss=tuple(as_number(value) for value in verdict.loss),
        grad_norm=tuple(as_number(value) for value in verdict.grad_norm),
        wall_s=wall_s,
        start=None if start is None else "warm" if start.is_warm else "cold",
        cold_reason=None if start is None else start.cold_reason,
        import_s=None if start is None else start.import_s,
        num_compared=spec.num_compared,
        is_cut=verdict.is_cut or None,
        **{name: getattr(verdict, name) for name in _PLAIN_FIELDS},
    )
    write_json_atomic(folder / RESULT_FILE, dump(record))
    return _result(record, folder=folder)


def refuse_result(result: TrialResult, reason: str) -> TrialResult:
    """Write the result of a measured trial again, as of a plan that computes something else than stock.

    Nothing measured is left in it. Raises ConfigError or StorageError.
    """
    path = result.folder / RESULT_FILE
    record = read_shared(ResultRecord, path)
    refused = replace(record, outcome=Outcome.WRONG.value, reason=reason, iteration_s=())
    write_json_atomic(path, dump(refused))
    return _result(refused, folder=result.folder)


def supersede_result(result: TrialResult) -> None:
    """Write the result of a measured attempt again, as of one that does not count.

    All that it measured stays in it. Raises ConfigError or StorageError.
    """
    path = result.folder / RESULT_FILE
    record = read_shared(ResultRecord, path)
    write_json_atomic(path, dump(replace(record, is_superseded=True)))


def read_result(folder: Path) -> TrialResult | None:
    """The result in an attempt's folder, None where it has no result. Raises ConfigError, StorageError."""
    try:
        record = read_shared(ResultRecord, folder / RESULT_FILE)
    except FileNotFoundError:
        return None
    return _result(record, folder=folder)


def job_of(snapshot: Snapshot) -> dict[str, Any] | None:
    """RANK 0's job, with the documents that all ranks counted in their packed sequences."""
    job = next((report.job for report in snapshot.reports.values() if report.rank == 0), None)
    layout = (job or {}).get("layout")
    size = layout.get("micro_batch_size") if isinstance(layout, dict) else None
    if job is None or not isinstance(size, int) or size < 1:
        return job
    iterations = (step for report in snapshot.reports.values() for step in report.iterations)
    counts = (step.packed for step in iterations if step.packed is not None)
    packed = packed_lengths_of(counts, micro_batch_size=size)
    return job if packed is None else {**job, "packed": dump(packed)}


def _result(record: ResultRecord, *, folder: Path) -> TrialResult:
    snapshot = reader_of(folder, attempt_id=record.attempt_id).scan()
    phases = [report.phases_s for report in snapshot.reports.values()]
    num_compared = record.num_compared or 0
    compared_s = max(
        (
            sum(step.iteration_s for step in report.iterations[:num_compared])
            for report in snapshot.reports.values()
        ),
        default=0.0,
    )
    steps_s = max(
        (sum(step.iteration_s for step in report.iterations) for report in snapshot.reports.values()),
        default=0.0,
    )
    return TrialResult(
        attempt_id=record.attempt_id,
        plan_key=record.plan_key,
        outcome=Outcome(record.outcome),
        loss=tuple(float(value) for value in record.loss),
        grad_norm=tuple(float(value) for value in record.grad_norm),
        wall_s=record.wall_s,
        start=record.start,
        cold_reason=record.cold_reason,
        is_cut=bool(record.is_cut),
        is_superseded=bool(record.is_superseded),
        **{name: getattr(record, name) for name in _PLAIN_FIELDS},
        job=job_of(snapshot),
        folder=folder,
        last_lines=last_lines(read_tail(folder / LOG_FILE)),
        # A later cold start has the imports to make as well.
        start_s=(record.import_s or 0.0)
        + max((rank.get("import", 0.0) + rank.get("init", 0.0) for rank in phases), default=0.0),
        first_step_s=max((rank.get("first_step", 0.0) for rank in phases), default=0.0),
        warmup_s=max(0.0, steps_s - sum(record.iteration_s)),
        num_compared=num_compared,
        compared_s=compared_s,
    )
