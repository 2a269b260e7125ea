"""A worker: takes plans from a run's work queue, measures them on its device slice, and leaves the results.

It never sees the study. It measures exactly as a tuner without workers does, and what it may do ends with its
claim: where another tuner or another worker has the plan now, it ends its trial and says nothing.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from quartet_plugin.errors import QuartetError, StorageError
from quartet_plugin.launchers.command import Command
from quartet_plugin.launchers.running_process import is_running, runs_on
from quartet_plugin.protocol.environment import CLAIM_RENEWAL_S
from quartet_plugin.protocol.masking import masked
from quartet_plugin.protocol.process_identity import Identity
from quartet_plugin.protocol.work_queue_files import Claim, Done, QueuedTrial, WorkerRecord
from quartet_plugin.trial.attempt import PREFIX, attempt_number, open_attempt
from quartet_plugin.trial.lease import read_holder, renewal_of
from quartet_plugin.trial.processes import ProcessRegistry, reap
from quartet_plugin.trial.request import Outcome, Timeouts, TrialRequest
from quartet_plugin.tuner.accepted_sources import accept_as_before
from quartet_plugin.tuner.run_folder import TuningRun
from quartet_plugin.tuner.trial_backend import ShouldStop, TrialBackend
from quartet_plugin.tuner.workers.dispatcher import LatestRenewal
from quartet_plugin.tuner.workers.work_queue import WorkQueue

# Seconds between an idle worker's looks into the queue: at first, doubled after each look, and at most.
POLL_S, LONGEST_POLL_S = 0.1, 1.0
# How long a joined worker waits for a tuner that was lost to come back.
ABSENCE_S = 120.0
_REAP_GRACE_S = 2.0


@dataclass(slots=True, kw_only=True)
class Worker:
    """One worker of a run. `say` has a line for the user."""

    run: TuningRun
    command: Command
    record: WorkerRecord
    queue: WorkQueue
    backend: TrialBackend
    should_stop: ShouldStop
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _beat_s: float = field(default=float("-inf"))
    _absent_s: float | None = None
    _renewal: LatestRenewal | None = None
    _next_look_s: float = field(default=float("-inf"))

    def work(self) -> str:
        """Measure queued trials until no more are needed; returns the reason for the end.

        Raises QuartetError where trials cannot be run here; the plan is then handed out again.
        """
        self.queue.register(self.record)
        wait_s = POLL_S
        try:
            while True:
                why = self._why_over()
                if why is not None:
                    return why
                self._beat()
                taken = self.queue.take(self.record)
                if taken is None:
                    self.sleep(wait_s)
                    wait_s = min(LONGEST_POLL_S, 2 * wait_s)
                else:
                    self._measure(*taken)
                    wait_s = POLL_S
        finally:
            self.queue.forget(self.record.name)

    def _why_over(self) -> str | None:
        if self.should_stop():
            return "stopped"
        if not is_running(self.record.parent):
            return "the process that started it has ended"
        if self.queue.is_dismissed(self.record):
            return "it was dismissed"
        if not self.record.is_joined:
            return None
        if self.queue.offer() is None:
            return "the search has ended"
        return self._why_no_tuner()

    def _why_no_tuner(self) -> str | None:
        """A tuner that was lost is waited for: the same run may be resumed."""
        if self.clock() < self._next_look_s:
            return None
        self._next_look_s = self.clock() + CLAIM_RENEWAL_S
        folder, now_s = self.run.folder.path, self.clock()
        holder = None
        with contextlib.suppress(QuartetError):
            holder = read_holder(folder)
        if holder is None:
            return "the run has no tuner"
        is_alive, beat = runs_on(holder, host=holder.host), renewal_of(folder)
        if self._renewal is None:
            self._renewal = LatestRenewal(beat=beat, seen_s=now_s)
        is_silent = self._renewal.is_silent(beat, now_s=now_s)
        if is_alive or (is_alive is None and not is_silent):
            self._absent_s = None
            return None
        if self._absent_s is None:
            self._absent_s = self.clock()
        return "the run's tuner was lost" if self.clock() - self._absent_s > ABSENCE_S else None

    def _measure(self, queued: QueuedTrial, claim: Claim) -> None:
        self.say(f"trial {queued.trial}: {self.record.name} measures it")
        renewed_s, is_held = float("-inf"), True

        def should_end() -> bool:
            nonlocal renewed_s, is_held
            if self.should_stop():
                return True
            # A file system that fails does not end a trial here: its monitor says for how long it may fail.
            with contextlib.suppress(StorageError):
                self._beat()
                if is_held and self.clock() - renewed_s >= CLAIM_RENEWAL_S:
                    renewed_s, is_held = self.clock(), self.queue.renew(claim)
            return not is_held  # once lost it stays lost

        try:
            # The tuner's own variables are not those of a worker on another host.
            accept_as_before(self.run.folder)
            request = self._request(queued)
            result = self.backend.run(request, on_progress=lambda _: None, should_stop=should_end)
        except QuartetError as error:
            done = Done(
                fence=queued.fence, attempt=None, error=masked(str(error)), exit_code=int(error.exit_code)
            )
            self.queue.finish(claim, done)
            raise
        is_current = self.queue.finish(claim, Done(fence=queued.fence, attempt=attempt_number(result.folder)))
        note = "" if is_current else "; another worker has taken over the trial: this result does not count"
        reason = "" if result.outcome is Outcome.OK else f": {result.reason}"
        self.say(f"trial {queued.trial}: {result.outcome.value}{reason}{note}")

    def _request(self, queued: QueuedTrial) -> TrialRequest:
        return TrialRequest(
            folder=self.queue.trial_folder(queued.trial),
            command=self.command,
            plan=self.queue.plan(queued),
            attempt=queued.attempt,
            warmup=queued.warmup,
            measure=queued.measure,
            max_warmup=queued.max_warmup,
            early_end=queued.early_end,
            modules=queued.modules,
            deadline_s=queued.deadline_s,
            device=self.record.share.device,
            predicted_iteration_s=queued.predicted_iteration_s,
            slow_above_s=queued.slow_above_s,
            timeouts=Timeouts(**queued.timeouts),
            cwd=self.run.cwd,
            fence=queued.fence,
        )

    def _beat(self) -> None:
        now_s = self.clock()
        if now_s - self._beat_s >= CLAIM_RENEWAL_S:
            self._beat_s = now_s
            self.queue.beat(self.record)


def end_left_behind(queue: WorkQueue, *, host: str | None = None) -> frozenset[Identity]:
    """End what workers of this host that have ended left running; returns what was found.

    Their coordinator, on another host, could not. Known by the claims' fences, in the attempts' ids, and then
    by pid, start time and boot.
    """
    here = host or socket.gethostname()
    running: set[Identity] = set()
    for claim in queue.claims(has_voided=True):
        if runs_on(claim.identity, host=claim.host, here=here) is not False:
            continue
        for folder in sorted(queue.trial_folder(claim.trial).glob(f"{PREFIX}*")):
            running |= _running_of(folder, fence=claim.fence)
    reap(running, grace_s=_REAP_GRACE_S)
    return frozenset(running)


def _running_of(folder: Path, *, fence: str) -> frozenset[Identity]:
    with contextlib.suppress(QuartetError):
        attempt = open_attempt(folder)
        if attempt is not None and attempt.spec.attempt_id.startswith(fence):
            registry = ProcessRegistry.read(attempt.processes_file, attempt_id=attempt.spec.attempt_id)
            registry.search()
            return registry.alive
    return frozenset()
