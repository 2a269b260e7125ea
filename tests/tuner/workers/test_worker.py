"""One worker: what it takes, when it ends its trial, and what it says."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from quartet_plugin.errors import ConfigError, StorageError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.launchers.running_process import boot_id, current_identity
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import dump
from quartet_plugin.protocol.attempt_files import CommandRecord, TrialSpec
from quartet_plugin.protocol.environment import ACCEPT_CHANGED_SOURCE, ATTEMPT_ID, EXPIRY_S
from quartet_plugin.protocol.work_queue_files import (
    Claim,
    Done,
    QueuedTrial,
    WorkerRecord,
    WorkerRequirement,
    read_task,
)
from quartet_plugin.trial.lease import Lease
from quartet_plugin.trial.request import Outcome, TrialRequest, TrialResult
from quartet_plugin.tuner.workers.work_queue import WorkQueue
from quartet_plugin.tuner.workers.worker import ABSENCE_S, Worker, end_left_behind
from tests.model.plans import PLAN
from tests.tuner.fakes import COMMAND, begin
from tests.tuner.workers.hands import (
    COORDINATOR,
    HERE,
    Disk,
    Hand,
    contained_identity,
    identity,
    worker_record,
)
from tests.tuner.workers.test_work_queue import queued_trial


class Bench:
    """Stands for the launches: a trial lasts some turns, and ends early where it is told to."""

    def __init__(self, *, turn: Callable[[int], None] = print, error: Exception | None = None) -> None:
        self.turn = turn
        self.error = error
        self.requests: list[TrialRequest] = []
        self.num_turns = 0

    def run(self, request: TrialRequest, *, on_progress: Any, should_stop: Callable[[], bool]) -> TrialResult:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        outcome = Outcome.OK
        for at in range(4):
            self.turn(at)
            self.num_turns += 1
            if should_stop():
                outcome = Outcome.CANCELLED
                break
        return TrialResult(
            attempt_id=request.fence + "0" * 16,
            plan_key=request.plan_key,
            outcome=outcome,
            reason=outcome.value,
            phase="done",
            folder=request.folder / f"attempt-{request.attempt}",
        )


class Shift:
    """A worker at a board, with a clock that moves three seconds whenever it is looked at."""

    def __init__(self, tmp_path: Path, bench: Bench, **changes: Any) -> None:
        self.run = begin(tmp_path / "r")
        self.queue = WorkQueue(folder=self.run.folder.path)
        self.queue.open(WorkerRequirement(device="cpu", num_devices=2))
        self.said: list[str] = []
        self.now_s = 0.0
        self.num_waits, self.max_waits = 0, 3
        self.waits_s: list[float] = []
        self.record = replace(
            worker_record("w0", pid=1),
            host=socket.gethostname(),
            identity=current_identity(),
            parent=current_identity(),
        )
        self.record = replace(self.record, **changes)
        self.worker = Worker(
            run=self.run,
            command=parse_command(COMMAND, environment={}),
            record=self.record,
            queue=self.queue,
            backend=bench,  # type: ignore[arg-type]
            should_stop=lambda: self.num_waits >= self.max_waits,
            say=self.said.append,
            clock=self.clock,
            sleep=self.wait,
        )

    def clock(self) -> float:
        self.now_s += 3.0
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.num_waits += 1
        self.waits_s.append(seconds)


def test_it_measures_as_it_is_told_and_says_which_attempt_counts(tmp_path: Path) -> None:
    bench = Bench()
    shift = Shift(tmp_path, bench)
    told = queued_trial(7, fence="a" * 16)
    shift.queue.publish(replace(told, attempt=3), PLAN)
    assert shift.worker.work() == "stopped"
    (request,) = bench.requests
    assert request.folder == shift.run.folder.trial(7)
    assert (request.attempt, request.fence, request.warmup, request.measure) == (3, "a" * 16, 1, 3)
    assert (request.deadline_s, request.slow_above_s, request.device) == (60.0, 0.5, "cpu")
    assert request.plan == PLAN
    assert shift.queue.done_of(told) == Done(fence="a" * 16, attempt=3)
    assert shift.queue.workers() == []
    assert shift.said == ["trial 7: w0 measures it", "trial 7: OK"]


def test_a_worker_without_a_trial_looks_less_often(tmp_path: Path) -> None:
    shift = Shift(tmp_path, Bench())
    shift.max_waits = 6
    shift.worker.work()
    assert shift.waits_s == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_it_ends_a_trial_that_is_handed_to_another(tmp_path: Path) -> None:
    def turn(at: int) -> None:
        if at == 1:
            shift.queue.publish(queued_trial(7, generation=2, fence="b" * 16, host="another"), PLAN)

    bench = Bench(turn=turn)
    shift = Shift(tmp_path, bench)
    shift.queue.publish(queued_trial(7, fence="a" * 16), PLAN)
    shift.worker.work()
    assert bench.num_turns == 2
    assert not list((shift.queue.path / "claims").glob("*.done.json"))
    assert "this result does not count" in shift.said[-1]


def test_a_file_system_that_fails_for_a_moment_ends_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    shift = Shift(tmp_path, bench)
    renew, num_asked = shift.queue.renew, 0

    def failing(claim: Claim) -> bool:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:
            raise StorageError("the file server is away")
        return renew(claim)

    monkeypatch.setattr(WorkQueue, "renew", lambda _, claim: failing(claim))
    shift.queue.publish(queued_trial(7, fence="a" * 16), PLAN)
    shift.worker.work()
    assert num_asked > 2
    assert shift.said[-1] == "trial 7: OK"


def test_it_ends_a_trial_when_it_is_stopped(tmp_path: Path) -> None:
    bench = Bench(turn=lambda at: shift.wait(9) if at == 1 else None)
    shift = Shift(tmp_path, bench)
    shift.num_waits = 2
    shift.queue.publish(queued_trial(7), PLAN)
    assert shift.worker.work() == "stopped"
    assert shift.queue.done_of(queued_trial(7)) is not None  # its coordinator hands it out again
    assert "CANCELLED" in shift.said[-1]


def test_a_worker_that_cannot_run_trials_says_so_and_ends(tmp_path: Path) -> None:
    shift = Shift(tmp_path, Bench(error=StorageError("the disk is full")))
    shift.queue.publish(queued_trial(7), PLAN)
    with pytest.raises(StorageError, match="the disk is full"):
        shift.worker.work()
    done = shift.queue.done_of(queued_trial(7))
    assert done == Done(fence="0" * 16, attempt=None, error="the disk is full", exit_code=6)
    assert shift.queue.workers() == []


def test_a_plan_that_is_not_the_orders_is_given_up(tmp_path: Path) -> None:
    shift = Shift(tmp_path, Bench())
    shift.queue.publish(queued_trial(7), replace(PLAN, split=PLAN.made_for.baseline.split))
    with pytest.raises(ConfigError, match="not the plan of the queued trial"):
        shift.worker.work()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parent": COORDINATOR}, "the process that started it has ended"),
        ({"is_joined": True}, "the run has no tuner"),
    ],
)
def test_it_ends_with_those_it_works_for(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    assert Shift(tmp_path, Bench(), **changes).worker.work() == why


def test_a_joined_worker_ends_with_the_search_and_waits_for_a_tuner_that_was_lost(tmp_path: Path) -> None:
    shift = Shift(tmp_path, Bench(), is_joined=True)
    with Lease.acquire(shift.run.folder.path):
        assert shift.worker.work() == "stopped"  # a tuner that lives is worked for
        (shift.queue.path / "board.json").unlink()
        shift.num_waits = 0
        assert shift.worker.work() == "the search has ended"
        shift.queue.open(WorkerRequirement(device="cpu", num_devices=2))
        lock = shift.run.folder.path / "lock.json"
        text = lock.read_text()
        lock.write_text(text.replace(f'"pid": {os.getpid()}', '"pid": 2147480000'))
        shift.worker.should_stop = lambda: False
        began_s = shift.now_s
        assert shift.worker.work() == "the run's tuner was lost"
        assert shift.now_s - began_s > ABSENCE_S
        lock.write_text(text)


@pytest.mark.parametrize("ahead_s", [-900.0, 0.0, 900.0])
@pytest.mark.parametrize("known_by", [socket.gethostname, boot_id])
def test_a_tuner_on_another_host_or_boot_is_lost_by_its_renewals_alone(
    tmp_path: Path, ahead_s: float, known_by: Callable[[], str]
) -> None:
    """The clock of the file server is `ahead_s` of this host's."""
    shift = Shift(tmp_path, Bench(), is_joined=True)
    with Lease.acquire(shift.run.folder.path):
        lock = shift.run.folder.path / "lock.json"
        text = lock.read_text()
        lock.write_text(text.replace(known_by(), "another"))
        began_s = time.time() + ahead_s
        lost_s = 1000.0

        def stop() -> bool:
            if shift.now_s < lost_s:
                os.utime(lock, (began_s + shift.now_s,) * 2)
            return shift.now_s > 10 * lost_s

        shift.worker.should_stop = stop
        assert shift.worker.work() == "the run's tuner was lost"
        assert lost_s < shift.now_s - ABSENCE_S < lost_s + 2 * EXPIRY_S
        lock.write_text(text)


def test_it_is_sent_away(tmp_path: Path) -> None:
    shift = Shift(tmp_path, Bench())
    shift.worker.sleep = lambda seconds: shift.queue.dismiss("w0")
    assert shift.worker.work() == "it was dismissed"


def test_a_task_that_is_none_is_refused() -> None:
    for text in (b"", b"{}", b'{"command": "rm -rf"}'):
        with pytest.raises(ConfigError, match="no task"):
            read_task(text)


@contextmanager
def left_behind(attempt_id: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that inherited an attempt's id."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, ATTEMPT_ID: attempt_id},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_what_a_lost_worker_left_on_this_host_is_ended_and_nothing_else(tmp_path: Path) -> None:
    queue = WorkQueue(folder=tmp_path)
    queue.open(WorkerRequirement(device="cpu", num_devices=2))
    lost, alive, contained = "c" * 16, "d" * 16, "f" * 16
    identities = {lost: identity(999), alive: current_identity(), contained: contained_identity()}
    for trial, (fence, itself) in enumerate(identities.items(), start=1):
        queue.publish(queued_trial(trial, fence=fence), PLAN)
        one: WorkerRecord = replace(worker_record(f"w{trial}", pid=1), identity=itself)
        assert Hand(queue=queue, disk=Disk(), record=one).take()
        write_attempt(queue, queued_trial(trial, fence=fence))
    queue.publish(queued_trial(1, generation=2, fence="e" * 16), PLAN)  # handed out again
    with left_behind(lost + "1" * 16) as ours, left_behind(alive + "1" * 16) as theirs:
        with left_behind("9" * 32) as stranger, left_behind(contained + "1" * 16) as hidden:
            found = end_left_behind(queue, host=HERE)
            assert {one.pid for one in found} == {ours.pid}
            assert psutil.Process(ours.pid).wait(timeout=10) is not None or ours.poll() is not None
            assert theirs.poll() is None
            assert stranger.poll() is None
            assert hidden.poll() is None
        assert end_left_behind(queue, host="another") == frozenset()


def write_attempt(queue: WorkQueue, told: QueuedTrial) -> None:
    """The files of an attempt that was begun."""
    folder = queue.trial_folder(told.trial) / "attempt-1"
    folder.mkdir(parents=True)
    attempt_id = told.fence + "1" * 16
    sheet = TrialSpec(attempt_id=attempt_id, folder=str(folder), warmup=1, measure=3, plan_key=told.plan_key)
    command = CommandRecord(
        attempt_id=attempt_id,
        argv=("torchrun",),
        cwd="/",
        environment={},
        starter="torchrun",
        num_processes=2,
        time=0.0,
        deadline_s=60.0,
        predicted_iteration_s=None,
        timeouts={},
        max_spread=0.25,
    )
    write_json_atomic(folder / "trial.json", dump(sheet))
    write_json_atomic(folder / "command.json", dump(command))


def test_a_worker_of_another_host_accepts_the_changed_sources_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tuner's variables are not its own."""
    monkeypatch.setenv(ACCEPT_CHANGED_SOURCE, "")
    monkeypatch.delenv(ACCEPT_CHANGED_SOURCE)
    seen: list[str | None] = []
    shift = Shift(tmp_path, Bench(turn=lambda at: seen.append(os.environ.get(ACCEPT_CHANGED_SOURCE))))
    shift.run.folder.events_file.write_text(
        '{"time": 1, "kind": "accepted-source", "trial": 0, "functions": ["a.f@01"]}\n'
    )
    shift.queue.publish(queued_trial(7, fence="a" * 16), PLAN)
    shift.worker.work()
    assert set(seen) == {"a.f@01"}
