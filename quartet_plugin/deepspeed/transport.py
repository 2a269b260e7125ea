"""Boundary values between DeepSpeed's stages: a tensor or a tuple of them, of any shape and type.

A pair of `isend` and `irecv` for every tensor, so that neither side blocks and no order of the two can hang.
The shapes that a stage receives are not known before its neighbour has run once: during the first step after
a start or a change of shape a description of every forward value goes ahead of it, from host to host over
gloo, so that no device waits for it, and the value is received when it is needed; from then on receives are
posted ahead. Gradients need no description: they have the shapes of the sent values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist

from quartet_plugin.runtime.process_groups import Channels
from quartet_plugin.runtime.transport import LeavingSends
from quartet_plugin.schedule.instruction import Message, Side, Transfer

type Value = torch.Tensor | tuple[torch.Tensor, ...]

_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)
_META_WORDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSpec:
    """The shape and type of each tensor of a value, and whether the value is a tuple."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    is_tuple: bool

    @classmethod
    def of(cls, value: Value) -> "ValueSpec":
        """Shapes and types of the tensors of `value`, and whether they come as a tuple."""
        shapes = tuple(tuple(tensor.shape) for tensor in parts(value))
        dtypes = tuple(tensor.dtype for tensor in parts(value))
        return cls(shapes=shapes, dtypes=dtypes, is_tuple=isinstance(value, tuple))

    @property
    def gradients(self) -> "ValueSpec":
        """The spec of the gradients that come back: one for every floating-point tensor."""
        kept = [dtype.is_floating_point for dtype in self.dtypes]
        shapes, dtypes = tuple(compress(self.shapes, kept)), tuple(compress(self.dtypes, kept))
        return ValueSpec(shapes=shapes, dtypes=dtypes, is_tuple=True)

    def encode(self) -> torch.Tensor:
        """The spec as `_META_WORDS` integers. Raises ValueError where these are too few."""
        words = [int(self.is_tuple), len(self.shapes)]
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            words += [_DTYPES.index(dtype), len(shape), *shape]
        if len(words) > _META_WORDS:
            raise ValueError(f"{len(self.shapes)} tensors between two stages are too many to describe")
        return torch.tensor(words + [0] * (_META_WORDS - len(words)), dtype=torch.int64)

    @classmethod
    def decode(cls, words: Sequence[int]) -> "ValueSpec":
        """The exact inverse of `encode`."""
        shapes, dtypes, start = [], [], 2
        for _ in range(words[1]):
            dtypes.append(_DTYPES[words[start]])
            stop = start + 2 + words[start + 1]
            shapes.append(tuple(words[start + 2 : stop]))
            start = stop
        return cls(shapes=tuple(shapes), dtypes=tuple(dtypes), is_tuple=bool(words[0]))


def parts(value: Value) -> tuple[torch.Tensor, ...]:
    """The tensors of a value."""
    return value if isinstance(value, tuple) else (value,)


@dataclass(slots=True)
class _Pending:
    works: list[Any]
    tensors: list[torch.Tensor]
    spec: ValueSpec | None = None

    def finish(self) -> None:
        """Wait until the transfer is over."""
        for work in self.works:
            work.wait()

    def value(self) -> Value:
        """The received value, once the transfer is over."""
        self.finish()
        assert self.spec is not None
        pairs = zip(self.tensors, self.spec.dtypes, strict=True)
        tensors = tuple(tensor.bool() if dtype is torch.bool else tensor for tensor, dtype in pairs)
        return tensors if self.spec.is_tuple else tensors[0]


class ValueTransport:
    """The executor's transport for values of any spec, which are learnt in the first run."""

    def __init__(self, channels: Channels, *, device: torch.device, is_dynamic: bool) -> None:
        """`is_dynamic`: shapes may change at any microbatch, so that every forward value is described.

        `channels` have a host group.
        """
        self._channels = channels
        self._device = device
        self._is_dynamic = is_dynamic
        self._is_described = True
        # Forward values by the stage that sends or receives them, and by microbatch where that matters.
        self._sent: dict[tuple[int, int], ValueSpec] = {}
        self._received: dict[int, ValueSpec] = {}
        self._pending: dict[Transfer, _Pending] = {}
        # Described receives by peer, in the order of their messages, each with its description.
        self._expected: dict[int, list[tuple[Transfer, Any, torch.Tensor]]] = {}
        self._arrived: dict[Transfer, Value] = {}
        self._leaving = LeavingSends()
        self._leaving_descriptions = LeavingSends()

    def forget(self) -> None:
        """Learn the specs anew: shapes change from the next step on."""
        self._is_described = True
        self._sent.clear()
        self._received.clear()

    def post(self, transfers: Sequence[tuple[Transfer, Value | None]]) -> None:
        """Start transfers; of a described receive, only that of its description."""
        self._leaving.drop()
        for transfer, value in transfers:
            if transfer.side is Side.SEND:
                assert value is not None
                self._send(transfer, value)
            elif self._is_awaited(transfer):
                self._expect(transfer)
            else:
                self._pending[transfer] = self._receive(transfer)

    def wait(self, transfer: Transfer) -> Value | None:
        """Wait until a transfer is over; returns the value of a receive."""
        if transfer.side is Side.RECV:
            return (
                self._receive_in_order(transfer)
                if self._is_awaited(transfer)
                else self._pending.pop(transfer).value()
            )
        pending = self._pending.pop(transfer)
        if self._is_described or self._channels.is_nccl:
            # Its receiver may wait for this process first: sends are only waited for at the end.
            self._leaving.add(pending.works, pending.tensors)
        else:
            pending.finish()
        return None

    def end(self) -> None:
        """End a run: wait for the sends that are under way, and post receives ahead from now on."""
        self._leaving.finish()
        self._leaving_descriptions.finish()
        assert not self._pending
        self._is_described = self._is_dynamic

    def abort(self) -> None:
        """Forget the pending transfers."""
        for transfers in (self._pending, self._expected, self._arrived):
            transfers.clear()
        self._leaving.clear()
        self._leaving_descriptions.clear()

    def _send(self, transfer: Transfer, value: Value) -> None:
        message = transfer.message
        # Contiguous, and of a type that every library sends.
        tensors = [tensor.detach().to(_wire(tensor.dtype)).contiguous() for tensor in parts(value)]
        spec = ValueSpec.of(value)
        if message.is_forward:
            key = self._key(message.source_stage, message)
            if not self._is_dynamic and self._sent.get(key, spec) != spec:
                raise ValueError(
                    f"{transfer}: shapes changed from {self._sent[key].shapes} to {spec.shapes}; "
                    "build the PipelineModule with dynamic_shape=True"
                )
            self._sent[key] = spec
        peer, group = self._channels.address(transfer)
        if self._is_awaited(transfer):
            words = spec.encode()
            work = dist.isend(words, peer, group=self._channels.host_group)
            self._leaving_descriptions.add([work], [words])
        works = [dist.isend(tensor, peer, group=group) for tensor in tensors]
        self._pending[transfer] = _Pending(works=works, tensors=tensors)

    def _is_awaited(self, transfer: Transfer) -> bool:
        """Whether the receiver waits for a description of the value."""
        return self._is_described and transfer.message.is_forward

    def _expect(self, transfer: Transfer) -> None:
        words = torch.empty(_META_WORDS, dtype=torch.int64)
        peer, _ = self._channels.address(transfer)
        work = dist.irecv(words, peer, group=self._channels.host_group)
        self._expected.setdefault(transfer.peer, []).append((transfer, work, words))

    def _receive_in_order(self, transfer: Transfer) -> Value:
        """Receive the values that were posted before it from the same device, then itself."""
        queue = self._expected[transfer.peer]
        while transfer not in self._arrived:
            first, work, words = queue.pop(0)
            work.wait()
            self._received[first.message.target_stage] = ValueSpec.decode(words.tolist())
            self._arrived[first] = self._receive(first).value()
        return self._arrived.pop(transfer)

    def _receive(self, transfer: Transfer) -> _Pending:
        message = transfer.message
        if message.is_forward:
            spec = self._received[message.target_stage]
        else:
            spec = self._sent[self._key(message.target_stage, message)].gradients
        peer, group = self._channels.address(transfer)
        # Not from a pool: autograd keeps a received activation until its backward has run.
        tensors = [
            torch.empty(shape, dtype=_wire(dtype), device=self._device)
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        ]
        works = [dist.irecv(tensor, peer, group=group) for tensor in tensors]
        return _Pending(works=works, tensors=tensors, spec=spec)

    def _key(self, stage: int, message: Message) -> tuple[int, int]:
        return stage, message.microbatch if self._is_dynamic else 0


def _wire(dtype: torch.dtype) -> torch.dtype:
    """The type in which a tensor is sent: not every library sends booleans."""
    return torch.uint8 if dtype is torch.bool else dtype
