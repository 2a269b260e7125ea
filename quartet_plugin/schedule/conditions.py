"""What a framework's process adds to the order of a program, written as a program.

Whether a program ends is decided by the queues of its transfers (`channels`) and by two conditions: receives
that wait for a description, and code of the framework that synchronizes the device. The runtime excludes two
others, communicators that are made at their first transfer and groups with a bound device
(`runtime/process_groups.py`); tests/schedule/communicators.py has them.
"""

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from enum import StrEnum
from itertools import count

from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.instruction import (
    Compute,
    Instruction,
    Post,
    Program,
    Side,
    Transfer,
    TransferEnd,
    Wait,
)


class Condition(StrEnum):
    """A condition under which a program runs; several may hold at once.

    DESCRIBED: an activation is received when it is needed, and sends are waited for at the end of the step.
    SYNCED: the device waits for everything that was posted before every forward, as Megatron's timers do at
    level 2.
    """

    DESCRIBED = "described"
    SYNCED = "synced"


def under(program: Program, conditions: Collection[Condition]) -> Program:
    """The program as it is executed under `conditions`."""
    for condition, change in _CHANGES:
        if condition in conditions:
            program = change(program)
    return program


def _described(program: Program) -> Program:
    """Post the RECV of an activation at its Wait, behind those before it in its queue; Wait(SEND) last."""
    rows = tuple(tuple(_DescribedRow().write(row)) for row in program.instructions)
    # Buffers are numbered for the program's own waits: here each transfer has one of its own.
    total = sum(map(len, rows))
    return replace(
        program,
        instructions=rows,
        num_send_buffers=(total,) * program.num_devices,
        num_receive_buffers=(total,) * program.num_devices,
    )


class _DescribedRow:
    """Writes one device's instructions with receives at need."""

    def __init__(self) -> None:
        self._number = count()
        self._renumbered: dict[TransferEnd, Transfer] = {}
        self._expected: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        self._received: set[TransferEnd] = set()
        self._written: list[Instruction] = []

    def write(self, row: tuple[Instruction, ...]) -> list[Instruction]:
        last: list[Instruction] = []
        for instruction in row:
            if isinstance(instruction, Post):
                self._post(instruction)
            elif isinstance(instruction, Compute):
                self._written.append(instruction)
            elif instruction.transfer.side is Side.SEND:
                last.append(Wait(transfer=self._renumber(instruction.transfer)))
            else:
                self._receive(self._renumber(instruction.transfer))
        return [*self._written, *last]

    def _renumber(self, transfer: Transfer) -> Transfer:
        """The transfer with a buffer that no other transfer has."""
        if transfer.end not in self._renumbered:
            self._renumbered[transfer.end] = transfer._replace(buffer=next(self._number))
        return self._renumbered[transfer.end]

    def _post(self, instruction: Post) -> None:
        now: list[Transfer] = []
        for transfer in map(self._renumber, instruction.transfers):
            if transfer.side is Side.RECV and transfer.message.is_forward:
                self._expected[transfer.peer, transfer.message.group].append(transfer)
            else:
                now.append(transfer)
        if now:
            self._written.append(Post(transfers=tuple(now)))

    def _receive(self, transfer: Transfer) -> None:
        queue = self._expected[transfer.peer, transfer.message.group]
        while transfer in queue:
            first = queue.pop(0)
            self._written += [Post(transfers=(first,)), Wait(transfer=first)]
            self._received.add(first.end)
        if transfer.end not in self._received:
            self._written.append(Wait(transfer=transfer))


def _synced(program: Program) -> Program:
    """In front of every F, wait for all that was posted; the program's own later waits have no effect."""
    return replace(program, instructions=tuple(tuple(_synced_row(row)) for row in program.instructions))


def _synced_row(row: tuple[Instruction, ...]) -> list[Instruction]:
    written: list[Instruction] = []
    pending: dict[TransferEnd, Transfer] = {}
    for instruction in row:
        if isinstance(instruction, Post):
            pending |= {transfer.end: transfer for transfer in instruction.transfers}
        elif isinstance(instruction, Wait):
            if pending.pop(instruction.transfer.end, None) is None:
                continue
        elif instruction.action.kind is ActionKind.F:
            written += [Wait(transfer=transfer) for transfer in pending.values()]
            pending.clear()
        written.append(instruction)
    return written


_CHANGES: tuple[tuple[Condition, Callable[[Program], Program]], ...] = (
    (Condition.DESCRIBED, _described),
    (Condition.SYNCED, _synced),
)
