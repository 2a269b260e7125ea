"""Finishes the attempts of a killed tuner: keeps their measurements, watches running ones to the end.

The same monitor and the same verdicts finish an attempt as in an undisturbed run, so a resumed run holds the
results that it would have held.
"""

import secrets
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.engines import engine_named
from quartet_plugin.launchers.protocol import Handle
from quartet_plugin.launchers.running_process import age_of, is_running
from quartet_plugin.launchers.site import Site
from quartet_plugin.model.files import remove_torn
from quartet_plugin.protocol.attempt_files import TrialSpec
from quartet_plugin.protocol.process_identity import Identity
from quartet_plugin.trial.attempt import PREFIX, Attempt, open_attempt, read_result, write_result
from quartet_plugin.trial.outcome import Cause, Verdict, classify
from quartet_plugin.trial.processes import ProcessRegistry, send_signal
from quartet_plugin.trial.request import Outcome, Timeouts, TrialResult
from quartet_plugin.trial.runner import POLL_S, Stop, should_stop, with_survivors
from quartet_plugin.trial.watch import AttemptMonitor

_UNKNOWN_EXIT = 1
# From a fork to the first line of the program.
_LAUNCH_S = 0.5


class AdoptedHandle:
    """A launcher that another process started: its end is observable, its exit code is not."""

    def __init__(self, launcher: Identity | None) -> None:
        self._launchers = [] if launcher is None else [launcher]

    @property
    def pid(self) -> int:
        """Process id of the launcher; 0 when it has ended."""
        return next((launcher.pid for launcher in self._launchers if is_running(launcher)), 0)

    def poll(self) -> int | None:
        """None while it runs."""
        return None if self.pid else _UNKNOWN_EXIT

    def terminate(self) -> None:
        """Send SIGTERM to the launcher only."""
        send_signal(self._launchers, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the launcher only."""
        send_signal(self._launchers, signal.SIGKILL)


def recover(
    folder: Path,
    *,
    stop: Stop | None = None,
    clock: Callable[[], float] = time.monotonic,
    poll_s: float = POLL_S,
    skip: Collection[Path] = (),
) -> tuple[TrialResult, ...]:
    """Finish every attempt below `folder` (a run's `trials` or `final`) that has no result, oldest first.

    Complete rank files become the result they would have been; running processes are waited for until the
    attempt's deadline, and ended where they do not move; every other attempt becomes INFRA. Only the tuner
    that holds the run's lease may call it. Trials whose folders are in `skip` belong to another process and
    are left alone.

    Raises ConfigError for files that break their format, StorageError when a result cannot be written.
    """
    results = []
    for attempt_folder in sorted(folder.rglob(f"{PREFIX}*"), key=lambda path: path.parts):
        if not attempt_folder.is_dir() or attempt_folder.is_symlink() or attempt_folder.parent in skip:
            continue
        if read_result(attempt_folder) is not None:
            continue
        results.append(_finish(attempt_folder, stop=stop, clock=clock, poll_s=poll_s))
    return tuple(results)


def _finish(folder: Path, *, stop: Stop | None, clock: Callable[[], float], poll_s: float) -> TrialResult:
    attempt = open_attempt(folder)
    if attempt is None:
        remove_torn(folder)
        # The attempt's files were never written: the result gets an id of its own.
        spec = TrialSpec(
            attempt_id=secrets.token_hex(16), folder=str(folder), warmup=0, measure=1, plan_key=None
        )
        verdict = Verdict(
            cause=Cause.LAUNCHER,
            outcome=Outcome.INFRA,
            reason="the tuner ended before the launch",
            phase="launch",
        )
        return write_result(folder, spec, verdict, wall_s=0.0)
    registry = ProcessRegistry.read(attempt.processes_file, attempt_id=attempt.spec.attempt_id)
    registry.search()
    if not registry.alive and not attempt.processes_file.exists():
        # Killed in the launch itself: what was just forked carries the id only when its program begins.
        time.sleep(_LAUNCH_S)
        registry.search()
    alive = registry.alive
    launcher = min(
        registry.identities, key=lambda process: (process.process_start, process.pid), default=None
    )
    ran_s = _ran_s(attempt, launcher)
    # How long an engine's attempt waited in a queue is not known here: it has its whole deadline again.
    spent_s = 0.0 if attempt.command.engine is not None else ran_s
    monitor = AttemptMonitor(
        attempt=attempt,
        handle=_adopted(attempt, launcher),
        registry=registry,
        timeouts=_timeouts(attempt),
        deadline_s=max(attempt.command.deadline_s - spent_s, 0.0),
        should_stop=lambda: should_stop(stop),
        clock=clock,
        poll_s=poll_s,
    )
    end = monitor.run()
    verdict = classify(end.observations)
    if not alive and verdict.outcome is Outcome.INFRA:
        verdict = replace(verdict, reason=f"the tuner was killed during the trial; {verdict.reason}")
    return write_result(folder, attempt.spec, with_survivors(verdict, end), wall_s=ran_s + end.wall_s)


def _adopted(attempt: Attempt, launcher: Identity | None) -> Handle:
    """The handle of what an earlier tuner started, on this machine or by an engine on nodes."""
    name = attempt.command.engine
    if name is None:
        return AdoptedHandle(launcher)
    return engine_named(name, site=Site()).adopt(attempt.spec.attempt_id, stdout=attempt.log)


def _ran_s(attempt: Attempt, launcher: Identity | None) -> float:
    """Seconds that the attempt has run, up to its deadline; by the boot clock of a running launcher."""
    age_s = age_of(launcher) if launcher is not None and is_running(launcher) else None
    ran_s = time.time() - attempt.command.time if age_s is None else age_s
    return max(0.0, min(ran_s, attempt.command.deadline_s))


def _timeouts(attempt: Attempt) -> Timeouts:
    try:
        return Timeouts(**attempt.command.timeouts)
    except TypeError as error:
        raise ConfigError(f"{attempt.folder / 'command.json'}: timeouts: {error}") from error
