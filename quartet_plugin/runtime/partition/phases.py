"""Executes the phases of a partition on one device: products, with the table's messages beside them.

A step first posts all its messages, then multiplies, then takes in what has arrived; so a block that the next
product needs travels while this one runs, into memory of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from quartet_plugin.partition.table import PRODUCTS, BlockIndex, Phase, Tensor, Triple, block_of
from quartet_plugin.partition.transfers import BlockTransfer
from quartet_plugin.runtime.partition.device_steps import DeviceStep, DeviceSteps, block_shape, part_of
from quartet_plugin.runtime.partition.messages import BlockMessages, Endpoint, RunningMessages

# A block, or a part of it: (row, column), part, parts.
Piece = tuple[BlockIndex, int, int]


@dataclass(slots=True)
class HeldBlocks:
    """The blocks that this device holds of one microbatch, and the sizes of pieces of M, N, K (0, 1, 2)."""

    pieces: dict[Tensor, dict[Piece, torch.Tensor]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)


class PartitionExecutor:
    """One device of a partition; every device of it runs the same phases in the same order.

    Matrices are this device's blocks, as they lie at home: I and O with tokens as rows, W as torch stores a
    linear's weight.
    """

    def __init__(self, steps: DeviceSteps, messages: BlockMessages) -> None:
        self.steps = steps
        self._messages = messages

    def hold(self, held: HeldBlocks, tensor: Tensor, matrix: torch.Tensor) -> None:
        """Let `held` begin with a tensor's matrix at home."""
        home = self.steps.homes[tensor]
        held.sizes |= home.piece_sizes(matrix)
        held.pieces[tensor] = {
            (block, home.part, home.parts): home.view(matrix, block) for block in home.blocks
        }

    def run(self, phase: Phase, held: HeldBlocks) -> torch.Tensor:
        """The result of a phase at home. `held` has the two factors, and afterwards what the table leaves."""
        return _PhaseRun(self.steps, self._messages, phase, held).run()


class _PhaseRun:
    """One phase of one microbatch."""

    def __init__(self, steps: DeviceSteps, messages: BlockMessages, phase: Phase, held: HeldBlocks) -> None:
        self._steps = steps
        self._messages = messages
        self._phase = phase
        self._held = held
        self._factors = PRODUCTS[phase][:2]
        self._result = PRODUCTS[phase][2]
        self._home = steps.homes[self._result]
        some = next(iter(held.pieces[self._factors[0]].values()))
        self._matrix = some.new_empty(self._home.matrix_shape(held.sizes))
        # Where products and sums that arrive are added: views of the matrix, or memory of their own.
        self._sums: dict[BlockIndex, torch.Tensor] = {}
        self._begun: set[BlockIndex] = set()
        # Of a block with several owners: this device's part of what the others have summed.
        self._arrived: dict[BlockIndex, torch.Tensor] = {}
        self._parts: dict[Piece, torch.Tensor] = {}
        self._at_home = {tensor: set(steps.homes[tensor].blocks) for tensor in self._factors}

    def run(self) -> torch.Tensor:
        steps = self._steps.steps[self._phase]
        before = RunningMessages()
        for step in steps[:-1]:
            before = self._step(step, before)
        before.finish()
        self._sum_parts()
        self._copy_parts(steps[-1])
        for tensor in self._factors:
            if not self._steps.is_moved(tensor):
                self._drop(tensor)
        return self._matrix

    def _step(self, step: DeviceStep, before: RunningMessages) -> RunningMessages:
        received = [(transfer, self._new_buffer(transfer)) for transfer in step.receives]
        running = self._messages.start(
            [(self._key(transfer), (transfer.target, self._payload(transfer))) for transfer in step.sends],
            [(transfer.source, buffer) for transfer, buffer in received],
        )
        if step.product is not None:
            self._multiply(step.product)
        # What was sent beside the product before has had a whole product of time.
        before.finish()
        running.wait_received()
        if step.product is not None:
            self._forget(step, step.product)
        for transfer, buffer in received:
            self._take(transfer, buffer)
        return running

    def _key(self, transfer: BlockTransfer) -> tuple[Phase, Tensor]:
        return self._phase, transfer.tensor

    def _new_buffer(self, transfer: BlockTransfer) -> torch.Tensor:
        shape = block_shape(transfer.tensor, self._held.sizes, parts=transfer.parts)
        return self._matrix.new_empty(shape)

    def _payload(self, transfer: BlockTransfer) -> torch.Tensor:
        tensor, block = transfer.tensor, transfer.block
        if transfer.is_sum:
            payload = part_of(tensor, self._sums[block], transfer.part, transfer.parts)
        elif transfer.parts == 1:
            payload = self._block(tensor, block)
        else:
            payload = self._held.pieces[tensor][block, transfer.part, transfer.parts]
        return payload.detach().contiguous()

    def _block(self, tensor: Tensor, block: BlockIndex) -> torch.Tensor:
        """The whole block, put together and kept where it came in parts."""
        held = self._held.pieces[tensor]
        whole: Piece = (block, 0, 1)
        if whole not in held:
            home = self._steps.homes[tensor]
            held[whole] = torch.cat(
                [held[block, part, home.parts] for part in range(home.parts)], home.row_dim
            )
        return held[whole]

    def _multiply(self, triple: Triple) -> None:
        left, right = (self._block(tensor, block_of(tensor, triple)) for tensor in self._factors)
        if self._phase is Phase.F:
            right = right.t()
        elif self._phase is Phase.G:
            # dW' = dO' I: as torch stores a weight.
            left, right = right.t(), left
        block = block_of(self._result, triple)
        total = self._sum_of(block)
        if block in self._begun:
            total.addmm_(left, right)
        else:
            torch.mm(left, right, out=total)
            self._begun.add(block)

    def _sum_of(self, block: BlockIndex) -> torch.Tensor:
        if block not in self._sums:
            if self._is_mine_alone(block):
                self._sums[block] = self._home.view(self._matrix, block)
            else:
                self._sums[block] = self._matrix.new_empty(block_shape(self._result, self._held.sizes))
        return self._sums[block]

    def _is_mine_alone(self, block: BlockIndex) -> bool:
        return len(self._home.owners.get(block, ())) == 1

    def _forget(self, step: DeviceStep, product: Triple) -> None:
        """Free what is neither at home nor was used now; of a carried tensor, what a block replaces."""
        for tensor in self._factors:
            pieces = self._held.pieces[tensor]
            if tensor in self._steps.partition.carried:
                if any(transfer.tensor is tensor for transfer in step.receives):
                    pieces.clear()
            elif tensor not in self._steps.partition.kept:
                used = block_of(tensor, product)
                self._held.pieces[tensor] = {
                    piece: values
                    for piece, values in pieces.items()
                    if self._is_home_piece(tensor, piece) or piece[0] == used
                }

    def _is_home_piece(self, tensor: Tensor, piece: Piece) -> bool:
        home = self._steps.homes[tensor]
        return piece[0] in self._at_home[tensor] and piece[1:] == (home.part, home.parts)

    def _drop(self, tensor: Tensor) -> None:
        self._held.pieces[tensor] = {
            piece: values
            for piece, values in self._held.pieces[tensor].items()
            if self._is_home_piece(tensor, piece)
        }

    def _take(self, transfer: BlockTransfer, buffer: torch.Tensor) -> None:
        """Hold a factor's block, or add a sum to this device's."""
        block = transfer.block
        if not transfer.is_sum:
            self._held.pieces[transfer.tensor][block, transfer.part, transfer.parts] = buffer
        elif not self._is_mine_alone(block):
            self._arrived[block] = buffer + self._arrived[block] if block in self._arrived else buffer
        elif block in self._begun:
            self._sum_of(block).add_(buffer)
        else:
            self._sum_of(block).copy_(buffer)
            self._begun.add(block)

    def _sum_parts(self) -> None:
        """Compute this device's part of the sum of each block that has several owners."""
        for block, owners in self._home.owners.items():
            if len(owners) == 1:
                continue
            part, parts = owners.index(self._steps.device), len(owners)
            arrived = self._arrived.get(block)
            if block in self._sums:
                total = part_of(self._result, self._sums[block], part, parts)
                total = total if arrived is None else total + arrived
            else:
                assert arrived is not None, "a valid table sends a sum to every owner"
                total = arrived
            self._parts[block, part, parts] = total
            if self._home.parts > 1:
                self._home.view(self._matrix, block).copy_(total)

    def _copy_parts(self, step: DeviceStep) -> None:
        """Exchange parts of the sums with the other owners, where the home has copies."""
        received = [(transfer, self._new_buffer(transfer)) for transfer in step.receives]
        sends: list[tuple[tuple[Phase, Tensor], Endpoint]] = [
            (
                self._key(transfer),
                (
                    transfer.target,
                    self._parts[transfer.block, transfer.part, transfer.parts].contiguous(),
                ),
            )
            for transfer in step.sends
        ]
        running = self._messages.start(sends, [(transfer.source, buffer) for transfer, buffer in received])
        running.finish()
        for transfer, buffer in received:
            self._parts[transfer.block, transfer.part, transfer.parts] = buffer
        if self._home.parts > 1:
            return
        for (block, part, parts), values in self._parts.items():
            part_of(self._result, self._home.view(self._matrix, block), part, parts).copy_(values)


def held_pieces(held: HeldBlocks, tensors: tuple[Tensor, ...]) -> Mapping[tuple[Tensor, Piece], torch.Tensor]:
    """The blocks of some tensors, for who keeps them between phases."""
    return {
        (tensor, piece): values for tensor in tensors for piece, values in held.pieces.get(tensor, {}).items()
    }
