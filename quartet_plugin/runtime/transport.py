"""Boundary tensors between processes: directly, or through host memory where the devices cannot meet.

One process group a stream of the program (`Program.groups`), because a communicator has one queue a pair and
forward and backward messages must not stand in each other's way. Tags are not used: NCCL ignores them, so
nothing may depend on them. A tensor that is being sent is held until its transfer is over: freeing an
activation's storage while gloo still reads it corrupts the run without an error.
"""

import atexit
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from quartet_plugin.schedule.instruction import Side, Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Shape, type and device of every tensor that crosses a stage boundary in a run of the schedule."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """The process groups of a program's streams; `ranks[d]` is the global rank of device d."""

    groups: tuple[Any, ...]
    ranks: tuple[int, ...]

    @classmethod
    def open(
        cls,
        names: Sequence[str],
        *,
        ranks: Sequence[int],
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> "Channels":
        """Make one group for each of `Program.groups`; every process of the job calls this, once.

        `ranks` are this process's pipeline. All pipelines of the job are gathered first, because a group is
        made by everybody together.
        """
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, tuple(ranks))
        pipeline_groups: tuple[Any, ...] = ()
        for pipeline in sorted(set(everybody)):
            groups = tuple(dist.new_group(list(pipeline), timeout=timeout, backend=backend) for _ in names)
            pipeline_groups = groups if pipeline == tuple(ranks) else pipeline_groups
        atexit.register(_release, pipeline_groups)
        return cls(groups=pipeline_groups, ranks=tuple(ranks))

    def address(self, transfer: Transfer) -> tuple[int, Any]:
        """The global rank of the device at the other end, and the process group of the message."""
        return self.ranks[transfer.peer], self.groups[transfer.message.group]


def _release(groups: Sequence[Any]) -> None:
    """End gloo's threads before the interpreter takes their objects apart, which can abort the process."""
    for group in groups:
        with suppress(RuntimeError, ValueError, AssertionError):
            if dist.is_initialized() and dist.get_backend(group) == "gloo":
                dist.destroy_process_group(group)


class PairTransport:
    """`isend` and `irecv`, each pair of devices on its own (`QueueScope.PAIR`); for gloo and NCCL."""

    def __init__(self, channels: Channels, boundary: Boundary) -> None:
        self._channels = channels
        self._boundary = boundary
        self._pending: dict[Transfer, tuple[Any, torch.Tensor]] = {}

    def post(self, transfers: Sequence[tuple[Transfer, torch.Tensor | None]]) -> None:
        """Start every transfer."""
        for transfer, tensor in transfers:
            peer, group = self._channels.address(transfer)
            if transfer.side is Side.SEND:
                # Another view: the owner may free its tensor, which would free a shared storage.
                held = self._checked(tensor, transfer)
                work = dist.isend(held, peer, group=group)
            else:
                # Not from a pool: autograd keeps a received activation until its backward has run.
                held = torch.empty(
                    self._boundary.shape, dtype=self._boundary.dtype, device=self._boundary.device
                )
                work = dist.irecv(held, peer, group=group)
            self._pending[transfer] = (work, held)

    def wait(self, transfer: Transfer) -> torch.Tensor | None:
        """Block until the transfer is over; returns the tensor of a RECV."""
        work, held = self._pending.pop(transfer)
        work.wait()
        return held if transfer.side is Side.RECV else None

    def abort(self) -> None:
        """Forget the pending transfers."""
        self._pending.clear()

    def _checked(self, tensor: torch.Tensor | None, transfer: Transfer) -> torch.Tensor:
        if tensor is None or tuple(tensor.shape) != self._boundary.shape:
            shape = None if tensor is None else tuple(tensor.shape)
            raise ValueError(f"{transfer}: the stage made {shape}, the boundary is {self._boundary.shape}")
        if tensor.dtype != self._boundary.dtype:
            raise ValueError(
                f"{transfer}: the stage made {tensor.dtype}, the boundary is {self._boundary.dtype}"
            )
        return tensor.detach().contiguous()


@dataclass(slots=True)
class _HostBuffer:
    """A numbered buffer in host memory, and the event after which the device has read or written it."""

    tensor: torch.Tensor
    event: Any = None


class HostTransport(PairTransport):
    """`isend` and `irecv` through pinned host memory and gloo groups: several processes may share one GPU.

    Host buffers are numbered as the program's, so there are never more than it needs. An object keeps them
    from run to run.
    """

    def __init__(self, channels: Channels, boundary: Boundary) -> None:
        super().__init__(channels, boundary)
        self._buffers: dict[tuple[Side, int], _HostBuffer] = {}
        self._on_cuda = boundary.device.type == "cuda"

    def post(self, transfers: Sequence[tuple[Transfer, torch.Tensor | None]]) -> None:
        """Copy the tensors to send to the host, then start the transfers."""
        for transfer, tensor in transfers:
            peer, group = self._channels.address(transfer)
            buffer = self._buffer(transfer)
            if transfer.side is Side.SEND:
                # Blocks until the tensor is there: gloo reads the memory at once.
                buffer.tensor.copy_(self._checked(tensor, transfer))
                work = dist.isend(buffer.tensor, peer, group=group)
            else:
                if buffer.event is not None:
                    buffer.event.synchronize()
                    buffer.event = None
                work = dist.irecv(buffer.tensor, peer, group=group)
            self._pending[transfer] = (work, buffer.tensor)

    def wait(self, transfer: Transfer) -> torch.Tensor | None:
        """Block until the transfer is over; copies a received tensor to the device in the current stream."""
        work, host = self._pending.pop(transfer)
        work.wait()
        if transfer.side is Side.SEND:
            return None
        tensor = torch.empty(self._boundary.shape, dtype=self._boundary.dtype, device=self._boundary.device)
        tensor.copy_(host, non_blocking=True)
        if self._on_cuda:
            buffer = self._buffer(transfer)
            buffer.event = torch.cuda.Event()
            buffer.event.record()
        return tensor

    def _buffer(self, transfer: Transfer) -> _HostBuffer:
        key = (transfer.side, transfer.buffer)
        if key not in self._buffers:
            host = torch.empty(self._boundary.shape, dtype=self._boundary.dtype, pin_memory=self._on_cuda)
            self._buffers[key] = _HostBuffer(tensor=host)
        return self._buffers[key]
