"""Hand-outs under anything that can happen to workers and to their coordinator, in any order.

The invariants: a trial is told at most once and none is lost, the budget is kept, and of a trial's hand-outs
at most one is live.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quartet_plugin.launchers.command import parse_command
from quartet_plugin.protocol.environment import EXPIRY_S
from quartet_plugin.protocol.work_queue_files import WorkerRequirement
from quartet_plugin.trial.request import Outcome, TrialRequest, TrialResult
from quartet_plugin.tuner.context import EventLog
from quartet_plugin.tuner.workers.dispatcher import Dispatcher
from quartet_plugin.tuner.workers.work_queue import WorkQueue
from tests.model.plans import PLAN
from tests.tuner.workers.hands import ELSEWHERE, HERE, Disk, Hand, worker_record

BUDGET = 6
COMMAND = parse_command(("torchrun", "--nproc-per-node", "2", "pretrain_gpt.py"), environment={})
NUM_HANDS = 4
HANDS = st.integers(0, NUM_HANDS - 1)
OUTCOMES = st.sampled_from([Outcome.OK, Outcome.OK, Outcome.INFEASIBLE, Outcome.CANCELLED])


class HandOuts(RuleBasedStateMachine):
    """One coordinator and four workers, two of them on another host."""

    def __init__(self) -> None:
        super().__init__()
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="quartet-test-", dir=memory if memory.is_dir() else None))
        self.queue = WorkQueue(folder=self.folder)
        self.queue.open(WorkerRequirement(device="cpu", num_devices=2))
        self.disk = Disk()
        self.now_s = 0.0
        self.dead: set[int] = set()
        self.num_started = 0
        self.asked: set[int] = set()
        self.record: dict[int, TrialResult] = {}
        self.dispatcher = self.new_dispatcher()
        self.hands = [self.new_hand(index) for index in range(NUM_HANDS)]

    def new_dispatcher(self) -> Dispatcher:
        return Dispatcher(
            queue=self.queue,
            backend=self.disk,  # type: ignore[arg-type]
            read=self.disk.read,
            fence=lambda: None,
            say=lambda text: None,
            events=EventLog(self.folder / "events.jsonl"),
            clock=lambda: self.now_s,
            host=HERE,
            is_alive=lambda identity: identity.pid not in self.dead,
        )

    def new_hand(self, index: int) -> Hand:
        self.num_started += 1
        one = worker_record(
            f"w{index}", pid=1000 + self.num_started, host=HERE if index < NUM_HANDS // 2 else ELSEWHERE
        )
        self.queue.register(one)
        return Hand(queue=self.queue, disk=self.disk, record=one)

    def request(self, number: int) -> TrialRequest:
        return TrialRequest(folder=self.queue.trial_folder(number), command=COMMAND, plan=PLAN)

    # The coordinator

    @precondition(lambda self: len(self.asked) < BUDGET and len(self.dispatcher._in_flight) < NUM_HANDS)
    @rule()
    def ask(self) -> None:
        number = len(self.asked) + 1
        self.asked.add(number)
        self.dispatcher.publish(number, self.request(number), host=None)

    @rule()
    def tell(self) -> None:
        for ended in self.dispatcher.collect():
            assert ended.number not in self.record
            queued = self.queue.queued_trial(ended.number)
            assert queued is not None
            assert ended.result.attempt_id.startswith(queued.fence)
            self.record[ended.number] = ended.result
            self.dispatcher.finished(ended.number)

    @rule(dies_between=st.booleans())
    def crash(self, dies_between: bool) -> None:
        """The coordinator dies, between two steps or after it has told the study and before its files."""
        if dies_between:
            for ended in self.dispatcher.collect()[:1]:
                assert ended.number not in self.record
                self.record[ended.number] = ended.result
        self.dispatcher = self.new_dispatcher()
        for queued in self.queue.queued_trials():
            if queued.trial in self.record:
                self.queue.withdraw(queued.trial)
        for number in sorted(self.asked - set(self.record)):
            if self.dispatcher.adopt(number, PLAN):
                continue
            found = self.dispatcher.recorded(number, PLAN)
            if found is None:
                self.dispatcher.publish(number, self.request(number), host=None)
            else:
                self.record[number] = found
                self.dispatcher.finished(number)

    @rule(seconds=st.sampled_from([1.0, EXPIRY_S / 2, EXPIRY_S + 1]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    # The workers

    @rule(index=HANDS)
    def take(self, index: int) -> None:
        hand = self.hands[index]
        if hand.claim is None:
            hand.take()

    @rule(index=HANDS)
    def renew(self, index: int) -> None:
        hand = self.hands[index]
        if hand.claim is not None and not hand.renew():
            hand.claim = hand.queued = None  # as a worker that ends its trial

    @rule(
        index=HANDS, outcome=st.sampled_from([Outcome.OK, Outcome.OK, Outcome.INFEASIBLE, Outcome.CANCELLED])
    )
    def finish(self, index: int, outcome: Outcome) -> None:
        """Also late: the claim may be void since long."""
        hand = self.hands[index]
        if hand.claim is None:
            return
        hand.measure(outcome)
        queued = self.queue.queued_trial(hand.claim.trial)
        is_current = queued is not None and queued.fence == hand.claim.fence
        assert hand.report() == is_current

    @rule(index=HANDS)
    def give_up(self, index: int) -> None:
        if self.hands[index].claim is not None:
            self.hands[index].give_up("the disk is full")

    @rule(index=HANDS, has_measured=st.booleans())
    def die(self, index: int, has_measured: bool) -> None:
        """kill -9, before its result is written or between the result and the report; a new one comes."""
        hand = self.hands[index]
        if hand.claim is not None and has_measured:
            hand.measure()
        self.dead.add(hand.record.identity.pid)
        self.hands[index] = self.new_hand(index)

    # What always holds

    @invariant()
    def nothing_is_lost(self) -> None:
        assert set(self.record) | set(self.dispatcher._in_flight) >= self.asked
        assert len(self.asked) <= BUDGET

    @invariant()
    def one_hand_out_is_live(self) -> None:
        for number in self.asked:
            queued = self.queue.queued_trial(number)
            live = [
                claim
                for claim in self.queue.claims(trial=number)
                if queued is not None and claim.fence == queued.fence
            ]
            assert len(live) <= 1

    def teardown(self) -> None:
        """Left alone with one good worker, every trial that was asked for comes to its end."""
        try:
            hand = self.new_hand(0)
            for _ in range(4 * BUDGET):
                self.now_s += EXPIRY_S + 1
                self.tell()
                if hand.take():
                    hand.measure()
                    assert hand.report()
            self.tell()
            assert set(self.record) == self.asked
            assert not self.dispatcher._in_flight
            assert not list((self.queue.path / "orders").iterdir())
            assert not list((self.queue.path / "claims").iterdir())
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


TestHandOuts: Any = HandOuts.TestCase
TestHandOuts.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
