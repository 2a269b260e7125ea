"""Exchanges between Megatron's layouts under sequence parallelism and a grid's, each the other's backward.

Among the devices of a row or a column every one holds tokens of its own with all columns, or all of these
tokens with columns of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quartet_plugin.runtime.partition.messages import BlockMessages


@dataclass(frozen=True, slots=True)
class Border:
    """The devices of an exchange, and which piece of the columns each has, by its index among them."""

    name: str
    messages: BlockMessages
    device: int
    peers: Sequence[int]
    columns: Sequence[int]

    @property
    def index(self) -> int:
        """This device's index among the peers."""
        return self.peers.index(self.device)

    @property
    def others(self) -> list[int]:
        """The indices of the other devices."""
        return [index for index in range(len(self.peers)) if index != self.index]


def gather_tokens(hidden: torch.Tensor, border: Border) -> torch.Tensor:
    """[s, b, h] with this device's tokens to [s * peers, b, h / peers] with its columns, peers in order."""
    output: torch.Tensor = _MoveTokens.apply(hidden, border, _to_columns, _to_tokens)
    return output


def scatter_tokens(hidden: torch.Tensor, border: Border) -> torch.Tensor:
    """The inverse: [s, b, h] with this device's columns to [s / peers, b, h * peers] with its tokens."""
    output: torch.Tensor = _MoveTokens.apply(hidden, border, _to_tokens, _to_columns)
    return output


def gather_vector(vector: torch.Tensor, border: Border) -> torch.Tensor:
    """[n] of each device to [peers, n]; the gradients of all devices are summed."""
    output: torch.Tensor = _GatherVector.apply(vector, border)
    return output


class _MoveTokens(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, border: Border, there: Any, back: Any) -> torch.Tensor:
        ctx.border, ctx.back = border, back
        return there(hidden, border)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.back(grad, ctx.border), None, None, None


class _GatherVector(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, vector: torch.Tensor, border: Border) -> torch.Tensor:
        ctx.border = border
        gathered = vector.new_empty(len(border.peers), *vector.shape)
        _exchange(border, dict.fromkeys(border.others, vector.detach().contiguous()), gathered)
        gathered[border.index].copy_(vector)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        border = ctx.border
        received = torch.empty_like(grad, memory_format=torch.contiguous_format)
        _exchange(border, {peer: grad[peer].contiguous() for peer in border.others}, received)
        received[border.index].copy_(grad[border.index])
        # In the order of peers on every device, so that a sum does not depend on where it is made.
        return received.sum(0), None


def _to_columns(hidden: torch.Tensor, border: Border) -> torch.Tensor:
    peers = len(border.peers)
    pieces = hidden.unflatten(-1, (peers, hidden.shape[-1] // peers))
    gathered = hidden.new_empty(peers, *hidden.shape[:-1], hidden.shape[-1] // peers)
    sent = {peer: pieces[..., border.columns[peer], :].contiguous() for peer in border.others}
    _exchange(border, sent, gathered)
    gathered[border.index].copy_(pieces[..., border.columns[border.index], :])
    return gathered.flatten(0, 1)


def _to_tokens(hidden: torch.Tensor, border: Border) -> torch.Tensor:
    peers = len(border.peers)
    pieces = hidden.unflatten(0, (peers, hidden.shape[0] // peers))
    received = pieces.new_empty(pieces.shape)
    _exchange(border, {peer: pieces[peer].contiguous() for peer in border.others}, received)
    received[border.index].copy_(pieces[border.index])
    # From [peer, s, b, width] to the columns' own order.
    by_column = sorted(range(peers), key=lambda peer: border.columns[peer])
    return torch.cat([received[peer] for peer in by_column], -1)


def _exchange(border: Border, sent: dict[int, torch.Tensor], received: torch.Tensor) -> None:
    """Send to each other device, and receive from each into its row of `received`."""
    running = border.messages.start(
        [((border.name, "border"), (border.peers[peer], values)) for peer, values in sent.items()],
        [(border.peers[peer], received[peer]) for peer in border.others],
    )
    running.finish()
