"""What a dispatcher knows of its workers: their processes where it sees them, else their renewals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.launchers.command import parse_command
from quartet_plugin.protocol.environment import EXPIRY_S
from quartet_plugin.protocol.process_identity import Identity
from quartet_plugin.protocol.work_queue_files import WorkerRequirement
from quartet_plugin.trial.request import TrialRequest
from quartet_plugin.tuner.context import EventLog
from quartet_plugin.tuner.workers.dispatcher import Dispatcher
from quartet_plugin.tuner.workers.work_queue import WorkQueue
from tests.model.plans import PLAN
from tests.tuner.fakes import COMMAND
from tests.tuner.workers.hands import (
    HERE,
    Disk,
    Hand,
    contained_identity,
    identity_of_other_boot,
    worker_record,
)


@pytest.mark.parametrize("hidden", [contained_identity, identity_of_other_boot])
def test_a_worker_in_another_container_or_boot_is_lost_by_its_renewals_alone(
    tmp_path: Path, hidden: Callable[[], Identity]
) -> None:
    """It has the host name of the dispatcher, and no process with its pid is to be seen."""
    queue, disk, now_s = WorkQueue(folder=tmp_path), Disk(), [0.0]
    queue.open(WorkerRequirement(device="cpu", num_devices=2))
    dispatcher = Dispatcher(
        queue=queue,
        backend=disk,  # type: ignore[arg-type]
        read=disk.read,
        fence=lambda: None,
        say=lambda text: None,
        events=EventLog(tmp_path / "events.jsonl"),
        clock=lambda: now_s[0],
        host=HERE,
    )
    worker = replace(worker_record("w0", pid=1), identity=hidden())
    queue.register(worker)
    command = parse_command(COMMAND, environment={})
    request = TrialRequest(folder=queue.trial_folder(1), command=command, plan=PLAN)
    dispatcher.publish(1, request, host=None)
    assert Hand(queue=queue, disk=disk, record=worker).take()

    def generation() -> int:
        queued = queue.queued_trial(1)
        assert queued is not None
        return queued.generation

    assert dispatcher.collect() == []
    assert ([known.name for known in dispatcher.workers()], generation()) == (["w0"], 1)
    now_s[0] = EXPIRY_S + 1.0
    assert dispatcher.collect() == []
    assert (dispatcher.workers(), generation()) == ([], 2)
