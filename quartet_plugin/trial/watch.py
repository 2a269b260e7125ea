"""Watches a started attempt until its end, enforces its deadlines, and leaves no process behind."""

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from quartet_plugin.errors import QuartetError, StorageError
from quartet_plugin.launchers.protocol import Handle, NodesHandle
from quartet_plugin.launchers.running_process import boot_id, is_running
from quartet_plugin.model.files import remove_torn, write_text_atomic
from quartet_plugin.protocol.process_identity import Identity
from quartet_plugin.protocol.rank_files import Snapshot, reader_of
from quartet_plugin.trial.attempt import Attempt, attempt_number
from quartet_plugin.trial.log import CappedLog, read_tail
from quartet_plugin.trial.outcome import AttemptObservations, StoppedBy, is_complete, slowest_phase
from quartet_plugin.trial.processes import (
    ProcessRegistry,
    ask_for_stacks,
    num_oom_kills,
    paused,
    reap,
    send_signal,
)
from quartet_plugin.trial.request import Phase, Progress, Timeouts
from quartet_plugin.trial.subreaper import Subreaper
from quartet_plugin.trial.watchdog import Expiry, SlowdownDetector, Watchdog

# A trial with a failed rank is over within 10 s: this for the other ranks' reports, the rest for the end.
_PEERS_S = 2.0
_EARLIEST_S = 0.2
_ERROR_GRACE_S = 5.0
_STACKS_S = 2.0
_KILL_GRACE_S = 0.5
_KILL_S = 10.0

# A file system that does not answer for a while (a server that restarts) is no reason to lose a trial.
_LOST_S = 60.0

# Looking for new processes takes milliseconds on a busy machine: often while they are being started, rarely
# while they are being measured.
_RESCAN_S = 0.5
_RESCAN_MEASURING_S = 5.0

_CUT = "slow\n"

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended. `survivors` are processes that could not be killed, `left_on_nodes` what could
    not be ended elsewhere; `engine_fault` is why the engine has ended it.
    """

    observations: AttemptObservations
    wall_s: float
    survivors: frozenset[Identity]
    left_on_nodes: tuple[str, ...] = ()
    engine_fault: str | None = None


@dataclass(kw_only=True)
class AttemptMonitor:
    """Watches one attempt; `run` returns when no process of the attempt runs any more."""

    attempt: Attempt
    handle: Handle
    registry: ProcessRegistry
    timeouts: Timeouts
    deadline_s: float
    should_stop: Callable[[], bool]
    clock: Callable[[], float]
    poll_s: float
    slow_above_s: float | None = None
    on_progress: OnProgress | None = None
    subreaper: Subreaper | None = None  # None for an attempt that an earlier tuner started
    _next_rescan_s: float = field(init=False, default=0.0)
    _lost_since_s: float | None = field(init=False, default=None)
    _shown: tuple[Phase, int] | None = field(init=False, default=None)
    _exit_code: int | None = field(init=False, default=None)
    _was_ended: bool = field(init=False, default=False)
    _left_on_nodes: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        spec, command = self.attempt.spec, self.attempt.command
        self._files = reader_of(self.attempt.folder, attempt_id=spec.attempt_id)
        self._log = CappedLog(self.attempt.log)
        self._watchdog = Watchdog(
            self.timeouts,
            deadline_s=self.deadline_s,
            predicted_s=command.predicted_iteration_s,
            clock=self.clock,
            num_processes=command.num_processes,
        )
        self._slowdown = SlowdownDetector(
            warmup=spec.warmup, slow_above_s=self.slow_above_s, clock=self.clock
        )
        self._num_oom_kills = num_oom_kills()

    def run(self) -> AttemptEnd:
        """Watch until the end. On any exception, Ctrl-C included, every process is killed first."""
        try:
            stopped_by, expiry = self._await_end()
            is_cut = self._is_cut()
            engine_fault = self._engine_fault(stopped_by)
            grace_s = self.timeouts.shutdown_s
            self._end(stopped_by, grace_s=min(grace_s, _ERROR_GRACE_S) if stopped_by == "error" else grace_s)
        except BaseException:
            self._kill_all()
            raise
        finally:
            with contextlib.suppress(OSError):
                remove_torn(self.attempt.folder)
        observations = AttemptObservations(
            spec=self.attempt.spec,
            plan=self.attempt.read_plan(),
            snapshot=self._last_look(),
            num_processes=self.attempt.command.num_processes,
            stopped_by=stopped_by,
            exit_code=self._exit_code,
            is_single=self.attempt.command.starter == "python",
            expiry=expiry,
            log=read_tail(self.attempt.log),
            num_oom_kills=num_oom_kills() - self._num_oom_kills,
            max_spread=self.attempt.command.max_spread,
            is_cut=is_cut,
        )
        return AttemptEnd(
            observations=observations,
            wall_s=self._watchdog.elapsed_s,
            survivors=self.registry.alive,
            left_on_nodes=self._left_on_nodes,
            engine_fault=engine_fault,
        )

    def _await_end(self) -> tuple[StoppedBy, Expiry | None]:
        while True:
            exit_code = self.handle.poll()  # before the files: what they hold is then final
            snapshot = self._look()
            if snapshot is None:
                if self.should_stop():
                    return "cancel", None
                time.sleep(self.poll_s)
                continue
            if is_complete(snapshot, num_processes=self.attempt.command.num_processes):
                self._wait(self.timeouts.shutdown_s, until=self._has_exited)
                return "complete", None
            if snapshot.errs or snapshot.faults:
                self._wait_for_peers(snapshot)
                return "error", None
            if exit_code is not None and not self._has_left_processes():
                self._exit_code = exit_code
                return "exit", None
            if self.should_stop():
                return "cancel", None
            if self._slowdown.is_slow(snapshot.beats.values()) and not self.attempt.stop_file.exists():
                # The ranks end by themselves after the same iteration; a full disk must not prevent the rest.
                with contextlib.suppress(StorageError):
                    write_text_atomic(self.attempt.stop_file, _CUT)
            if isinstance(self.handle, NodesHandle) and self.handle.is_pending:
                self._watchdog.hold()
            expiry = self._watchdog.expired()
            if expiry is not None:
                return "hang", expiry
            time.sleep(self.poll_s)

    def _has_left_processes(self) -> bool:
        """Whether a command of the user's own has ended and left its training in the background."""
        if self.attempt.command.starter != "other":
            return False
        with contextlib.suppress(StorageError):
            self._add_orphans()
            if not self.registry.alive:
                self.registry.search()
        return bool(self.registry.alive)

    def _look(self) -> Snapshot | None:
        """Read the ranks' files, add new processes to the registry, trim the log, report the progress.

        None while the file system fails: then neither an end nor a hang can be judged. Raises StorageError
        where it fails for longer than `_LOST_S`.
        """
        now = self.clock()
        try:
            snapshot = self._files.scan()
            iteration = min((beat.iteration for beat in snapshot.beats.values()), default=0)
            if now >= self._next_rescan_s:
                self._rescan(snapshot)
                self._log.trim()
                self._next_rescan_s = now + (_RESCAN_MEASURING_S if iteration > 0 else _RESCAN_S)
        except StorageError:
            self._lost_since_s = now if self._lost_since_s is None else self._lost_since_s
            if now - self._lost_since_s >= _LOST_S:
                raise
            return None
        if self._lost_since_s is not None:
            self._watchdog.forgive(now - self._lost_since_s)
            self._lost_since_s = None
        self._watchdog.observe(snapshot.beats.values())
        is_done = is_complete(snapshot, num_processes=self.attempt.command.num_processes)
        # A rank's report is there before its last heartbeat.
        phase: Phase = "done" if is_done else slowest_phase(snapshot)
        if (phase, iteration) != self._shown:
            self._shown = (phase, iteration)
            if self.on_progress is not None:
                spec = self.attempt.spec
                progress = Progress(
                    attempt=attempt_number(self.attempt.folder),
                    phase=phase,
                    iteration=iteration,
                    num_iterations=spec.num_iterations,
                    elapsed_s=self._watchdog.elapsed_s,
                )
                self.on_progress(progress)
        return snapshot

    def _last_look(self) -> Snapshot:
        """The ranks' files when none of them runs any more. Raises StorageError as `_look` does."""
        since_s = self.clock() if self._lost_since_s is None else self._lost_since_s
        while True:
            try:
                return self._files.scan()
            except StorageError:
                if self.clock() - since_s >= _LOST_S:
                    raise
            time.sleep(self.poll_s)

    def _is_cut(self) -> bool:
        """Whether this tuner or an earlier one has asked the ranks to end early because they were slow."""
        with contextlib.suppress(OSError):
            return self.attempt.stop_file.read_text() == _CUT
        return False

    def _rescan(self, snapshot: Snapshot) -> None:
        named = [(beat.pid, beat.process_start) for beat in snapshot.beats.values()]
        self._add_orphans()
        self.registry.rescan(self._launcher_pid, named=named)

    @property
    def _launcher_pid(self) -> int:
        """The launcher's process id; 0 once it has ended, when the system may give its id to another."""
        return self.handle.pid if self.handle.poll() is None else 0

    def _has_exited(self) -> bool:
        code = self.handle.poll()
        if code is not None and self._exit_code is None and not self._was_ended:
            self._exit_code = code
        return code is not None

    def _wait_for_peers(self, snapshot: Snapshot) -> None:
        """Wait for other ranks: who only saw a peer go may report before the root cause does.

        Then the launcher, which knows who was killed, gets the time to say so.
        """
        is_secondary = not snapshot.faults and all(err.kind == "network" for err in snapshot.errs.values())
        limit_s = _PEERS_S if is_secondary else _EARLIEST_S
        self._wait(min(limit_s, self.timeouts.shutdown_s), until=self._has_exited)

    def _wait(self, limit_s: float, *, until: Callable[[], bool]) -> bool:
        end = self.clock() + limit_s
        while not until():
            if self.clock() >= end:
                return False
            time.sleep(min(self.poll_s, 0.05))
        return True

    def _end(self, stopped_by: StoppedBy, *, grace_s: float) -> None:
        """STOP file, SIGTERM to the launcher, waiting, then exactly the recorded processes."""
        with contextlib.suppress(StorageError):
            self._rescan(self._files.scan())
        if not self._has_exited():
            self._was_ended = True  # from here on the exit code says what the tuner did
            # Without the file the signals still end everything; a full disk must not prevent that.
            with contextlib.suppress(StorageError):
                write_text_atomic(self.attempt.stop_file, f"{stopped_by}\n")
            if stopped_by == "hang":
                self._dump_stacks()
            self.handle.terminate()
            self._wait(grace_s, until=lambda: self._has_exited() and not self.registry.alive)
        self._kill_rest()
        self._has_exited()

    def _dump_stacks(self) -> None:
        """Let the ranks print their stacks, one after another, as they may share one log.

        The other ranks and the launcher are paused meanwhile: they would act on the first rank's end.
        """
        snapshot = self._files.scan()
        pids = {beat.pid for beat in snapshot.beats.values()}
        alive = self.registry.alive
        ranks = sorted(process for process in alive if process.pid in pids and process.boot_id == boot_id())
        end = self.clock() + _STACKS_S
        with paused(alive):
            for rank in ranks:
                ask_for_stacks(rank)
                self._wait(end - self.clock(), until=partial(_has_ended, rank))

    def _kill_rest(self) -> None:
        """Kill the attempt's processes on the nodes, then those on this machine.

        An engine's driver on this machine may be what ends or cancels the processes on the nodes. Where this
        kills a launcher, the nodes are ended once more: it may have started something in the meantime.
        """
        try:
            self._end_on_nodes()
        finally:
            was_left = self._reap_rest()
        if was_left:
            self._end_on_nodes()

    def _end_on_nodes(self) -> None:
        if isinstance(self.handle, NodesHandle):
            self._left_on_nodes = self.handle.end_on_nodes()

    def _reap_rest(self) -> bool:
        """Kill the attempt's processes on this machine until two looks show none; whether there were any.

        A process may start another one while it is being ended.
        """
        end = self.clock() + _KILL_S
        grace_s, was_left = _KILL_GRACE_S, False
        while alive := self._remaining() or self._remaining():
            reap(alive, grace_s=grace_s, clock=self.clock)
            grace_s, was_left = 0.0, True
            if self.clock() >= end:
                break
        return was_left

    def _engine_fault(self, stopped_by: StoppedBy) -> str | None:
        """Why the engine has ended the attempt, asked where it neither measured nor was stopped."""
        if stopped_by in ("complete", "cancel") or not isinstance(self.handle, NodesHandle):
            return None
        return self.handle.fault

    def _remaining(self) -> frozenset[Identity]:
        """Every process of the attempt that still runs, also where the registry's file cannot be written."""
        with contextlib.suppress(QuartetError):
            self.registry.rescan(self._launcher_pid)
        with contextlib.suppress(QuartetError):
            self.registry.search()
        # Last, and stopped at once: an orphan may be another process before the others are looked through.
        with contextlib.suppress(QuartetError):
            self._add_orphans(stop_them=True)
        return self.registry.alive

    def _add_orphans(self, *, stop_them: bool = False) -> None:
        if self.subreaper is not None:
            orphans = self.subreaper.orphans()
            if stop_them:
                send_signal(orphans, signal.SIGSTOP)
            self.registry.add(orphans)

    def _kill_all(self) -> None:
        with contextlib.suppress(Exception):
            self._rescan(self._files.scan())
        with contextlib.suppress(Exception):
            self._end_on_nodes()
        with contextlib.suppress(Exception):
            reap(self._remaining(), grace_s=0.0, clock=self.clock)
        with contextlib.suppress(Exception):
            if self.handle.poll() is None:
                self.handle.kill()
                self._wait(5.0, until=self._has_exited)
        with contextlib.suppress(Exception):
            self._end_on_nodes()


def _has_ended(process: Identity) -> bool:
    return not is_running(process)
