"""The coordinator's side of the work queue: plans go out, results come back, lost ones go out again.

A hand-out ends in one of four ways: its worker reports a result; its worker gave up; its worker is lost
(its process has ended, on this host; or it has not renewed its claim for a while, by this process's own
clock); or the run ends. Each has a fence, and a result counts only with that of the latest one.
"""

import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from quartet_plugin.launchers.running_process import is_running, is_visible
from quartet_plugin.model.plan import Plan
from quartet_plugin.protocol.environment import EXPIRY_S
from quartet_plugin.protocol.process_identity import Identity
from quartet_plugin.protocol.work_queue_files import Claim, Done, QueuedTrial, WorkerRecord
from quartet_plugin.trial.attempt import PREFIX, attempt_number
from quartet_plugin.trial.request import Outcome, TrialRequest, TrialResult
from quartet_plugin.tuner.context import EventLog
from quartet_plugin.tuner.trial_backend import TrialBackend
from quartet_plugin.tuner.workers.work_queue import WorkQueue

# A plan that took this number of workers with it is not handed out again.
MAX_LOST = 3

ReadResult = Callable[[Path], TrialResult | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedTrial:
    """A trial with its result, and the worker that measured it."""

    number: int
    result: TrialResult
    worker: str


@dataclass(slots=True, kw_only=True)
class LatestRenewal:
    """The latest renewal of a claim or a worker by this process's clock: two clocks are never compared."""

    beat: int | None
    seen_s: float

    def is_silent(self, beat: int | None, *, now_s: float) -> bool:
        """Whether there was no renewal for EXPIRY_S."""
        if beat != self.beat:
            self.beat, self.seen_s = beat, now_s
        return now_s - self.seen_s > EXPIRY_S


@dataclass(slots=True, kw_only=True)
class _InFlight:
    queued: QueuedTrial
    plan: Plan
    renewal: LatestRenewal | None = None
    num_lost: int = 0
    is_announced: bool = False


@dataclass(slots=True, kw_only=True)
class Dispatcher:
    """Hands plans out to workers and collects their results.

    `read` reads the result in an attempt's folder; `fence` raises where another tuner has taken the run;
    `say` shows a line to the user.
    """

    queue: WorkQueue
    backend: TrialBackend
    read: ReadResult
    fence: Callable[[], None]
    say: Callable[[str], None]
    events: EventLog
    clock: Callable[[], float] = time.monotonic
    host: str = field(default_factory=socket.gethostname)
    is_alive: Callable[[Identity], bool] = lambda identity: is_running(identity)
    _in_flight: dict[int, _InFlight] = field(default_factory=dict)
    _renewals: dict[str, LatestRenewal] = field(default_factory=dict)

    def publish(self, number: int, request: TrialRequest, *, host: str | None) -> None:
        """Hand a plan out; `host` is the only one that may take it."""
        assert request.plan is not None
        before = self.queue.queued_trial(number)
        queued = QueuedTrial(
            trial=number,
            generation=1 if before is None else before.generation + 1,
            fence=secrets.token_hex(8),
            attempt=self._next_attempt(number),
            plan_key=request.plan.key,
            host=host,
            warmup=request.warmup,
            measure=request.measure,
            max_warmup=request.max_warmup,
            early_end=request.early_end,
            modules=request.modules,
            deadline_s=request.deadline_s,
            predicted_iteration_s=request.predicted_iteration_s,
            slow_above_s=request.slow_above_s,
            timeouts=asdict(request.timeouts),
        )
        self.fence()
        self.queue.publish(queued, request.plan)
        self._in_flight[number] = _InFlight(queued=queued, plan=request.plan)

    def adopt(self, number: int, plan: Plan) -> bool:
        """Whether an earlier coordinator's hand-out of the plan is still under way, or has just ended."""
        queued = self.queue.queued_trial(number)
        if queued is None or queued.is_closed or queued.plan_key != plan.key:
            return False
        claim = self.queue.claim_of(queued)
        is_held = claim is not None and self._lives_here(claim) is not False
        if not is_held and self.queue.done_of(queued) is None:
            return False
        self._in_flight[number] = _InFlight(queued=queued, plan=plan)
        return True

    def recorded(self, number: int, plan: Plan) -> TrialResult | None:
        """The result that an earlier process measured, unless it was of a voided hand-out."""
        result = self.backend.recorded(self.queue.trial_folder(number), plan_key=plan.key)
        queued = self.queue.queued_trial(number)
        if result is not None and queued is not None and not result.attempt_id.startswith(queued.fence):
            return None
        return result

    def collect(self, *, at_workers: bool = True) -> list[EndedTrial]:
        """The trials that have ended since the last call; with `at_workers`, lost ones are handed out again.

        To collect results alone takes microseconds: it disturbs no trial.
        """
        ended_trials = []
        for number, flight in sorted(self._in_flight.items()):
            ended = None
            done = self.queue.done_of(flight.queued)
            if done is not None:
                ended = self._done(number, flight, self.queue.claim_of(flight.queued), done)
            elif at_workers:
                claim = self.queue.claim_of(flight.queued)
                if claim is not None and not self._is_held(flight, claim):
                    ended = self._lost(number, flight, claim)
                else:
                    self._announce(number, flight, claim)
            if ended is not None:
                ended_trials.append(ended)
        return ended_trials

    def finished(self, number: int) -> None:
        """Forget a trial whose record has reached the study."""
        self._in_flight.pop(number, None)
        self.queue.withdraw(number)

    def again(self, number: int, why: str) -> None:
        """Hand a trial out once more: its result does not count."""
        flight = self._in_flight[number]
        queued = replace(
            flight.queued,
            generation=flight.queued.generation + 1,
            fence=secrets.token_hex(8),
            attempt=self._next_attempt(number),
        )
        self.fence()
        self.queue.publish(queued, flight.plan)
        self._in_flight[number] = _InFlight(queued=queued, plan=flight.plan, num_lost=flight.num_lost)
        self.events.add("again", trial=number, generation=queued.generation, reason=why)

    def workers(self) -> list[WorkerRecord]:
        """The workers that live. Those that have ended are removed."""
        workers = []
        now_s = self.clock()
        for worker in self.queue.workers():
            beat = self.queue.beat_of(worker)
            renewal = self._renewals.setdefault(worker.name, LatestRenewal(beat=beat, seen_s=now_s))
            is_silent = renewal.is_silent(beat, now_s=now_s)
            if is_silent or self._lives_here(worker) is False:
                self.queue.forget(worker.name)
            elif not self.queue.is_dismissed(worker):
                workers.append(worker)
        return workers

    def _done(self, number: int, flight: _InFlight, claim: Claim | None, done: Done) -> EndedTrial | None:
        self._announce(number, flight, claim)
        worker = "a worker" if claim is None else claim.worker
        if done.error is not None or done.attempt is None:
            self.say(f"trial {number}: {worker} could not run it: {done.error}; it is queued again")
            self.again(number, done.error or "given up")
            return None
        result = self.read(self.queue.trial_folder(number) / f"{PREFIX}{done.attempt}")
        is_latest = result is not None and result.attempt_id.startswith(flight.queued.fence)
        if result is None or not is_latest or result.plan_key != flight.queued.plan_key:
            self.again(number, "its result belongs to another attempt")
            return None
        if result.outcome is Outcome.CANCELLED:
            self.say(f"trial {number}: {worker} was stopped; it is queued again")
            self.again(number, "its worker was stopped")
            return None
        return EndedTrial(number=number, result=result, worker=worker)

    def _lost(self, number: int, flight: _InFlight, claim: Claim) -> EndedTrial | None:
        """End what the worker left on this host; a result that is whole counts."""
        self.fence()
        folder = self.queue.trial_folder(number)
        self.backend.recover(folder, should_stop=lambda: True)
        result = self.recorded(number, flight.plan)
        if result is not None:
            return EndedTrial(number=number, result=result, worker=claim.worker)
        flight.num_lost += 1
        why = f"{claim} was lost"
        self.events.add("worker-lost", trial=number, worker=claim.worker, host=claim.host)
        if flight.num_lost < MAX_LOST:
            self.say(f"trial {number}: {why}; it is queued again")
            self.again(number, why)
            return None
        lost = TrialResult(
            attempt_id=flight.queued.fence + secrets.token_hex(8),
            plan_key=flight.queued.plan_key,
            outcome=Outcome.INFRA,
            reason=f"{why}, and {MAX_LOST - 1} others with this plan before it",
            phase="launch",
            folder=folder,
        )
        return EndedTrial(number=number, result=lost, worker=claim.worker)

    def _announce(self, number: int, flight: _InFlight, claim: Claim | None) -> None:
        if claim is not None and not flight.is_announced:
            flight.is_announced = True
            self.events.add("taken", trial=number, worker=claim.worker, host=claim.host)

    def _is_held(self, flight: _InFlight, claim: Claim) -> bool:
        """Whether the claim's worker lives: seen as a process on this host, by its renewals elsewhere."""
        beat = self.queue.beat_of(claim)
        if flight.renewal is None:
            flight.renewal = LatestRenewal(beat=beat, seen_s=self.clock())
        is_silent = flight.renewal.is_silent(beat, now_s=self.clock())
        return not is_silent and self._lives_here(claim) is not False

    def _lives_here(self, worker: Claim | WorkerRecord) -> bool | None:
        """Whether the worker's process runs; None where that cannot be seen from this process."""
        is_here = is_visible(worker.identity, host=worker.host, here=self.host)
        return self.is_alive(worker.identity) if is_here else None

    def _next_attempt(self, number: int) -> int:
        folder = self.queue.trial_folder(number)
        return 1 + max((attempt_number(path) for path in folder.glob(f"{PREFIX}*")), default=0)
