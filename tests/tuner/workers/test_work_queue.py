"""The board: one taker a hand-out, void claims, and files that break their format."""

import errno
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.errors import ConfigError, StorageError
from quartet_plugin.launchers.running_process import current_identity
from quartet_plugin.protocol.work_queue_files import Done, QueuedTrial, WorkerRequirement, worker_name
from quartet_plugin.report.status import status_lines, status_record
from quartet_plugin.trial.lease import Lease
from quartet_plugin.tuner.history import read_history
from quartet_plugin.tuner.workers.work_queue import WorkQueue
from quartet_plugin.tuner.workers.worker_pool import end_earlier
from tests.model.plans import PLAN
from tests.tuner.fakes import begin
from tests.tuner.workers.hands import (
    ELSEWHERE,
    HERE,
    Disk,
    Hand,
    contained_identity,
    identity_of_other_boot,
    worker_record,
)


@pytest.fixture
def queue(tmp_path: Path) -> WorkQueue:
    made = WorkQueue(folder=tmp_path)
    made.open(WorkerRequirement(device="cpu", num_devices=2))
    return made


def queued_trial(
    trial: int = 1, *, generation: int = 1, fence: str = "0" * 16, host: str | None = None
) -> QueuedTrial:
    return QueuedTrial(
        trial=trial,
        generation=generation,
        fence=fence,
        attempt=1,
        plan_key=PLAN.key,
        host=host,
        warmup=1,
        measure=3,
        deadline_s=60.0,
        predicted_iteration_s=None,
        slow_above_s=0.5,
        timeouts={"init_s": 300.0},
    )


def hand(queue: WorkQueue, name: str, *, host: str = HERE) -> Hand:
    return Hand(queue=queue, disk=Disk(), record=worker_record(name, pid=100, host=host))


def test_an_order_is_read_back_as_it_was_written(queue: WorkQueue) -> None:
    assert queue.offer() == WorkerRequirement(device="cpu", num_devices=2)
    queue.publish(queued_trial(), PLAN)
    assert queue.queued_trials() == [queued_trial()]
    assert queue.plan(queued_trial()).key == PLAN.key
    queue.withdraw(1)
    assert queue.queued_trials() == []
    assert not list((queue.path / "orders").iterdir())


def test_of_many_takers_one_gets_it(queue: WorkQueue) -> None:
    queue.publish(queued_trial(), PLAN)
    hands = [hand(queue, f"w{index}") for index in range(16)]
    ready, got = threading.Barrier(16), []

    def take(one: Hand) -> None:
        ready.wait()
        if one.take():
            got.append(one)

    threads = [threading.Thread(target=take, args=(one,)) for one in hands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    claim = queue.claim_of(queued_trial())
    assert claim is not None
    assert claim.worker == got[0].record.name
    assert [path.name for path in (queue.path / "claims").iterdir()] == ["000001-1.json"]


def test_a_plan_whose_mapping_names_a_host_is_taken_there_alone(queue: WorkQueue) -> None:
    queue.publish(queued_trial(host=HERE), PLAN)
    assert not hand(queue, "far", host=ELSEWHERE).take()
    assert hand(queue, "near").take()


def test_the_next_generation_voids_the_claim_before(queue: WorkQueue) -> None:
    queue.publish(queued_trial(), PLAN)
    late, next_one = hand(queue, "late"), hand(queue, "next")
    assert late.take()
    assert late.renew()
    again = queued_trial(generation=2, fence="1" * 16)
    queue.publish(again, PLAN)
    assert next_one.take()
    assert not late.renew()
    assert not late.report()
    assert queue.done_of(again) is None
    assert next_one.report()
    assert queue.done_of(again) == Done(fence="1" * 16, attempt=1)
    assert [claim.worker for claim in queue.claims()] == ["next"]
    assert {claim.worker for claim in queue.claims(has_voided=True)} == {"late", "next"}


def test_a_file_system_that_fails_voids_no_claim(queue: WorkQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.publish(queued_trial(), PLAN)
    holder = hand(queue, "holder")
    assert holder.take()

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "utime", fail)
        with pytest.raises(StorageError, match="Input/output error"):
            holder.renew()
    assert holder.renew()


def test_a_closed_board_gives_and_takes_nothing(queue: WorkQueue) -> None:
    queue.publish(queued_trial(), PLAN)
    queue.publish(queued_trial(2, fence="2" * 16), PLAN)
    holder = hand(queue, "holder")
    assert holder.take()
    queue.close()
    assert queue.offer() is None
    assert not holder.renew()
    assert not holder.report()
    assert not hand(queue, "other").take()
    assert [one.is_closed for one in queue.queued_trials()] == [True, True]


def test_a_worker_that_is_sent_away_knows(queue: WorkQueue) -> None:
    one = worker_record("w1", pid=7)
    queue.register(one)
    assert queue.workers() == [one]
    assert not queue.is_dismissed(one)
    queue.dismiss("w1")
    assert queue.is_dismissed(one)
    queue.register(one)  # started again
    assert not queue.is_dismissed(one)
    queue.forget("w1")
    assert queue.workers() == []
    assert queue.is_dismissed(one)


def test_broken_files_are_left_out(queue: WorkQueue) -> None:
    queue.publish(queued_trial(), PLAN)
    orders = queue.path / "orders"
    (orders / "000002.json").write_text("{")
    (orders / "000003.json").write_text(json.dumps({"trial": 3, "code": "__import__('os')"}))
    (orders / "000004.json").symlink_to(orders / "000001.json")
    (orders / "../outside.json").write_text("{}")
    (queue.path / "claims" / "000001-1.json").write_text("[]")
    (queue.path / "crew" / "w.json").write_text("{}")
    assert queue.queued_trials() == [queued_trial()]
    assert queue.claims() == []
    assert queue.workers() == []
    assert queue.claim_of(queued_trial()) is None


def test_a_plan_that_is_not_the_queued_trials_is_refused(queue: WorkQueue) -> None:
    queue.publish(
        queued_trial(), replace(PLAN, mapping=replace(PLAN.mapping, slots=PLAN.mapping.slots[::-1]))
    )
    with pytest.raises(ConfigError, match="not the plan of the queued trial"):
        queue.plan(queued_trial())


@pytest.mark.parametrize("name", ["../../evil", "", "a b", "-x", "a" * 300])
def test_a_workers_name_is_fit_for_a_file(queue: WorkQueue, name: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        queue.register(replace(worker_record("w", pid=7), name=name))


def test_names_are_made_of_hosts() -> None:
    assert worker_name("node-a.example", 0) == "node-a.example-0"
    assert worker_name("../we ird/host", 4, 1) == "we-ird-host-4-1"


def test_a_board_that_is_not_there_is_empty(tmp_path: Path) -> None:
    queue = WorkQueue(folder=tmp_path)
    assert not queue.is_there
    assert queue.offer() is None
    assert (queue.queued_trials(), queue.claims(), queue.workers()) == ([], [], [])
    assert end_earlier(queue, keeps_joined=False) == frozenset()


def test_a_disk_that_fails_is_one_line(queue: WorkQueue) -> None:
    (queue.path / "board.json").unlink()
    (queue.path / "board.json").mkdir()
    with pytest.raises(StorageError, match="cannot be read or written") as caught:
        queue.close()
    assert "\n" not in str(caught.value)


def test_what_an_earlier_tuner_handed_out_is_known(queue: WorkQueue) -> None:
    """Workers that joined keep their trials; those of the dead coordinator are removed."""
    for trial in (1, 2, 3, 4, 5):
        queue.publish(queued_trial(trial, fence=f"{trial}" * 16), PLAN)
    far, dead = hand(queue, "far", host=ELSEWHERE), hand(queue, "dead")
    itself = replace(worker_record("alive", pid=1, is_joined=True), identity=current_identity())
    alive = Hand(queue=queue, disk=Disk(), record=itself)
    itself = replace(worker_record("contained", pid=1, is_joined=True), identity=contained_identity())
    contained = Hand(queue=queue, disk=Disk(), record=itself)
    itself = replace(worker_record("other", pid=1, is_joined=True), identity=identity_of_other_boot())
    other = Hand(queue=queue, disk=Disk(), record=itself)
    for one in (far, dead, alive, contained, other):
        queue.register(one.record)
        assert one.take()
    torn = (queue.path / "orders" / ".000006.json.7.ab.tmp", queue.path / "claims" / ".000006-1.ab.draft")
    for path in torn:
        path.write_text("{")
    kept = end_earlier(queue, keeps_joined=True, host=HERE)
    assert not any(path.exists() for path in torn)
    assert kept == {queue.trial_folder(trial) for trial in (1, 3, 4, 5)}
    assert {one.name for one in queue.workers()} == {"far", "alive", "contained", "other"}
    assert end_earlier(queue, keeps_joined=False, host=HERE) == frozenset()
    assert not any(one.renew() for one in (far, dead, alive, contained, other))


@pytest.mark.parametrize("is_joined", [False, True])
def test_workers_of_an_ended_boot_hold_nothing(queue: WorkQueue, is_joined: bool) -> None:
    """Not even until their claims expire for this tuner, which begins to watch them only now."""
    record = worker_record("other", pid=1, is_joined=is_joined)
    other = Hand(queue=queue, disk=Disk(), record=replace(record, identity=identity_of_other_boot()))
    queue.publish(queued_trial(1), PLAN)
    queue.register(other.record)
    assert other.take()
    for file in (*queue.path.glob("claims/*.json"), *queue.path.glob("crew/*.json")):
        os.utime(file, (0, 0))
    assert end_earlier(queue, keeps_joined=True, host=HERE) == frozenset()
    assert queue.workers() == []
    (queued,) = queue.queued_trials()
    assert queue.claim_of(queued) is None


def test_the_status_says_who_measures_what(tmp_path: Path) -> None:
    run = begin(tmp_path / "r")
    made = WorkQueue(folder=run.folder.path)
    made.open(WorkerRequirement(device="cpu", num_devices=2))
    busy = Hand(queue=made, disk=Disk(), record=worker_record("busy", pid=7))
    for one in (busy.record, worker_record("idle", pid=8, host=ELSEWHERE)):
        made.register(one)
    made.publish(queued_trial(11), PLAN)
    assert busy.take()
    with Lease.acquire(run.folder.path):
        history = read_history(run.folder.path)
        lines = [line for line in status_lines(history) if line.startswith("worker")]
        assert lines[0].startswith("worker    busy on here, cores 0-1: trial 11, renewed ")
        assert lines[1].startswith("worker    idle on elsewhere, cores 0-1: waits, renewed ")
        assert [one["trial"] for one in status_record(history)["workers"]] == [11, None]
    assert read_history(run.folder.path).workers == ()  # nobody holds the run: nobody works
