"""The coordinator's side of the board: plans go out, results come back, what was lost goes out again.

A hand-out ends in one of four ways: its worker says what came of it; its worker gave up; its worker is lost
(its process has ended, on this host; or it has not renewed its claim for a while, by this process's own
clock); or the run ends. Each has a fence, and a result counts only with that of the latest one.
"""

import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from quartet_plugin.model.plan import Plan
from quartet_plugin.protocol.environment import EXPIRY_S
from quartet_plugin.trial.attempt import PREFIX, attempt_number
from quartet_plugin.trial.processes import Identity
from quartet_plugin.trial.request import Outcome, TrialRequest, TrialResult
from quartet_plugin.tuner.events import EventLog
from quartet_plugin.tuner.launches import Launches
from quartet_plugin.tuner.workers.messages import Claim, Done, Member, QueuedTrial
from quartet_plugin.tuner.workers.work_queue import WorkQueue

# A plan that took so many workers with it is not handed out again.
MAX_LOST = 3

ReadResult = Callable[[Path], TrialResult | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedTrial:
    """A hand-out that came to a result, and which worker had it."""

    number: int
    result: TrialResult
    worker: str


@dataclass(slots=True, kw_only=True)
class Pulse:
    """Whether something is renewed, seen from here: two clocks are never compared."""

    beat: int | None
    seen_s: float

    def is_silent(self, beat: int | None, *, now_s: float, expiry_s: float) -> bool:
        """Whether there was no renewal for `expiry_s`."""
        if beat != self.beat:
            self.beat, self.seen_s = beat, now_s
        return now_s - self.seen_s > expiry_s


@dataclass(slots=True, kw_only=True)
class _InFlight:
    order: QueuedTrial
    plan: Plan
    pulse: Pulse | None = None
    num_lost: int = 0
    is_announced: bool = False


@dataclass(slots=True, kw_only=True)
class Dispatcher:
    """Hands plans out and collects what came of them.

    `read` is an attempt's folder's result as the search takes it; `fence` raises where another tuner has
    taken the run; `say` has a line for the user.
    """

    board: WorkQueue
    launches: Launches
    read: ReadResult
    fence: Callable[[], None]
    say: Callable[[str], None]
    events: EventLog
    clock: Callable[[], float] = time.monotonic
    expiry_s: float = EXPIRY_S
    host: str = field(default_factory=socket.gethostname)
    is_alive: Callable[[Identity], bool] = lambda identity: identity.is_alive
    _flying: dict[int, _InFlight] = field(default_factory=dict)
    _crew: dict[str, Pulse] = field(default_factory=dict)

    @property
    def flying(self) -> frozenset[int]:
        """The trials that are handed out."""
        return frozenset(self._flying)

    def publish(self, number: int, request: TrialRequest, *, host: str | None) -> None:
        """Hand a plan out; `host` is the only one that may take it."""
        assert request.plan is not None
        before = self.board.order(number)
        order = QueuedTrial(
            trial=number,
            generation=1 if before is None else before.generation + 1,
            fence=secrets.token_hex(8),
            attempt=self._next_attempt(number),
            plan_key=request.plan.key,
            host=host,
            warmup=request.warmup,
            measure=request.measure,
            deadline_s=request.deadline_s,
            predicted_iteration_s=request.predicted_iteration_s,
            slow_above_s=request.slow_above_s,
            timeouts=asdict(request.timeouts),
        )
        self.fence()
        self.board.publish(order, request.plan)
        self._flying[number] = _InFlight(order=order, plan=request.plan)

    def adopt(self, number: int, plan: Plan) -> bool:
        """Whether an earlier coordinator's hand-out of the plan is still under way, or has just ended."""
        order = self.board.order(number)
        if order is None or order.is_closed or order.plan_key != plan.key:
            return False
        claim = self.board.claim_of(order)
        is_held = claim is not None and self._lives_here(claim) is not False
        if not is_held and self.board.done_of(order) is None:
            return False
        self._flying[number] = _InFlight(order=order, plan=plan)
        return True

    def recorded(self, number: int, plan: Plan) -> TrialResult | None:
        """What an earlier process measured of the plan, unless a hand-out that was voided did."""
        found = self.launches.recorded(self.board.trial_folder(number), plan_key=plan.key)
        order = self.board.order(number)
        if found is not None and order is not None and not found.attempt_id.startswith(order.fence):
            return None
        return found

    def look(self, *, at_workers: bool = True) -> list[EndedTrial]:
        """What has ended since the last look; `at_workers`, what was lost is handed out again.

        To look for results alone takes microseconds: it disturbs no trial.
        """
        found = []
        for number, one in sorted(self._flying.items()):
            ended = None
            done = self.board.done_of(one.order)
            if done is not None:
                ended = self._done(number, one, self.board.claim_of(one.order), done)
            elif at_workers:
                claim = self.board.claim_of(one.order)
                if claim is not None and not self._is_held(one, claim):
                    ended = self._lost(number, one, claim)
                else:
                    self._announce(number, one, claim)
            if ended is not None:
                found.append(ended)
        return found

    def told(self, number: int) -> None:
        """A trial's result has reached the study."""
        self._flying.pop(number, None)
        self.board.withdraw(number)

    def again(self, number: int, why: str) -> None:
        """Hand a trial out once more: what came of it does not count."""
        one = self._flying[number]
        order = replace(
            one.order,
            generation=one.order.generation + 1,
            fence=secrets.token_hex(8),
            attempt=self._next_attempt(number),
        )
        self.fence()
        self.board.publish(order, one.plan)
        self._flying[number] = _InFlight(order=order, plan=one.plan, num_lost=one.num_lost)
        self.events.add("again", trial=number, generation=order.generation, reason=why)

    def crew(self) -> list[Member]:
        """The workers that live. Those that have ended are struck."""
        found = []
        now_s = self.clock()
        for member in self.board.members():
            beat = self.board.beat_of(member)
            pulse = self._crew.setdefault(member.name, Pulse(beat=beat, seen_s=now_s))
            is_silent = pulse.is_silent(beat, now_s=now_s, expiry_s=self.expiry_s)
            if is_silent or (member.host == self.host and not self.is_alive(member.identity)):
                self.board.forget(member.name)
            elif not self.board.is_dismissed(member):
                found.append(member)
        return found

    def _done(self, number: int, one: _InFlight, claim: Claim | None, done: Done) -> EndedTrial | None:
        self._announce(number, one, claim)
        worker = "a worker" if claim is None else claim.worker
        if done.error is not None or done.attempt is None:
            self.say(f"trial {number}: {worker} gave it up: {done.error}; it is handed out again")
            self.again(number, done.error or "given up")
            return None
        result = self.read(self.board.trial_folder(number) / f"{PREFIX}{done.attempt}")
        is_ours = result is not None and result.attempt_id.startswith(one.order.fence)
        if result is None or not is_ours or result.plan_key != one.order.plan_key:
            self.again(number, "its result is not that of this hand-out")
            return None
        if result.outcome is Outcome.CANCELLED:
            self.say(f"trial {number}: {worker} was stopped; it is handed out again")
            self.again(number, "its worker was stopped")
            return None
        return EndedTrial(number=number, result=result, worker=worker)

    def _lost(self, number: int, one: _InFlight, claim: Claim) -> EndedTrial | None:
        """End what the worker left on this host; a result that is whole counts."""
        self.fence()
        folder = self.board.trial_folder(number)
        self.launches.recover(folder, should_stop=lambda: True)
        result = self.recorded(number, one.plan)
        if result is not None:
            return EndedTrial(number=number, result=result, worker=claim.worker)
        one.num_lost += 1
        why = f"{claim} was lost"
        self.events.add("worker-lost", trial=number, worker=claim.worker, host=claim.host)
        if one.num_lost < MAX_LOST:
            self.say(f"trial {number}: {why}; it is handed out again")
            self.again(number, why)
            return None
        lost = TrialResult(
            attempt_id=one.order.fence + secrets.token_hex(8),
            plan_key=one.order.plan_key,
            outcome=Outcome.INFRA,
            reason=f"{why}, and {MAX_LOST - 1} others with this plan before it",
            phase="launch",
            folder=folder,
        )
        return EndedTrial(number=number, result=lost, worker=claim.worker)

    def _announce(self, number: int, one: _InFlight, claim: Claim | None) -> None:
        if claim is not None and not one.is_announced:
            one.is_announced = True
            self.events.add("taken", trial=number, worker=claim.worker, host=claim.host)

    def _is_held(self, one: _InFlight, claim: Claim) -> bool:
        """Whether the claim's worker lives: seen as a process on this host, by its renewals elsewhere."""
        beat = self.board.beat_of(claim)
        if one.pulse is None:
            one.pulse = Pulse(beat=beat, seen_s=self.clock())
        is_silent = one.pulse.is_silent(beat, now_s=self.clock(), expiry_s=self.expiry_s)
        return not is_silent and self._lives_here(claim) is not False

    def _lives_here(self, claim: Claim) -> bool | None:
        """Whether the worker's process runs; None where that cannot be seen from this host."""
        return self.is_alive(claim.identity) if claim.host == self.host else None

    def _next_attempt(self, number: int) -> int:
        folder = self.board.trial_folder(number)
        return 1 + max((attempt_number(path) for path in folder.glob(f"{PREFIX}*")), default=0)
