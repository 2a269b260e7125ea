"""Runs one trial: attempts of one plan, each watched, classified and recorded."""

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from quartet_plugin.errors import ConfigError, InfrastructureError
from quartet_plugin.launchers.local import LocalLauncher, check_one_node, free_port, resolve_device
from quartet_plugin.launchers.protocol import Launcher
from quartet_plugin.launchers.warm import StartRecord, WarmLauncher
from quartet_plugin.protocol.training_start import absence_of, fault_of, read_starts
from quartet_plugin.trial.attempt import Launch, attempt_number, create_attempt, write_result
from quartet_plugin.trial.devices import DeviceGuard
from quartet_plugin.trial.log import last_lines
from quartet_plugin.trial.outcome import Cause, Verdict, classify, device_fault
from quartet_plugin.trial.processes import ProcessRegistry, marked_processes, reap
from quartet_plugin.trial.request import Outcome, TrialRequest, TrialResult
from quartet_plugin.trial.subreaper import Subreaper
from quartet_plugin.trial.watch import AttemptEnd, AttemptMonitor, OnProgress

POLL_S = 0.1
MAX_PORTS = 3

# Another attempt of the same plan meets the same end, so one repetition proves it.
_PROVEN_BY_REPETITION = {Cause.KILLED, Cause.HANG, Cause.ERROR, Cause.SIGNAL, Cause.EXIT}
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")

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
    is_subreaper: bool = False,
    fence: Callable[[], None] = lambda: None,
) -> TrialResult:
    """Run `request` and return its last attempt's result, which is in its folder as well.

    An attempt broken by the infrastructure is repeated in a new folder, a noisy timing is measured once more.
    The noisy timing is the result where the infrastructure broke every attempt after it.
    When it returns or raises, no process of the trial is left. `stop` (an event or a predicate) ends it early
    as CANCELLED; an exception in this thread, such as a second Ctrl-C, kills it at once. `devices`, kept from
    trial to trial, checks this machine's accelerators before and after every attempt that runs here;
    `pick_port` names the port of the ranks' rendezvous. With `is_subreaper` daemons of the trial that keep
    nothing of its environment are ended as well (`Subreaper`): for a process that starts nothing else with a
    session of its own meanwhile.
    `fence` is called before every file of an attempt is written; what it raises ends the trial.

    Raises ConfigError for a command that cannot run here, StorageError when the folder cannot be written,
    InfrastructureError when nothing can be started at all, or a device is lost or not given back.
    """
    launcher = launcher or LocalLauncher()
    if launcher.num_nodes == 1:
        check_one_node(request.command)
    environment = {**os.environ, **dict(request.command.environment)}
    # An engine's nodes are other machines than this one, also where a trial has one of them.
    if launcher.engine is not None or resolve_device(request.device, environment=environment) == "cpu":
        devices = None
    earlier: list[Verdict] = []
    noisy: TrialResult | None = None
    number = request.attempt
    while True:
        if devices is not None:
            devices.before(environment)
        port = pick_port() if request.command.port_flag is not None else None
        fence()
        launch = create_attempt(request, number=number, port=port, engine=launcher.engine)
        if isinstance(launcher, WarmLauncher):
            launcher.prepare(
                launch.argv, env=launch.environment, cwd=launch.cwd, should_stop=lambda: should_stop(stop)
            )
        end = _watch(
            launch,
            request,
            launcher,
            on_progress=on_progress,
            stop=stop,
            clock=clock,
            poll_s=poll_s,
            is_subreaper=is_subreaper,
            fence=fence,
        )
        fence()
        verdict, is_again = apply_retry_policy(
            _with_device_fault(_with_engine_fault(classify(end.observations), end), devices, environment),
            earlier=earlier,
            max_attempts=request.max_attempts,
            is_baseline=request.plan is None,
            can_move_port=request.command.port_flag is not None,
        )
        attempt = launch.attempt
        # A node that was lost may have started nothing yet.
        if request.command.starter == "other" and verdict.cause is not Cause.DEVICE:
            _check_training(attempt.folder, request, end)
        start = launcher.latest if isinstance(launcher, WarmLauncher) else StartRecord(is_warm=False)
        result = write_result(
            attempt.folder,
            attempt.spec,
            with_survivors(verdict, end),
            wall_s=end.wall_s + start.import_s,
            start=start,
        )
        if devices is not None and not should_stop(stop):
            devices.await_release(environment)
        if not is_again or should_stop(stop):
            return noisy if noisy is not None and result.outcome is Outcome.INFRA else result
        if result.outcome is Outcome.UNSTABLE:
            noisy = result
        earlier.append(verdict)
        number = attempt_number(attempt.folder) + 1


def _check_training(folder: Path, request: TrialRequest, end: AttemptEnd) -> None:
    """Raise ConfigError where the user's command starts no training, two, or changes its world."""
    if request.plan is not None or end.observations.stopped_by == "cancel":
        return
    starts = read_starts(folder)
    fault = fault_of(starts)
    if fault is None and not any(start.framework for start in starts):
        last = last_lines(end.observations.log)
        fault = absence_of(starts) + (f"; its output ends with: {last[-1]}" if last else "")
    if fault is not None:
        raise ConfigError(f"command {request.command.program!r}: {fault}")


def apply_retry_policy(
    verdict: Verdict, *, earlier: Sequence[Verdict], max_attempts: int, is_baseline: bool, can_move_port: bool
) -> tuple[Verdict, bool]:
    """The verdict in the light of the earlier attempts, and whether to make another attempt.

    A hang, a killed rank or the same error twice makes a plan infeasible. A baseline keeps the outcome of its
    verdict, and an error of its script is not tried again. A port that was taken does not count as an
    attempt, and a faulty device proves nothing.
    """
    if verdict.outcome is Outcome.UNSTABLE:
        return verdict, not any(past.outcome is Outcome.UNSTABLE for past in earlier)
    if verdict.outcome is not Outcome.INFRA or verdict.cause is Cause.NOTHING:
        return verdict, False
    if verdict.cause is Cause.PORT:
        if not can_move_port:
            return replace(verdict, reason=f"{verdict.reason}; choose another port in the command"), False
        return verdict, sum(past.cause is Cause.PORT for past in earlier) < MAX_PORTS
    if is_baseline and verdict.cause is Cause.ERROR:
        return verdict, False
    if verdict.cause in _PROVEN_BY_REPETITION and any(_is_same(verdict, past) for past in earlier):
        if is_baseline:
            return replace(verdict, reason=f"{verdict.reason} (twice)"), False
        excess = 1 if verdict.cause is Cause.KILLED else 0
        again = replace(
            verdict,
            outcome=Outcome.INFEASIBLE,
            reason=f"{verdict.reason} (twice)",
            memory_excess_bytes=max(excess, verdict.memory_excess_bytes),
        )
        return again, False
    counted = sum(past.cause is not Cause.PORT for past in earlier) + 1
    return verdict, counted < max_attempts


def _is_same(verdict: Verdict, other: Verdict) -> bool:
    if verdict.cause is not other.cause:
        return False
    if verdict.cause in (Cause.KILLED, Cause.HANG):
        return True
    return _NUMBERS.sub("#", verdict.reason) == _NUMBERS.sub("#", other.reason)


def should_stop(stop: Stop | None) -> bool:
    """Whether the user has asked for the end."""
    return False if stop is None else stop.is_set() if isinstance(stop, threading.Event) else stop()


def with_survivors(verdict: Verdict, end: AttemptEnd) -> Verdict:
    """Name the processes that could not be killed: they may hold a device and disturb every later trial."""
    left = [str(process.pid) for process in sorted(end.survivors)]
    if not left and not end.left_on_nodes:
        return verdict
    names = ", ".join([*left, *end.left_on_nodes])
    return replace(verdict, reason=f"{verdict.reason}; processes that could not be killed: {names}")


def _with_engine_fault(verdict: Verdict, end: AttemptEnd) -> Verdict:
    """The verdict, replaced where the engine ended the attempt by itself: that says nothing of the plan."""
    return verdict if end.engine_fault is None else device_fault(verdict, end.engine_fault)


def _with_device_fault(
    verdict: Verdict, devices: DeviceGuard | None, environment: Mapping[str, str]
) -> Verdict:
    """The verdict, replaced where a device was faulty: then it says nothing about the plan."""
    if devices is None or verdict.cause is Cause.CANCELLED:
        return verdict
    try:
        fault = devices.fault(environment)
    except InfrastructureError as error:
        fault = str(error)
    return verdict if fault is None else device_fault(verdict, fault)


def _watch(
    launch: Launch,
    request: TrialRequest,
    launcher: Launcher,
    *,
    on_progress: OnProgress | None,
    stop: Stop | None,
    clock: Callable[[], float],
    poll_s: float,
    is_subreaper: bool,
    fence: Callable[[], None],
) -> AttemptEnd:
    attempt = launch.attempt
    with Subreaper(is_on=is_subreaper) as subreaper:
        handle = launcher.start(launch.argv, env=launch.environment, cwd=launch.cwd, stdout=attempt.log)
        subreaper.expect(handle.pid)
        if isinstance(launcher, WarmLauncher) and launcher.server_pid is not None:
            subreaper.leave_alone(launcher.server_pid)
        try:
            registry = ProcessRegistry(
                attempt.processes_file, attempt_id=attempt.spec.attempt_id, fence=fence
            )
            registry.rescan(handle.pid)
            monitor = AttemptMonitor(
                attempt=attempt,
                handle=handle,
                registry=registry,
                subreaper=subreaper,
                timeouts=request.timeouts,
                deadline_s=request.deadline_s,
                slow_above_s=request.slow_above_s,
                should_stop=lambda: should_stop(stop),
                on_progress=on_progress,
                clock=clock,
                poll_s=poll_s,
            )
        except BaseException:
            handle.kill()
            reap(marked_processes(attempt.spec.attempt_id) | subreaper.orphans(), grace_s=0.0)
            raise
        return monitor.run()
