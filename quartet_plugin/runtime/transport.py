"""Boundary tensors between processes: directly, or through host memory where the devices cannot meet.

Tags are not used: NCCL ignores them, so nothing may depend on them. A tensor that is being sent is held until
its transfer is over: freeing an activation's storage while gloo still reads it corrupts the run without an
error. On NCCL only its memory needs that: waiting for a send, as the program says, would let the device wait
until the peer has posted its receive. There a send is dropped once it is over and waited for at the end. gloo
tells that a send is over to its waiter alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from quartet_plugin.runtime.process_groups import Channels
from quartet_plugin.schedule.instruction import Side, Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Shape, type and device of every tensor that crosses a stage boundary in a run of the schedule."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class LeavingSends:
    """Sends that the program need not wait for, each with the tensors that it reads."""

    def __init__(self) -> None:
        self._sends: list[tuple[Sequence[Any], Sequence[torch.Tensor]]] = []

    def add(self, works: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        """Hold the tensors until all works are over."""
        self._sends.append((works, tensors))

    def drop(self) -> None:
        """Let go of the tensors that have left."""
        self._sends = [send for send in self._sends if not all(work.is_completed() for work in send[0])]

    def finish(self) -> None:
        """Wait for all, and let go of them."""
        for works, _ in self._sends:
            for work in works:
                work.wait()
        self._sends.clear()

    def clear(self) -> None:
        """Forget all, after a step that was broken off."""
        self._sends.clear()


class PairTransport:
    """`isend` and `irecv`, each pair of devices on its own; for gloo and NCCL."""

    def __init__(self, channels: Channels, boundary: Boundary) -> None:
        self._channels = channels
        self._boundary = boundary
        self._pending: dict[Transfer, tuple[Any, torch.Tensor]] = {}
        self._leaving = LeavingSends()

    def post(self, transfers: Sequence[tuple[Transfer, torch.Tensor | None]]) -> None:
        """Start every transfer."""
        self._leaving.drop()
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
        if transfer.side is Side.SEND and self._channels.is_nccl:
            self._leaving.add([work], [held])
            return None
        work.wait()
        return held if transfer.side is Side.RECV else None

    def end(self) -> None:
        """Wait for the sends that are still under way."""
        self._leaving.finish()

    def abort(self) -> None:
        """Forget the pending transfers."""
        self._pending.clear()
        self._leaving.clear()

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
