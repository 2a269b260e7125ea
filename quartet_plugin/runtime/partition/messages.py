"""Blocks between the devices of a partition: point-to-point messages that run beside a product."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

# A device of the partition and the tensor that goes there or comes from it.
Endpoint = tuple[int, torch.Tensor]


@dataclass(slots=True)
class RunningMessages:
    """The messages of one step, under way; sent tensors are held until their transfer is over."""

    sends: Sequence[Any] = ()
    receives: Sequence[Any] = ()
    held: Sequence[torch.Tensor] = field(default_factory=tuple)

    def wait_received(self) -> None:
        """Wait until all received tensors are there."""
        for work in self.receives:
            work.wait()
        self.receives = ()

    def finish(self) -> None:
        """Wait for the sends too, and let go of their tensors."""
        self.wait_received()
        for work in self.sends:
            work.wait()
        self.sends, self.held = (), ()


@dataclass(slots=True)
class BlockMessages:
    """Messages among the devices of a partition; `ranks[d]` is the global rank of device d in `group`.

    `num_sent` and `bytes_sent` count what this device has sent, by a key of the caller's.
    """

    group: Any
    ranks: Sequence[int]
    num_sent: Counter[Any] = field(default_factory=Counter)
    bytes_sent: Counter[Any] = field(default_factory=Counter)

    def start(self, sends: Sequence[tuple[Any, Endpoint]], receives: Sequence[Endpoint]) -> RunningMessages:
        """Post all messages of one step at once: in one order on both sides, so that none waits for another.

        Each send comes with the key that it is counted by. Receives come first: gloo tells the sender of
        each, and on a connection that a block leaves by, that message would wait until the block has left.
        """
        if not sends and not receives:
            return RunningMessages()
        operations = [
            dist.P2POp(dist.irecv, tensor, self.ranks[device], self.group) for device, tensor in receives
        ]
        for key, (device, tensor) in sends:
            self.num_sent[key] += 1
            self.bytes_sent[key] += tensor.numel() * tensor.element_size()
            operations.append(dist.P2POp(dist.isend, tensor, self.ranks[device], self.group))
        works = dist.batch_isend_irecv(operations)
        held = [tensor for _, (_, tensor) in sends]
        if len(works) != len(operations):
            # NCCL gives a single work for all of them.
            return RunningMessages(sends=works, receives=works, held=held)
        return RunningMessages(sends=works[len(receives) :], receives=works[: len(receives)], held=held)
