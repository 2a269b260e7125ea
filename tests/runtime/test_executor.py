"""The executor on threads: the right results in the schedule's order, nothing left, errors named."""

import queue
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from quartet_plugin.errors import InfrastructureError
from quartet_plugin.runtime.executor import Executor
from quartet_plugin.runtime.programs import ProgramCache, make_schedule
from quartet_plugin.runtime.records import NullRecorder, Recorder
from quartet_plugin.schedule.instruction import Program, Side, Transfer
from quartet_plugin.schedule.placement import stages_of_device
from tests.runtime.pipelines import SCHEDULES, TorchStages, reference_grads, sample, spec_of


class Wire:
    """Untagged first-in-first-out queues of one stream and direction each, as a communicator has them.

    A receiver ends at once where a device has failed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._queues: dict[tuple[int, int, int], queue.Queue[Any]] = {}

    def queue_of(self, key: tuple[int, int, int]) -> "queue.Queue[Any]":
        """The queue of a group, from one device to another: one object for both threads."""
        with self._lock:
            if key not in self._queues:
                self._queues[key] = queue.Queue()
                if self._is_closed:
                    self._queues[key].put(None)
            return self._queues[key]

    def close(self) -> None:
        """Nothing more is sent."""
        with self._lock:
            self._is_closed = True
            for one in self._queues.values():
                one.put(None)


class ThreadTransport:
    """One device's end of a wire."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._posted: dict[Any, deque[Transfer]] = defaultdict(deque)
        self._arrived: dict[Transfer, Any] = {}
        self.pending: set[Transfer] = set()
        self.num_ends = 0

    def post(self, transfers: Sequence[tuple[Transfer, Any]]) -> None:
        """Sends go out at once; receives are matched when they are waited for."""
        for transfer, tensor in transfers:
            message = transfer.message
            key = (message.group, message.source_device, message.target_device)
            self.pending.add(transfer)
            if transfer.side is Side.SEND:
                assert tensor is not None
                self._wire.queue_of(key).put((message, tensor.detach().clone()))
            else:
                self._posted[key].append(transfer)

    def wait(self, transfer: Transfer) -> Any:
        """What came in the order of the posts, which must be the message that was posted for."""
        self.pending.remove(transfer)
        message = transfer.message
        if transfer.side is Side.SEND:
            return None
        key = (message.group, message.source_device, message.target_device)
        while transfer not in self._arrived:
            first = self._posted[key].popleft()
            arrived = self._wire.queue_of(key).get(timeout=60)
            if arrived is None:
                raise ConnectionError("another device has failed")
            got, tensor = arrived
            assert got == first.message
            self._arrived[first] = tensor
        return self._arrived.pop(transfer)

    def end(self) -> None:
        """A send is over at once."""
        self.num_ends += 1

    def abort(self) -> None:
        """Nothing."""


def run_threads(program: Program, computes: Sequence[Any], *, runs: int = 1) -> list[Recorder]:
    """Run every device in a thread of its own, `runs` times."""
    wire, failures = Wire(), queue.Queue[BaseException]()
    recorders = [Recorder() for _ in computes]

    def device(index: int) -> None:
        transport = ThreadTransport(wire)
        executor = Executor(program, device=index)
        try:
            for run in range(runs):
                executor.run(computes[index], transport, recorders[index])
                assert not transport.pending
                assert transport.num_ends == run + 1
        except BaseException as error:
            failures.put(error)
            wire.close()

    threads = [threading.Thread(target=device, args=(index,)) for index in range(len(computes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    if not failures.empty():
        raise failures.get()
    return recorders


def computes_of(program: Program) -> list[TorchStages]:
    return [
        TorchStages(num_stages=len(program.placement), stages=stages)
        for stages in stages_of_device(program.placement, program.num_devices)
    ]


@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_one_piece(name: str, num_devices: int, num_microbatches: int) -> None:
    program = ProgramCache(spec_of(name, num_devices)).program(num_microbatches)
    computes = computes_of(program)
    recorders = run_threads(program, computes, runs=2)

    expected = reference_grads(len(program.placement), num_microbatches)
    for compute in computes:
        assert compute.is_idle
        for stage, parameter in compute.weights.items():
            torch.testing.assert_close(parameter.grad, 2 * expected[stage], rtol=1e-12, atol=1e-12)
    for device, compute in enumerate(computes):
        actions = Executor(program, device=device).actions
        assert compute.calls == [(a.kind.name, a.stage, a.microbatch) for a in actions] * 2
        assert len(recorders[device].times()) == len(actions)


def test_forwards_alone_for_an_evaluation() -> None:
    programs = ProgramCache(spec_of("zb-v", 3))
    program = programs.program(5, forward_only=True)
    computes = computes_of(program)
    run_threads(program, computes)

    assert {call[0] for compute in computes for call in compute.calls} == {"F"}
    assert sum(len(compute.calls) for compute in computes) == 5 * len(program.placement)
    assert programs.program(5).groups == program.groups
    assert programs.program(5, forward_only=True) is program


def test_stages_that_may_not_split_run_whole_backwards() -> None:
    made = make_schedule(spec_of("zb-v", 2, full_backward_stages=frozenset({1, 3})), 4)
    kinds = {
        stage: {a.kind.name for d in range(2) for a in made.actions(d) if a.stage == stage}
        for stage in range(4)
    }
    assert kinds == {0: {"F", "I", "W"}, 1: {"F", "B"}, 2: {"F", "I", "W"}, 3: {"F", "B"}}
    program = ProgramCache(spec_of("zb-v", 2, full_backward_stages=frozenset({1, 3}))).program(4)
    computes = computes_of(program)
    run_threads(program, computes)
    expected = reference_grads(4, 4)
    for compute in computes:
        for stage, parameter in compute.weights.items():
            torch.testing.assert_close(parameter.grad, expected[stage], rtol=1e-12, atol=1e-12)


class Failing(TorchStages):
    """Fails in one action."""

    def input_grad(self, stage: int, microbatch: int, received: Any) -> Any:
        if (stage, microbatch) == (0, 1):
            raise MemoryError("no more")
        return super().input_grad(stage, microbatch, received)


def test_an_error_names_the_action_and_keeps_its_type() -> None:
    program = ProgramCache(spec_of("zb-h1", 2)).program(3)
    computes = [Failing(num_stages=2, stages=[0]), TorchStages(num_stages=2, stages=[1])]
    with pytest.raises(MemoryError) as caught:
        run_threads(program, computes)
    assert any("device 0 was at 0I1" in note for note in caught.value.__notes__)


class Broken:
    """A transport whose peer has gone."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self.aborted = False
        self.error = error or RuntimeError("Connection closed by peer [127.0.0.1]:1\n more")

    def post(self, transfers: Any) -> None:
        """Accepts everything."""

    def wait(self, transfer: Transfer) -> Any:
        """Fails, unless told otherwise as gloo does."""
        raise self.error

    def end(self) -> None:
        """Is not reached."""

    def abort(self) -> None:
        """Remembers it."""
        self.aborted = True


def test_a_dead_peer_is_named_with_the_message() -> None:
    program = ProgramCache(spec_of("1f1b", 2)).program(2)
    transport = Broken()
    executor = Executor(program, device=1)
    with pytest.raises(InfrastructureError, match=r"device 1: 1RECV_F0 with device 0 failed: Connection"):
        executor.run(TorchStages(num_stages=2, stages=[1]), transport, NullRecorder())
    assert transport.aborted


class BrokenAtTheEnd(Broken):
    """A transport that fails with the last sends of a step."""

    def wait(self, transfer: Transfer) -> Any:
        """Receives what a stage takes."""
        return torch.ones_like(sample(0)) if transfer.side is Side.RECV else None

    def end(self) -> None:
        """Fails."""
        raise self.error


DEVICE_FAILURES = [
    torch.OutOfMemoryError("Allocation on device"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("HIP error: unspecified launch failure"),
]


@pytest.mark.parametrize("transport_class", [Broken, BrokenAtTheEnd])
@pytest.mark.parametrize("error", DEVICE_FAILURES, ids=str)
def test_a_failed_device_is_no_lost_peer(error: RuntimeError, transport_class: type[Broken]) -> None:
    program = ProgramCache(spec_of("1f1b", 2)).program(2)
    transport = transport_class(error)
    executor = Executor(program, device=1)
    with pytest.raises(RuntimeError) as caught:
        executor.run(TorchStages(num_stages=2, stages=[1]), transport, NullRecorder())
    assert caught.value is error
    assert transport.aborted


def test_sends_that_fail_at_the_end_mean_a_lost_peer() -> None:
    program = ProgramCache(spec_of("1f1b", 2)).program(2)
    executor = Executor(program, device=1)
    with pytest.raises(InfrastructureError, match="device 1: the last sends of a step failed: Connection"):
        executor.run(TorchStages(num_stages=2, stages=[1]), BrokenAtTheEnd(), NullRecorder())
