"""Runs a lowered program under a communication library's own rules, to see that it cannot deadlock.

NCCL: no tags, no buffering. Posted transfers stand in queues, first in, first out, sends and receives
together; a queue belongs to a device, a peer and a group. Only the batch at the head of a queue is under
way; in it, the first unfinished send meets the first unfinished receive of the peer's batch. Whether it is
the same message NCCL does not check; this simulation does. gloo: a transfer is over when both ends have
posted the same message; a wait blocks. What a framework's process adds stands in `conditions`.

The outcome does not depend on timing: transfers and actions only ever enable more, so running whatever can
run, in any order, ends in the same place.
"""

from collections import defaultdict, deque
from collections.abc import Collection
from enum import StrEnum
from itertools import pairwise

from quartet_plugin.errors import PlanError
from quartet_plugin.schedule.action import Action, ActionKind
from quartet_plugin.schedule.conditions import Condition, under
from quartet_plugin.schedule.instruction import (
    Compute,
    Instruction,
    Post,
    Program,
    Side,
    TensorKey,
    Transfer,
    TransferEnd,
    consumes,
)

_MAX_INSTRUCTIONS = 500_000

_QueueKey = tuple[int, int, int]  # device, peer, group


class Backend(StrEnum):
    """Whose rules apply."""

    NCCL = "nccl"
    GLOO = "gloo"


def check_program(program: Program, *, backend: Backend, conditions: Collection[Condition] = ()) -> None:
    """Run `program` to its end, as it is executed under `conditions`.

    Raises PlanError, naming where every blocked device stands, when it deadlocks; when a receive gets
    another message than it was posted for; when an action runs before what it needs has arrived, a send
    before its producer, a buffer is used while another message holds it, or a transfer is never waited for.
    """
    _ChannelState(under(program, conditions), backend).finish()


def check_for_every_backend(program: Program, *, conditions: Collection[Condition] = ()) -> None:
    """`check_program` under the rules of each library. Programs of many instructions are left out.

    Lowering cannot deadlock by its construction: this is a second look, which takes about half a minute a
    million instructions.
    """
    if sum(map(len, program.instructions)) <= _MAX_INSTRUCTIONS:
        for backend in Backend:
            check_program(program, backend=backend, conditions=conditions)


class _ChannelState:
    """The state of a run: each device's position, the transfers that are posted and those that are over."""

    def __init__(self, program: Program, backend: Backend) -> None:
        self._program = program
        self._position = [0] * program.num_devices
        self._wire: _Wire
        self._wire = _Gloo() if backend is Backend.GLOO else _Nccl()
        self._buffers = _BufferChecker(program)

    def finish(self) -> None:
        """Advance every device as far as it goes until none can go on."""
        moved = True
        while moved:
            moved = False
            for device, row in enumerate(self._program.instructions):
                while self._position[device] < len(row) and self._step(device, row[self._position[device]]):
                    self._position[device] += 1
                    moved = True
        stuck = [
            f"device {d} at {row[position]}"
            for d, (row, position) in enumerate(zip(self._program.instructions, self._position, strict=True))
            if position < len(row)
        ]
        if stuck:
            raise PlanError(f"deadlock between transfers: {'; '.join(stuck[:8])}; lower the schedule again")
        self._buffers.close()

    def _step(self, device: int, instruction: Instruction) -> bool:
        if isinstance(instruction, Compute):
            self._buffers.compute(device, instruction.parts)
        elif isinstance(instruction, Post):
            for transfer in instruction.transfers:
                self._buffers.post(device, transfer)
            self._wire.post(device, instruction.transfers)
        else:
            if not self._wire.is_over(device, instruction.transfer):
                return False
            self._buffers.wait(device, instruction.transfer)
        return True


class _Gloo:
    """Tags matched, no order between messages."""

    def __init__(self) -> None:
        self._posted: set[TransferEnd] = set()

    def post(self, _device: int, transfers: tuple[Transfer, ...]) -> None:
        self._posted.update(t.end for t in transfers)

    def is_over(self, _device: int, transfer: Transfer) -> bool:
        return all((side, transfer.message) in self._posted for side in Side)


class _Batch:
    """Transfers of one queue that were posted together."""

    def __init__(self, transfers: list[Transfer]) -> None:
        self.left = list(transfers)

    def first(self, side: Side) -> Transfer | None:
        return next((t for t in self.left if t.side is side), None)


class _Nccl:
    """No tags: queues of batches."""

    def __init__(self) -> None:
        self._queues: dict[_QueueKey, deque[_Batch]] = defaultdict(deque)
        self._over: set[TransferEnd] = set()

    def post(self, device: int, transfers: tuple[Transfer, ...]) -> None:
        batches: dict[_QueueKey, list[Transfer]] = defaultdict(list)
        for transfer in transfers:
            batches[device, transfer.peer, transfer.message.group].append(transfer)
        for key, part in batches.items():
            self._queues[key].append(_Batch(part))
        for _, peer, group in batches:
            # What runs in one direction may bring transfers of the other one to the head.
            while self._match(device, peer, group) or self._match(peer, device, group):
                pass

    def is_over(self, _device: int, transfer: Transfer) -> bool:
        return transfer.end in self._over

    def _match(self, source: int, target: int, group: int) -> bool:
        """Run the first transfer from `source` to `target`, if both ends are at the heads of their queues.

        Returns whether it ran. Raises PlanError where the two ends are of different messages.
        """
        sending, receiving = self._queues[source, target, group], self._queues[target, source, group]
        if not (sending and receiving):
            return False
        send, receive = sending[0].first(Side.SEND), receiving[0].first(Side.RECV)
        if send is None or receive is None:
            return False
        if send.message != receive.message:
            raise PlanError(
                f"device {target} posted {receive} but device {source} sends {send} first; "
                "post both ends in the same order"
            )
        for queue, transfer in ((sending, send), (receiving, receive)):
            self._over.add(transfer.end)
            queue[0].left.remove(transfer)
            if not queue[0].left:
                queue.popleft()
        return True


_Wire = _Gloo | _Nccl


class _BufferChecker:
    """Checks that the program moves the right data at the right time, whatever the library."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._done: set[tuple[int, bool, int]] = set()
        self._arrived: set[TensorKey] = set()
        self._posted: set[TransferEnd] = set()
        self._buffer_of: dict[tuple[int, Side, TensorKey], int] = {}
        self._taken: set[tuple[int, Side, int]] = set()
        self._num_buffers = {Side.SEND: program.num_send_buffers, Side.RECV: program.num_receive_buffers}

    def compute(self, device: int, parts: tuple[Action, ...]) -> None:
        """Both parts of a pair need what they need before either is done."""
        for action in parts:
            self._check_ready(device, action)
        for action in parts:
            source = consumes(action, len(self._program.placement))
            if action.kind != ActionKind.W:
                self._done.add((action.stage, action.kind == ActionKind.F, action.microbatch))
            if source is not None and self._program.placement[source] != device:
                self._release(device, Side.RECV, (source, action.stage, action.microbatch))

    def _check_ready(self, device: int, action: Action) -> None:
        program, forward = self._program, action.kind == ActionKind.F
        source = consumes(action, len(program.placement))
        ready = forward or (action.stage, action.kind != ActionKind.W, action.microbatch) in self._done
        if source is not None and program.placement[source] == device:
            ready &= (source, forward, action.microbatch) in self._done
        elif source is not None:
            ready &= (source, action.stage, action.microbatch) in self._arrived
        if not ready or program.placement[action.stage] != device:
            raise PlanError(
                f"{action} on device {device}: runs before what it needs; lower the schedule again"
            )

    def post(self, device: int, transfer: Transfer) -> None:
        message = transfer.message
        end = (transfer.side, message)
        owner = message.source_device if transfer.side is Side.SEND else message.target_device
        made = (message.source_stage, message.is_forward, message.microbatch) in self._done
        if end in self._posted or owner != device or (transfer.side is Side.SEND and not made):
            raise PlanError(f"{transfer} on device {device}: posted twice, elsewhere or before it was made")
        self._posted.add(end)
        slot = (device, transfer.side, transfer.buffer)
        if slot in self._taken or transfer.buffer >= self._num_buffers[transfer.side][device]:
            raise PlanError(f"{transfer} on device {device}: buffer {transfer.buffer} is not free")
        self._taken.add(slot)
        self._buffer_of[device, transfer.side, message.tensor] = transfer.buffer

    def wait(self, device: int, transfer: Transfer) -> None:
        tensor = transfer.message.tensor
        if transfer.side is Side.RECV:
            self._arrived.add(tensor)
        else:
            self._release(device, Side.SEND, tensor)

    def _release(self, device: int, side: Side, tensor: TensorKey) -> None:
        buffer = self._buffer_of.pop((device, side, tensor), None)
        if buffer is None:
            raise PlanError(f"message {tensor} on device {device}: no {side} buffer holds it")
        self._taken.remove((device, side, buffer))

    def close(self) -> None:
        """Every cross-device boundary was sent once and nothing is left."""
        program = self._program
        expected = 2 * program.num_microbatches * sum(a != b for a, b in pairwise(program.placement))
        if self._taken or len(self._arrived) != expected:
            raise PlanError(
                f"{len(self._arrived)} messages arrived of {expected}, "
                f"{len(self._taken)} buffers still held; lower the schedule again"
            )
