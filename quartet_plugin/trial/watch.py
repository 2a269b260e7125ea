"""Watches a started attempt until it ends, ends it where it must, and leaves no process behind."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from quartet_plugin.errors import StorageError
from quartet_plugin.launchers.launcher import Handle
from quartet_plugin.model.files import write_text_atomic
from quartet_plugin.protocol.attempt_files import RankFileReader, Snapshot
from quartet_plugin.trial.attempt import Attempt
from quartet_plugin.trial.host_memory import num_oom_kills
from quartet_plugin.trial.log import CappedLog, read_tail
from quartet_plugin.trial.outcome import Evidence, StoppedBy, is_complete, slowest_phase
from quartet_plugin.trial.pace import Pace
from quartet_plugin.trial.processes import Identity, ProcessBook, ask_for_stacks, boot_id, paused, reap
from quartet_plugin.trial.request import Phase, Timeouts
from quartet_plugin.trial.watchdog import Expiry, Watchdog

# A trial with a failed rank is over within 10 s: this for the other ranks' reports, the rest for the end.
_PEERS_S = 2.0
_EARLIEST_S = 0.2
_ERROR_GRACE_S = 5.0
_STACKS_S = 2.0
_KILL_GRACE_S = 0.5

# A file system that does not answer for a while (a server that restarts) is no reason to lose a trial.
_LOST_S = 60.0

# Looking for new processes takes milliseconds on a busy machine: often while they are being started, rarely
# while they are being measured.
_RESCAN_S = 0.5
_RESCAN_MEASURING_S = 5.0

_CUT = "slow\n"

OnMove = Callable[[Phase, int, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an attempt ended. `survivors` could not be killed."""

    evidence: Evidence
    wall_s: float
    survivors: frozenset[Identity]


class Watch:
    """One attempt under watch; `run` returns when nothing of it runs any more."""

    def __init__(
        self,
        attempt: Attempt,
        handle: Handle,
        *,
        book: ProcessBook,
        timeouts: Timeouts,
        deadline_s: float,
        should_stop: Callable[[], bool],
        on_move: OnMove,
        clock: Callable[[], float],
        poll_s: float,
        slow_above_s: float | None = None,
    ) -> None:
        self._attempt = attempt
        self._handle = handle
        self._book = book
        self._timeouts = timeouts
        self._should_stop = should_stop
        self._on_move = on_move
        self._clock = clock
        self._poll_s = poll_s
        self._files = RankFileReader(attempt.folder, attempt_id=attempt.sheet.attempt_id)
        self._log = CappedLog(attempt.log)
        self._watchdog = Watchdog(
            timeouts,
            deadline_s=deadline_s,
            predicted_s=attempt.command.predicted_iteration_s,
            clock=clock,
            num_processes=attempt.command.num_processes,
        )
        self._pace = Pace(warmup=attempt.sheet.warmup, slow_above_s=slow_above_s)
        self._num_oom_kills = num_oom_kills()
        self._next_rescan_s = 0.0
        self._lost_since_s: float | None = None
        self._shown: tuple[Phase, int] | None = None
        self._exit_code: int | None = None

    def run(self) -> Ending:
        """Watch until the end. On any exception, Ctrl-C included, everything is killed first."""
        try:
            stopped_by, expiry = self._until_it_ends()
            is_cut = self._is_cut()
            grace_s = self._timeouts.shutdown_s
            self._end(stopped_by, grace_s=min(grace_s, _ERROR_GRACE_S) if stopped_by == "error" else grace_s)
        except BaseException:
            self._kill_all()
            raise
        evidence = Evidence(
            sheet=self._attempt.sheet,
            snapshot=self._last_look(),
            num_processes=self._attempt.command.num_processes,
            stopped_by=stopped_by,
            exit_code=self._exit_code,
            is_single=self._attempt.command.starter == "python",
            expiry=expiry,
            log=read_tail(self._attempt.log),
            num_oom_kills=num_oom_kills() - self._num_oom_kills,
            max_spread=self._attempt.command.max_spread,
            is_cut=is_cut,
        )
        return Ending(evidence=evidence, wall_s=self._watchdog.elapsed_s, survivors=self._book.alive)

    def _until_it_ends(self) -> tuple[StoppedBy, Expiry | None]:
        while True:
            exit_code = self._handle.poll()  # before the files: what they hold is then final
            snapshot = self._look()
            if snapshot is None:
                if self._should_stop():
                    return "cancel", None
                time.sleep(self._poll_s)
                continue
            if is_complete(snapshot, num_processes=self._attempt.command.num_processes):
                self._wait(self._timeouts.shutdown_s, until=self._has_exited)
                return "complete", None
            if snapshot.errs or snapshot.faults:
                self._wait_for_peers(snapshot)
                return "error", None
            if exit_code is not None:
                self._exit_code = exit_code
                return "exit", None
            if self._should_stop():
                return "cancel", None
            if self._pace.is_slow(snapshot.beats.values()) and not self._attempt.stop_file.exists():
                # The ranks end by themselves after the same iteration; a full disk must not prevent the rest.
                with contextlib.suppress(StorageError):
                    write_text_atomic(self._attempt.stop_file, _CUT)
            expiry = self._watchdog.expired()
            if expiry is not None:
                return "hang", expiry
            time.sleep(self._poll_s)

    def _look(self) -> Snapshot | None:
        """Read what the ranks say, keep the list of processes and the log in order, tell the progress.

        None while the file system fails, for a limited time: then nothing can be judged, neither an end nor a
        hang. Raises StorageError after it.
        """
        now = self._clock()
        try:
            snapshot = self._files.scan()
            iteration = min((beat.iteration for beat in snapshot.beats.values()), default=0)
            if now >= self._next_rescan_s:
                self._next_rescan_s = now + (_RESCAN_MEASURING_S if iteration > 0 else _RESCAN_S)
                self._rescan(snapshot)
                self._log.trim()
        except StorageError:
            self._lost_since_s = now if self._lost_since_s is None else self._lost_since_s
            if now - self._lost_since_s >= _LOST_S:
                raise
            return None
        if self._lost_since_s is not None:
            self._watchdog.forgive(now - self._lost_since_s)
            self._lost_since_s = None
        self._watchdog.observe(snapshot.beats.values())
        phase = slowest_phase(snapshot)
        if (phase, iteration) != self._shown:
            self._shown = (phase, iteration)
            self._on_move(phase, iteration, self._watchdog.elapsed_s)
        return snapshot

    def _last_look(self) -> Snapshot:
        """What the ranks have left when none of them runs any more. Raises StorageError as `_look` does."""
        since_s = self._clock() if self._lost_since_s is None else self._lost_since_s
        while True:
            try:
                return self._files.scan()
            except StorageError:
                if self._clock() - since_s >= _LOST_S:
                    raise
            time.sleep(self._poll_s)

    def _is_cut(self) -> bool:
        """Whether the ranks were told to end early because they were slow, by this process or an earlier."""
        with contextlib.suppress(OSError):
            return self._attempt.stop_file.read_text() == _CUT
        return False

    def _rescan(self, snapshot: Snapshot) -> None:
        named = [(beat.pid, beat.process_start) for beat in snapshot.beats.values()]
        self._book.rescan(self._handle.pid, named=named)

    def _has_exited(self) -> bool:
        code = self._handle.poll()
        if code is not None and self._exit_code is None:
            self._exit_code = code
        return code is not None

    def _wait_for_peers(self, snapshot: Snapshot) -> None:
        """The first report is not always the root cause: a rank that only saw its peer go may be faster.

        Then the launcher, which knows who was killed, gets the time to say so.
        """
        is_secondary = not snapshot.faults and all(err.kind == "network" for err in snapshot.errs.values())
        limit_s = _PEERS_S if is_secondary else _EARLIEST_S
        self._wait(min(limit_s, self._timeouts.shutdown_s), until=self._has_exited)

    def _wait(self, limit_s: float, *, until: Callable[[], bool]) -> bool:
        end = self._clock() + limit_s
        while not until():
            if self._clock() >= end:
                return False
            time.sleep(min(self._poll_s, 0.05))
        return True

    def _end(self, stopped_by: StoppedBy, *, grace_s: float) -> None:
        """STOP file, SIGTERM to the launcher, waiting, then exactly the recorded processes."""
        with contextlib.suppress(StorageError):
            self._rescan(self._files.scan())
        if not self._has_exited():
            # Without the file the signals still end everything; a full disk must not prevent that.
            with contextlib.suppress(StorageError):
                write_text_atomic(self._attempt.stop_file, f"{stopped_by}\n")
            if stopped_by == "hang":
                self._dump_stacks()
            self._handle.terminate()
            self._wait(grace_s, until=lambda: self._has_exited() and not self._book.alive)
        self._kill_rest()
        self._has_exited()

    def _dump_stacks(self) -> None:
        """Let the ranks print where they hang, one after another, as they may share one log.

        The others and their launcher rest meanwhile: they would act on the first one's end.
        """
        snapshot = self._files.scan()
        pids = {beat.pid for beat in snapshot.beats.values()}
        alive = self._book.alive
        ranks = sorted(one for one in alive if one.pid in pids and one.boot_id == boot_id())
        end = self._clock() + _STACKS_S
        with paused(alive):
            for rank in ranks:
                ask_for_stacks(rank)
                self._wait(end - self._clock(), until=partial(_has_gone, rank))

    def _kill_rest(self) -> None:
        """Until nothing is left: a process may start another one while it is being ended."""
        for _ in range(3):
            # The book knows them even where it cannot be written down.
            with contextlib.suppress(StorageError):
                self._book.rescan(self._handle.pid)
            with contextlib.suppress(StorageError):
                self._book.search()
            alive = self._book.alive
            if not alive:
                break
            reap(alive, grace_s=_KILL_GRACE_S, clock=self._clock)

    def _kill_all(self) -> None:
        with contextlib.suppress(Exception):
            self._rescan(self._files.scan())
        with contextlib.suppress(Exception):
            self._book.search()
        reap(self._book.alive, grace_s=0.0, clock=self._clock)
        if self._handle.poll() is None:
            self._handle.kill()
            self._wait(5.0, until=self._has_exited)


def _has_gone(one: Identity) -> bool:
    return not one.is_alive
