"""After a tuner that was killed: what its attempts measured is kept, what still runs is seen to its end.

An attempt is finished by the same watching and the same judgement as an undisturbed one, so a resumed run
holds the results that it would have held.
"""

import secrets
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import psutil

from quartet_plugin.errors import ConfigError
from quartet_plugin.protocol.attempt_files import CommandSheet, TrialSheet
from quartet_plugin.trial.attempt import PREFIX, Attempt, open_attempt, read_result, write_result
from quartet_plugin.trial.outcome import Cause, Verdict, classify
from quartet_plugin.trial.processes import Identity, ProcessBook
from quartet_plugin.trial.request import Outcome, Phase, Timeouts, TrialResult
from quartet_plugin.trial.runner import POLL_S, Stop, should_stop, with_survivors
from quartet_plugin.trial.watch import Watch

_UNKNOWN_EXIT = 1
# From a fork to the first line of the program.
_LAUNCH_S = 0.5


class AdoptedHandle:
    """A launcher that another process started: its end can be seen, its exit code cannot."""

    def __init__(self, launcher: Identity | None) -> None:
        self._launcher = launcher

    @property
    def pid(self) -> int:
        """Process id of the launcher; 0 where there is none any more."""
        return self._launcher.pid if self._launcher is not None and self._launcher.is_alive else 0

    def poll(self) -> int | None:
        """None while it runs."""
        return None if self.pid else _UNKNOWN_EXIT

    def terminate(self) -> None:
        """SIGTERM to the launcher alone."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the launcher alone."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        process = None if self._launcher is None else self._launcher.find()
        if process is not None:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                return


def recover(
    folder: Path,
    *,
    stop: Stop | None = None,
    on_attempt: Callable[[Path], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    poll_s: float = POLL_S,
    skip: Collection[Path] = (),
) -> tuple[TrialResult, ...]:
    """Finish every attempt below `folder` (a run's `trials` or `final`) that has no result, oldest first.

    Complete rank files become the result they would have been; running processes are waited for until
    their own deadlines, and ended where they do not move; everything else becomes INFRA. Only the one
    tuner that holds the run's lease may call it. `on_attempt` is told each folder before it is waited for;
    trials whose folders are in `skip` are another process's and left alone.

    Raises ConfigError for files that break their format, StorageError when a result cannot be written.
    """
    results = []
    for attempt_folder in sorted(folder.rglob(f"{PREFIX}*"), key=lambda path: path.parts):
        if not attempt_folder.is_dir() or attempt_folder.is_symlink() or attempt_folder.parent in skip:
            continue
        if read_result(attempt_folder) is not None:
            continue
        if on_attempt is not None:
            on_attempt(attempt_folder)
        results.append(_finish(attempt_folder, stop=stop, clock=clock, poll_s=poll_s))
    return tuple(results)


def _finish(folder: Path, *, stop: Stop | None, clock: Callable[[], float], poll_s: float) -> TrialResult:
    attempt = open_attempt(folder)
    if attempt is None:
        _remove_torn(folder)
        return write_result(_never_launched(folder), _lost("the tuner ended before the launch"), wall_s=0.0)
    book = ProcessBook.read(attempt.processes_file, attempt_id=attempt.sheet.attempt_id)
    book.search()
    if not book.alive and not attempt.processes_file.exists():
        # Killed in the launch itself: what was just forked carries the id only when its program begins.
        time.sleep(_LAUNCH_S)
        book.search()
    alive = book.alive
    launcher = min(book.identities, key=lambda one: (one.process_start, one.pid), default=None)
    ran_s = _ran_s(attempt, launcher)
    watch = Watch(
        attempt,
        AdoptedHandle(launcher),
        book=book,
        timeouts=_timeouts(attempt),
        deadline_s=max(attempt.command.deadline_s - ran_s, 0.0),
        should_stop=lambda: should_stop(stop),
        on_move=_ignore,
        clock=clock,
        poll_s=poll_s,
    )
    ending = watch.run()
    _remove_torn(folder)
    verdict = classify(ending.evidence)
    if not alive and verdict.outcome is Outcome.INFRA:
        verdict = replace(verdict, reason=f"the tuner was killed meanwhile; {verdict.reason}")
    return write_result(attempt, with_survivors(verdict, ending), wall_s=ran_s + ending.wall_s)


def _ran_s(attempt: Attempt, launcher: Identity | None) -> float:
    """How long the attempt has run, up to its deadline; if it still does, by no clock that can be set."""
    age_s = launcher.age_s if launcher is not None and launcher.is_alive else None
    ran_s = time.time() - attempt.command.time if age_s is None else age_s
    return max(0.0, min(ran_s, attempt.command.deadline_s))


def _ignore(phase: Phase, iteration: int, elapsed_s: float) -> None:
    del phase, iteration, elapsed_s


def _timeouts(attempt: Attempt) -> Timeouts:
    try:
        return Timeouts(**attempt.command.timeouts)
    except TypeError as error:
        raise ConfigError(f"{attempt.folder / 'command.json'}: timeouts: {error}") from error


def _lost(reason: str) -> Verdict:
    return Verdict(cause=Cause.LAUNCHER, outcome=Outcome.INFRA, reason=reason, phase="launch")


def _never_launched(folder: Path) -> Attempt:
    """A stand-in for sheets that were never written, under an id that nothing else has."""
    attempt_id = secrets.token_hex(16)
    sheet = TrialSheet(attempt_id=attempt_id, folder=str(folder), warmup=0, measure=1, plan_key=None)
    command = CommandSheet(
        attempt_id=attempt_id,
        argv=(),
        cwd="",
        environment={},
        starter="torchrun",
        num_processes=None,
        time=0.0,
        deadline_s=0.0,
        predicted_iteration_s=None,
        timeouts={},
        max_spread=0.0,
    )
    return Attempt(folder=folder, sheet=sheet, command=command)


def _remove_torn(folder: Path) -> None:
    """Temporary files of writers that were killed before the rename; those of one that lives are its own."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)
