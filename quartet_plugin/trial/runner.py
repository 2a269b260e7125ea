"""Runs one trial: attempts of one plan, each watched, classified and written down."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from quartet_plugin.errors import ConfigError, InfrastructureError
from quartet_plugin.launchers.launcher import Launcher
from quartet_plugin.launchers.local import LocalLauncher, free_port, resolve_device
from quartet_plugin.trial.attempt import Launch, attempt_number, create_attempt, write_result
from quartet_plugin.trial.devices import DeviceGuard
from quartet_plugin.trial.outcome import Cause, Verdict, classify, device_fault
from quartet_plugin.trial.processes import ProcessBook, marked, reap
from quartet_plugin.trial.request import Phase, Progress, TrialRequest, TrialResult
from quartet_plugin.trial.retry import settle
from quartet_plugin.trial.watch import Ending, Watch

POLL_S = 0.1

OnProgress = Callable[[Progress], None]
Stop = threading.Event | Callable[[], bool]


def run_trial(
    request: TrialRequest,
    *,
    launcher: Launcher | None = None,
    devices: DeviceGuard | None = None,
    on_progress: OnProgress | None = None,
    stop: Stop | None = None,
    clock: Callable[[], float] = time.monotonic,
    poll_s: float = POLL_S,
    pick_port: Callable[[], int] = free_port,
) -> TrialResult:
    """Run `request` and return its last attempt's result, which is in its folder as well.

    What the infrastructure broke is tried again in a new attempt folder, a noisy timing is measured once
    more. When it returns or raises, no process of the trial is left. `stop` (an event or a question)
    ends it early as CANCELLED; an exception in this thread, such as a second Ctrl-C, kills it at once.
    `devices`, kept from trial to trial, looks at the accelerators before and after every attempt;
    `pick_port` names the port that the ranks meet at.

    Raises ConfigError for a command that cannot run here, StorageError when the folder cannot be written,
    InfrastructureError when nothing can be started at all, or a device is lost or not given back.
    """
    launcher = launcher or LocalLauncher()
    _check_nodes(request, launcher)
    environment = {**os.environ, **dict(request.command.environment)}
    if resolve_device(request.device, environment=environment) == "cpu":
        devices = None
    earlier: list[Verdict] = []
    number = request.attempt
    while True:
        if devices is not None:
            devices.before(environment)
        port = pick_port() if request.command.port_flag is not None else None
        launch = create_attempt(request, number=number, port=port)
        ending = _watch(
            launch, request, launcher, on_progress=on_progress, stop=stop, clock=clock, poll_s=poll_s
        )
        verdict, is_again = settle(
            _with_device_fault(classify(ending.evidence), devices, environment),
            earlier=earlier,
            max_attempts=request.max_attempts,
            is_baseline=request.plan is None,
            can_move_port=request.command.port_flag is not None,
        )
        result = write_result(launch.attempt, with_survivors(verdict, ending), wall_s=ending.wall_s)
        if devices is not None and not should_stop(stop):
            devices.await_release(environment)
        if not is_again or should_stop(stop):
            return result
        earlier.append(verdict)
        number = attempt_number(launch.attempt.folder) + 1


def should_stop(stop: Stop | None) -> bool:
    """Whether the user wants it to end."""
    return False if stop is None else stop.is_set() if isinstance(stop, threading.Event) else stop()


def with_survivors(verdict: Verdict, ending: Ending) -> Verdict:
    """Name what could not be ended: it may hold the device and disturb every later trial."""
    if not ending.survivors:
        return verdict
    pids = ", ".join(str(one.pid) for one in sorted(ending.survivors))
    return replace(verdict, reason=f"{verdict.reason}; processes that could not be ended: {pids}")


def _with_device_fault(
    verdict: Verdict, devices: DeviceGuard | None, environment: Mapping[str, str]
) -> Verdict:
    """What a faulty device measured or broke says nothing about the plan."""
    if devices is None or verdict.cause is Cause.CANCELLED:
        return verdict
    try:
        fault = devices.fault(environment)
    except InfrastructureError as error:
        fault = str(error)
    return verdict if fault is None else device_fault(verdict, fault)


def _check_nodes(request: TrialRequest, launcher: Launcher) -> None:
    nodes = request.command.num_nodes
    if launcher.num_nodes is not None and nodes != launcher.num_nodes:
        raise ConfigError(
            f"torchrun --nnodes: {'a range' if nodes is None else nodes}; trials are started on "
            f"{launcher.num_nodes} node here: leave it out"
        )


def _watch(
    launch: Launch,
    request: TrialRequest,
    launcher: Launcher,
    *,
    on_progress: OnProgress | None,
    stop: Stop | None,
    clock: Callable[[], float],
    poll_s: float,
) -> Ending:
    attempt = launch.attempt
    number = attempt_number(attempt.folder)

    def on_move(phase: Phase, iteration: int, elapsed_s: float) -> None:
        if on_progress is not None:
            on_progress(
                Progress(
                    attempt=number,
                    phase=phase,
                    iteration=iteration,
                    num_iterations=request.warmup + request.measure,
                    elapsed_s=elapsed_s,
                )
            )

    handle = launcher.start(launch.argv, env=launch.environment, cwd=launch.cwd, stdout=attempt.log)
    try:
        book = ProcessBook(attempt.processes_file, attempt_id=attempt.sheet.attempt_id)
        book.rescan(handle.pid)
        watch = Watch(
            attempt,
            handle,
            book=book,
            timeouts=request.timeouts,
            deadline_s=request.deadline_s,
            slow_above_s=request.slow_above_s,
            should_stop=lambda: should_stop(stop),
            on_move=on_move,
            clock=clock,
            poll_s=poll_s,
        )
    except BaseException:
        handle.kill()
        reap(marked(attempt.sheet.attempt_id), grace_s=0.0)
        raise
    return watch.run()
