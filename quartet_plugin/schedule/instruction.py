"""The instructions of a device, one after the other: compute, post transfers, wait for a transfer.

A runtime executes a device's list from top to bottom. `Compute` runs an action. `Post` starts transfers
together, as one batch, and does not block. `Wait` blocks until a transfer is over: after waiting for a
receive its buffer holds the tensor, after waiting for a send its buffer may be written again. A receive's
buffer belongs to the tensor from its Post to the end of the action that reads it, a send's from the action
that writes it to its Wait.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from quartet_plugin.schedule.action import Action, ActionKind, OverlappedPair

TensorKey = tuple[int, int, int]  # from stage, to stage, microbatch


class Side(StrEnum):
    """Which end of a message a device is."""

    SEND = "SEND"
    RECV = "RECV"


class Message(NamedTuple):
    """One boundary tensor of one microbatch on its way between two devices.

    Forward it is stage `source_stage`'s output, backward the gradient of stage `target_stage`'s output. A
    tuple, because programs have hundreds of thousands that are looked up again and again.
    """

    source_stage: int
    target_stage: int
    microbatch: int
    source_device: int
    target_device: int
    group: int

    @property
    def is_forward(self) -> bool:
        """Whether an activation, not a gradient."""
        return self.target_stage > self.source_stage

    @property
    def tensor(self) -> TensorKey:
        """The stages that it comes from and goes to, and its microbatch."""
        return (self.source_stage, self.target_stage, self.microbatch)

    def text(self, side: Side, prefix: str = "") -> str:
        """As PyTorch's pipelining writes it: `2SEND_F0`, `3RECV_F0`, `3SEND_B0`, `2RECV_B0`."""
        stage = self.source_stage if side is Side.SEND else self.target_stage
        return f"{stage}{prefix}{side}_{'F' if self.is_forward else 'B'}{self.microbatch}"


TransferEnd = tuple[Side, Message]


class Transfer(NamedTuple):
    """One end of a message, and the number of the send or receive buffer it uses on its device."""

    side: Side
    message: Message
    buffer: int

    @property
    def end(self) -> TransferEnd:
        """The message and this side of it."""
        return (self.side, self.message)

    @property
    def peer(self) -> int:
        """The device at the other end."""
        message = self.message
        return message.target_device if self.side is Side.SEND else message.source_device

    def __str__(self) -> str:
        return self.message.text(self.side)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Run an action, or a forward and the backward `beside` it as an overlapped pair."""

    action: Action
    beside: Action | None = None

    @property
    def parts(self) -> tuple[Action, ...]:
        """The action alone, or both of the pair."""
        return (self.action,) if self.beside is None else (self.action, self.beside)

    def __str__(self) -> str:
        return str(self.action if self.beside is None else OverlappedPair(self.action, self.beside))


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Start transfers together, without blocking; those of one group are one batch, in this order."""

    transfers: tuple[Transfer, ...]

    def __str__(self) -> str:
        return f"[{' '.join(map(str, self.transfers))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Block until a posted transfer is over."""

    transfer: Transfer

    def __str__(self) -> str:
        return self.transfer.message.text(self.transfer.side, "WAIT_")


Instruction = Compute | Post | Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Every device's instructions.

    `groups` names the process groups, numbered as `Message.group`; each holds all devices. `num_send_buffers`
    and `num_receive_buffers` are [num_devices]; every buffer holds one boundary tensor.
    """

    num_devices: int
    num_microbatches: int
    placement: tuple[int, ...]
    groups: tuple[str, ...]
    instructions: tuple[tuple[Instruction, ...], ...]
    num_send_buffers: tuple[int, ...]
    num_receive_buffers: tuple[int, ...]

    @property
    def digest(self) -> str:
        """The sha256 of all devices' instructions, in hexadecimal digits; buffers do not count."""
        sha = hashlib.sha256(repr((self.placement, self.groups)).encode())
        for row in self.instructions:
            sha.update(" ".join(map(str, row)).encode() + b"\n")
        return sha.hexdigest()


def produces(action: Action, num_stages: int) -> int | None:
    """The stage an action's result goes to, or None."""
    if action.kind == ActionKind.F:
        return action.stage + 1 if action.stage + 1 < num_stages else None
    return action.stage - 1 if action.kind != ActionKind.W and action.stage > 0 else None


def consumes(action: Action, num_stages: int) -> int | None:
    """The other stage whose result an action needs, or None."""
    if action.kind == ActionKind.F:
        return action.stage - 1 if action.stage > 0 else None
    return action.stage + 1 if action.kind != ActionKind.W and action.stage + 1 < num_stages else None
