"""Workers of a tuning run: `quartet tune --join`, and the process that every one of them is."""

import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet_plugin.cli.output import say
from quartet_plugin.cli.signals import stop_on_signals
from quartet_plugin.errors import ConfigError, InterruptedByUserError, StorageError

if TYPE_CHECKING:
    from quartet_plugin.launchers.command import Command
    from quartet_plugin.launchers.device_slices import DeviceSlice
    from quartet_plugin.launchers.placement import Placement
    from quartet_plugin.tuner.config import TuneConfig
    from quartet_plugin.tuner.run_folder import TuningRun
    from quartet_plugin.tuner.workers.work_queue import WorkQueue

_POLL_S = 0.2


def slices_of(
    config: "TuneConfig",
    *,
    placement: "Placement",
    num_workers: int | None,
    command: "Command",
    oversubscribe: bool,
    cores_per_trial: int | None = None,
) -> "tuple[DeviceSlice, ...]":
    """This host, or a launcher's nodes, divided between `num_workers`; raises ConfigError.

    Without a number nothing of this host, and the nodes of one trial. `cores_per_trial` is the number of
    cores that each trial of a run on this host's processor had before: its later trials get as many, also
    without a number of workers.
    """
    from quartet_plugin.launchers.device_slices import divide, num_cores_here, slice_of_cores
    from quartet_plugin.launchers.local import resolve_device

    if not placement.is_local:
        return placement.slices(at_once=num_workers or 1, device=config.device)
    device, size = resolve_device(config.device, environment=os.environ), None
    if device == "cpu" and cores_per_trial is not None and (num_cores := num_cores_here()) is not None:
        size = cores_per_trial
        _refuse_other_size(size, num_cores=num_cores, num_workers=num_workers, oversubscribe=oversubscribe)
        if num_workers is None and num_cores > size:
            return (slice_of_cores(size),)
    if num_workers is None:
        return ()
    return divide(
        device,
        num_slices=num_workers,
        command=command,
        environment=os.environ,
        size=size,
        oversubscribe=oversubscribe,
    )


def _refuse_other_size(size: int, *, num_cores: int, num_workers: int | None, oversubscribe: bool) -> None:
    """Refuse to resume a run whose trials had `size` cores each with trials on another number of cores."""
    is_shared = oversubscribe and num_workers is not None
    num_needed = size if is_shared else size * (num_workers or 1)
    if num_needed <= num_cores and (num_cores == size or not is_shared):
        return
    most = num_cores // size
    if not most:
        fix = f"resume where at least {size} cores are available"
    elif is_shared:
        fix = "omit --oversubscribe"
    else:
        fix = f"use at most {most} workers" if most > 1 else "omit --workers"
    options = "--resume" if num_workers is None else f"--workers {num_workers}"
    raise ConfigError(
        f"{options}{' --oversubscribe' if is_shared else ''}: {num_cores} cores here, and each trial of this "
        f"run had {size}; times on another number of cores cannot be compared; {fix}, or start another run"
    )


def cores_per_trial_of(config: "TuneConfig", *, slices: "Sequence[DeviceSlice]") -> int | None:
    """The number of this host's cores for each trial of a run; None where trials train on accelerators.

    `slices` are this host's, one for each trial at a time; none where a trial has the whole host.
    """
    from quartet_plugin.launchers.device_slices import num_cores_here
    from quartet_plugin.launchers.local import resolve_device

    if resolve_device(config.device, environment=os.environ) != "cpu":
        return None
    return slices[0].num_devices if slices else num_cores_here()


def join(path: Path, *, words: Sequence[str] | None, num_workers: int, oversubscribe: bool) -> None:
    """Work for the tuner of the run in `path` until it ends; `words`, where given, are the run's command.

    Raises ConfigError where this host cannot, StorageError where no tuner takes workers, and
    InterruptedByUserError after Ctrl-C.
    """
    from quartet_plugin.launchers.command import parse_command
    from quartet_plugin.launchers.device_slices import divide
    from quartet_plugin.launchers.engines import LOCAL
    from quartet_plugin.launchers.local import check_start
    from quartet_plugin.protocol.work_queue_files import worker_name
    from quartet_plugin.tuner.run_folder import begun_run
    from quartet_plugin.tuner.workers.work_queue import WorkQueue
    from quartet_plugin.tuner.workers.worker import end_left_behind
    from quartet_plugin.tuner.workers.worker_pool import WorkerPool

    run = begun_run(path.absolute(), config=None, command=None)
    if run.config.launcher != LOCAL:
        raise ConfigError(
            f"--join: launcher {run.config.launcher} starts this run's trials; to run more trials at once, "
            "start its tuner with --workers"
        )
    command = parse_command(_command_of(run, words, path=path), cwd=run.cwd)
    queue = WorkQueue(folder=run.folder.path)
    offer = queue.offer()
    if offer is None:
        raise StorageError(
            f"{path}: the run has no tuner that takes workers; start its tuner with --workers, then join here"
        )
    _check_place(run, command)
    check_start(command, cwd=run.cwd, environment=os.environ)
    slices = divide(
        offer.device,
        num_slices=num_workers,
        command=command,
        environment=os.environ,
        size=offer.num_devices,
        oversubscribe=oversubscribe,
    )
    _refuse_taken(slices, queue)
    ended = end_left_behind(queue)
    if ended:
        say(f"ended {len(ended)} processes that a lost worker had left on this host")
    names = tuple(worker_name(socket.gethostname(), os.getpid(), part.index) for part in slices)
    pool = WorkerPool(queue=queue, command=command.words, slices=slices, names=names, say=say, is_joined=True)
    say(f"run {run.name}: workers here: {len(slices)}, on {'; '.join(part.label for part in slices)}")
    with stop_on_signals(say) as should_stop:
        try:
            pool.start_missing()
            while pool.num_running and not should_stop():
                time.sleep(_POLL_S)
                pool.start_missing()
        finally:
            pool.close()
        if should_stop():
            raise InterruptedByUserError("stopped; other workers take over the trials of these workers")
    say(f"the workers have ended: {pool.last_line}")


def _command_of(run: "TuningRun", words: Sequence[str] | None, *, path: Path) -> tuple[str, ...]:
    """The run's command; output and files show it with its secrets masked."""
    from quartet_plugin.protocol.masking import is_masked, is_same_command

    if words is not None:
        if not is_same_command(run.command, words):
            raise ConfigError(f"{path}: the run has another command; give the same command, or none")
        return tuple(words)
    if is_masked(run.command):
        raise ConfigError(
            f"{path}: the run's command contains a secret, which is not stored; give the command after --"
        )
    return run.command


def _check_place(run: "TuningRun", command: "Command") -> None:
    """Raise ConfigError where the command cannot start on this host as on the host that started the run."""
    if not run.cwd.is_dir():
        raise ConfigError(f"{run.cwd}: not on this host; the run's command starts there: mount it here")
    if command.starter == "other":
        return
    if not command.is_module and not (run.cwd / command.target).exists():
        raise ConfigError(f"{run.cwd / command.target}: not on this host; mount its parent folder here")


def _refuse_taken(slices: "tuple[DeviceSlice, ...]", queue: "WorkQueue") -> None:
    """Refuse devices that another worker uses, because their trials would disturb each other."""
    from quartet_plugin.launchers.device_slices import DeviceSlice
    from quartet_plugin.launchers.running_process import is_of_other_boot, runs_on

    host = socket.gethostname()
    for worker in queue.workers():
        # A process of another boot uses no device of this machine now, wherever it runs.
        is_gone = is_of_other_boot(worker.identity, host=host) or runs_on(worker.identity, host=host) is False
        if worker.host != host or is_gone:
            continue
        other = DeviceSlice.of(worker.share)
        if any(part.overlaps(other) for part in slices):
            raise ConfigError(
                f"--join: {other.label} of this host are worker {worker.name}'s; name others with taskset or "
                "CUDA_VISIBLE_DEVICES, or join from another host"
            )


def work_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    name: Annotated[str, typer.Option(help="The worker's name.")],
) -> None:
    """Measure plans for the tuner of a run; the tuner starts this command and passes the task on stdin."""
    from quartet_plugin.launchers.command import parse_command
    from quartet_plugin.launchers.device_slices import DeviceSlice
    from quartet_plugin.launchers.running_process import current_identity
    from quartet_plugin.protocol.masking import collect_secrets
    from quartet_plugin.protocol.work_queue_files import WorkerRecord, read_task
    from quartet_plugin.tuner.config import placement_of
    from quartet_plugin.tuner.run_folder import begun_run
    from quartet_plugin.tuner.trial_backend import LocalBackend
    from quartet_plugin.tuner.workers.work_queue import WorkQueue
    from quartet_plugin.tuner.workers.worker import Worker

    content = read_task(sys.stdin.buffer.read())
    collect_secrets(content.command)
    tuning = begun_run(run, config=None, command=None)
    record = WorkerRecord(
        name=name,
        host=socket.gethostname(),
        identity=current_identity(),
        parent=content.parent,
        share=content.share,
        is_joined=content.is_joined,
    )
    device_slice = DeviceSlice.of(content.share)
    warm_starts = tuning.config.trial.warm_starts == "auto"
    placement = placement_of(tuning.config, cwd=tuning.cwd)
    nodes_launcher = placement.launcher_on(device_slice)
    with (
        stop_on_signals(say) as should_stop,
        LocalBackend(
            device_slice=device_slice, warm_starts=warm_starts, nodes_launcher=nodes_launcher
        ) as backend,
    ):
        worker = Worker(
            run=tuning,
            command=placement.command(parse_command(content.command, cwd=tuning.cwd)),
            record=record,
            queue=WorkQueue(folder=tuning.folder.path),
            backend=backend,
            should_stop=should_stop,
            say=say,
        )
        say(f"worker {name} on {device_slice.label}: {worker.work()}")
