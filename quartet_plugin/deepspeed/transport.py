"""Boundary values between DeepSpeed's stages: a tensor or a tuple of them, of any shape and type.

A pair of `isend` and `irecv` for every tensor, so that neither side blocks and no order of the two can hang.
What a stage receives is not known before its neighbour has run once: during the first step after a start or a
change of shape every message brings a description, and is received when it is needed; from then on
receives are posted ahead. Gradients need none: they are shaped like what was sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from quartet_plugin.runtime.transport import Channels
from quartet_plugin.schedule.instruction import Message, Side, Transfer

type Value = torch.Tensor | tuple[torch.Tensor, ...]

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
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
        """The spec of a value."""
        tensors = parts(value)
        return cls(
            shapes=tuple(tuple(tensor.shape) for tensor in tensors),
            dtypes=tuple(tensor.dtype for tensor in tensors),
            is_tuple=isinstance(value, tuple),
        )

    @property
    def gradients(self) -> "ValueSpec":
        """The spec of the gradients that come back: one for every floating-point tensor."""
        kept = [index for index, dtype in enumerate(self.dtypes) if dtype.is_floating_point]
        return ValueSpec(
            shapes=tuple(self.shapes[index] for index in kept),
            dtypes=tuple(self.dtypes[index] for index in kept),
            is_tuple=True,
        )

    def encode(self) -> torch.Tensor:
        """As a fixed number of integers. Raises ValueError for more than fits."""
        words = [int(self.is_tuple), len(self.shapes)]
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            words += [_DTYPES.index(dtype), len(shape), *shape]
        if len(words) > _META_WORDS:
            raise ValueError(f"{len(self.shapes)} tensors between two stages are more than can be described")
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
    spec: ValueSpec | None


class ValueTransport:
    """The executor's transport for values of any spec, which are learnt in the first run."""

    def __init__(self, channels: Channels, *, device: torch.device, is_dynamic: bool) -> None:
        """`is_dynamic`: shapes may change at any microbatch, so that every message is described."""
        self._channels = channels
        self._device = device
        self._is_dynamic = is_dynamic
        self._is_described = True
        # Forward values by the stage that sends or receives them, and by microbatch where that matters.
        self._sent: dict[tuple[int, int], ValueSpec] = {}
        self._received: dict[int, ValueSpec] = {}
        self._pending: dict[Transfer, _Pending] = {}
        self._expected: dict[tuple[int, int], list[Transfer]] = {}
        self._arrived: dict[Transfer, Value] = {}
        self._unfinished: list[_Pending] = []

    def forget(self) -> None:
        """Shapes change from the next step on."""
        self._is_described = True
        self._sent.clear()
        self._received.clear()

    def post(self, transfers: Sequence[tuple[Transfer, Value | None]]) -> None:
        """Start transfers; described receives only take their place in the line."""
        for transfer, value in transfers:
            if transfer.side is Side.SEND:
                assert value is not None
                self._send(transfer, value)
            elif self._is_described:
                self._expected.setdefault(self._line(transfer), []).append(transfer)
            else:
                self._pending[transfer] = self._receive(transfer.message, self._spec(transfer.message))

    def wait(self, transfer: Transfer) -> Value | None:
        """Until it is over; returns what a receive brought."""
        if transfer.side is Side.SEND:
            pending = self._pending.pop(transfer)
            if self._is_described:
                # Its receiver may wait for us first: sends are only waited for at the end.
                self._unfinished.append(pending)
            else:
                _finish(pending)
            return None
        if self._is_described:
            return self._wait_in_line(transfer)
        return _value(self._pending.pop(transfer))

    def end(self) -> None:
        """A run is over: wait for the sends of a described one, and post ahead from now on."""
        for pending in self._unfinished:
            _finish(pending)
        self._unfinished.clear()
        assert not self._pending
        self._is_described = self._is_dynamic

    def abort(self) -> None:
        """Forget what is pending."""
        self._pending.clear()
        self._expected.clear()
        self._arrived.clear()
        self._unfinished.clear()

    def _send(self, transfer: Transfer, value: Value) -> None:
        message = transfer.message
        tensors = [_plain(tensor.detach()) for tensor in parts(value)]
        spec = ValueSpec.of(value)
        if message.is_forward:
            key = self._key(message.source_stage, message)
            if not self._is_dynamic and self._sent.get(key, spec) != spec:
                known = self._sent[key]
                raise ValueError(
                    f"{transfer}: shapes changed from {known.shapes} to {spec.shapes}; "
                    "build the PipelineModule with dynamic_shape=True"
                )
            self._sent[key] = spec
            if self._is_described:
                tensors.insert(0, spec.encode().to(self._device))
        peer, group = self._address(transfer)
        works = [dist.isend(tensor, peer, group=group) for tensor in tensors]
        self._pending[transfer] = _Pending(works=works, tensors=tensors, spec=None)

    def _wait_in_line(self, transfer: Transfer) -> Value:
        """Receive what was posted before it on the same line, in that order, then itself."""
        line = self._expected.get(self._line(transfer), [])
        while transfer not in self._arrived:
            first = line.pop(0)
            self._arrived[first] = self._receive_now(first)
        return self._arrived.pop(transfer)

    def _receive_now(self, transfer: Transfer) -> Value:
        message = transfer.message
        if not message.is_forward:
            return _value(self._receive(message, self._spec(message)))
        words = torch.empty(_META_WORDS, dtype=torch.int64, device=self._device)
        peer, group = self._address(transfer)
        dist.irecv(words, peer, group=group).wait()
        spec = ValueSpec.decode(words.tolist())
        self._received[message.target_stage] = spec
        return _value(self._receive(message, spec))

    def _receive(self, message: Message, spec: ValueSpec) -> _Pending:
        peer = self._channels.ranks[message.source_device]
        group = self._channels.groups[message.group]
        # Not from a pool: autograd keeps a received activation until its backward has run.
        tensors = [
            torch.empty(shape, dtype=_wire(dtype), device=self._device)
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        ]
        works = [dist.irecv(tensor, peer, group=group) for tensor in tensors]
        return _Pending(works=works, tensors=tensors, spec=spec)

    def _spec(self, message: Message) -> ValueSpec:
        if message.is_forward:
            return self._received[message.target_stage]
        return self._sent[self._key(message.target_stage, message)].gradients

    def _key(self, stage: int, message: Message) -> tuple[int, int]:
        return stage, message.microbatch if self._is_dynamic else 0

    def _address(self, transfer: Transfer) -> tuple[int, Any]:
        return self._channels.ranks[transfer.peer], self._channels.groups[transfer.message.group]

    def _line(self, transfer: Transfer) -> tuple[int, int]:
        return transfer.peer, transfer.message.group


def _finish(pending: _Pending) -> None:
    for work in pending.works:
        work.wait()


def _value(pending: _Pending) -> Value:
    _finish(pending)
    spec = pending.spec
    assert spec is not None
    tensors = tuple(
        tensor.bool() if dtype is torch.bool else tensor
        for tensor, dtype in zip(pending.tensors, spec.dtypes, strict=True)
    )
    return tensors if spec.is_tuple else tensors[0]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, and of a type that every library sends."""
    return (tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor).contiguous()


def _wire(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype is torch.bool else dtype
