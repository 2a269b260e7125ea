"""A partition executed in lockstep on numpy blocks: what devices hold, send and add, and nothing else.

A device uses only what it holds, so a transfer that is missing in the table is an error here, and results
are right only if the table is. Elements are counted as they are sent.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.partition.table import (
    AXES,
    PRODUCTS,
    BlockIndex,
    Partition,
    Phase,
    Tensor,
    Triple,
    block_of,
)
from quartet_plugin.partition.traffic import check_divides
from quartet_plugin.partition.transfers import BlockTransfer, transfers_of

Matrix = NDArray[np.floating]
# A block, or a part of it: (row, column), part, parts.
Piece = tuple[BlockIndex, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepResult:
    """The tensors at home after one microbatch, [device][piece], and what was sent.

    `sent_elements` and `num_messages` are by phase, tensor and sending device.
    """

    held: Mapping[Tensor, list[dict[Piece, Matrix]]]
    sent_elements: Mapping[tuple[Phase, Tensor, int], int]
    num_messages: Mapping[tuple[Phase, Tensor, int], int]


def run_lockstep(
    partition: Partition, input_: Matrix, weight: Matrix, output_grad: Matrix, *, num_microbatches: int = 1
) -> LockstepResult:
    """Forward, input gradient and weight gradient of I [M, N], W [N, K] and dO [M, K], as often as asked.

    Microbatches have equal tensors; each begins with what the one before left of W. Raises PlanError
    where the sizes do not divide.
    """
    check_divides(partition, (input_.shape[0], input_.shape[1], weight.shape[1]))
    whole = {Tensor.INPUT: input_, Tensor.WEIGHT: weight, Tensor.OUTPUT_GRAD: output_grad}
    run = _Run(partition, {Tensor.WEIGHT: pieces_at_home(partition, Tensor.WEIGHT, weight)})
    transfers = transfers_of(partition)
    for _ in range(num_microbatches):
        for tensor in (Tensor.INPUT, Tensor.OUTPUT_GRAD):
            run.held[tensor] = pieces_at_home(partition, tensor, whole[tensor])
        for phase in Phase:
            run.run_phase(phase, [transfer for transfer in transfers if transfer.phase is phase])
        for tensor in partition.kept:
            run.drop_received(tensor)
    return LockstepResult(held=run.held, sent_elements=run.sent_elements, num_messages=run.num_messages)


def pieces_at_home(partition: Partition, tensor: Tensor, whole: Matrix) -> list[dict[Piece, Matrix]]:
    """A matrix as the devices hold it at home, [device][piece]."""
    home = partition.homes[tensor]
    owners = home.owners()
    return [
        {
            (block, owners[block].index(device) if home.parts > 1 else 0, home.parts): _part(
                _cut(partition, tensor, whole, block),
                owners[block].index(device) if home.parts > 1 else 0,
                home.parts,
            ).copy()
            for block in blocks
        }
        for device, blocks in enumerate(home.blocks)
    ]


def assembled(partition: Partition, tensor: Tensor, held: list[dict[Piece, Matrix]], sizes: Triple) -> Matrix:
    """The whole matrix from what devices hold at home."""
    rows, columns = (sizes[axis] for axis in AXES[tensor])
    some = next(iter(next(pieces for pieces in held if pieces).values()))
    whole = np.full((rows, columns), np.nan, dtype=some.dtype)
    for pieces in held:
        for (block, part, parts), values in pieces.items():
            _part(_cut(partition, tensor, whole, block), part, parts)[...] = values
    return whole


def _cut(partition: Partition, tensor: Tensor, whole: Matrix, block: BlockIndex) -> Matrix:
    """A view of one block of a matrix."""
    rows, columns = (whole.shape[side] // partition.pieces[axis] for side, axis in enumerate(AXES[tensor]))
    return whole[block[0] * rows : (block[0] + 1) * rows, block[1] * columns : (block[1] + 1) * columns]


def _part(block: Matrix, part: int, parts: int) -> Matrix:
    rows = block.shape[0] // parts
    return block[part * rows : (part + 1) * rows]


def _home_pieces(partition: Partition, tensor: Tensor) -> list[set[Piece]]:
    """What each device keeps of a tensor between steps."""
    home = partition.homes[tensor]
    owners = home.owners()
    return [
        {(block, owners[block].index(device) if home.parts > 1 else 0, home.parts) for block in blocks}
        for device, blocks in enumerate(home.blocks)
    ]


class _Run:
    """What the devices hold and have sent so far."""

    def __init__(self, partition: Partition, held: dict[Tensor, list[dict[Piece, Matrix]]]) -> None:
        self.partition = partition
        self.held = held
        self.sent_elements: Counter[tuple[Phase, Tensor, int]] = Counter()
        self.num_messages: Counter[tuple[Phase, Tensor, int]] = Counter()
        self._home = {tensor: _home_pieces(partition, tensor) for tensor in Tensor}
        # Of the running phase: each device's own sums, and what others sent it to add.
        self._sums: list[dict[BlockIndex, Matrix]] = []
        self._arrived: list[dict[Piece, Matrix]] = []

    def run_phase(self, phase: Phase, transfers: Sequence[BlockTransfer]) -> None:
        """Every step of a phase: send what is held, multiply, then take in what arrived."""
        left, right, result = PRODUCTS[phase]
        self._sums = [{} for _ in range(self.partition.num_devices)]
        self._arrived = [{} for _ in range(self.partition.num_devices)]
        steps = self.partition.steps[phase]
        for step in range(-1, len(steps) + 1):
            running = [transfer for transfer in transfers if transfer.step == step]
            payloads = [self._send(transfer) for transfer in running]
            used: Sequence[Triple] = ()
            if 0 <= step < len(steps):
                used = steps[step]
                for device, triple in enumerate(used):
                    self._multiply(phase, device, triple)
            for tensor in (left, right):
                self._forget(tensor, running, used)
            for transfer, payload in zip(running, payloads, strict=True):
                self._receive(transfer, payload)
        for tensor in {left, right} - self.partition.kept - self.partition.carried:
            self.drop_received(tensor)
        self._bring_home(result, [transfer for transfer in transfers if transfer.step > len(steps)])

    def drop_received(self, tensor: Tensor) -> None:
        """Hold a tensor's home pieces alone."""
        self.held[tensor] = [
            {piece: pieces[piece] for piece in home}
            for pieces, home in zip(self.held[tensor], self._home[tensor], strict=True)
        ]

    def _forget(self, tensor: Tensor, running: Sequence[BlockTransfer], used: Sequence[Triple]) -> None:
        """Free what is neither at home nor was used now; of a carried tensor, what a block replaces."""
        if tensor in self.partition.kept or not used:
            return
        replaced = {transfer.target for transfer in running if transfer.tensor is tensor}
        for device, pieces in enumerate(self.held[tensor]):
            if tensor in self.partition.carried:
                if device in replaced:
                    pieces.clear()
                continue
            block = block_of(tensor, used[device])
            self.held[tensor][device] = {
                piece: values
                for piece, values in pieces.items()
                if piece in self._home[tensor][device] or piece[0] == block
            }

    def _block_at(self, device: int, tensor: Tensor, block: BlockIndex) -> Matrix:
        """The whole block that a device holds. Raises KeyError where it lacks it or a part of it."""
        held = self.held[tensor][device]
        if (block, 0, 1) in held:
            return held[block, 0, 1]
        parts = self.partition.homes[tensor].parts
        return np.concatenate([held[block, part, parts] for part in range(parts)])

    def _multiply(self, phase: Phase, device: int, triple: Triple) -> None:
        left, right, result = PRODUCTS[phase]
        first = self._block_at(device, left, block_of(left, triple))
        second = self._block_at(device, right, block_of(right, triple))
        product = (first.T if phase is Phase.G else first) @ (second.T if phase is Phase.B else second)
        block, sums = block_of(result, triple), self._sums[device]
        sums[block] = sums[block] + product if block in sums else product

    def _send(self, transfer: BlockTransfer) -> Matrix:
        if transfer.is_sum:
            payload = _part(self._sums[transfer.source][transfer.block], transfer.part, transfer.parts)
        elif transfer.parts == 1:
            payload = self._block_at(transfer.source, transfer.tensor, transfer.block)
        else:
            payload = self.held[transfer.tensor][transfer.source][
                transfer.block, transfer.part, transfer.parts
            ]
        return self._counted(transfer, payload)

    def _counted(self, transfer: BlockTransfer, payload: Matrix) -> Matrix:
        key = (transfer.phase, transfer.tensor, transfer.source)
        self.sent_elements[key] += payload.size
        self.num_messages[key] += 1
        return payload.copy()

    def _receive(self, transfer: BlockTransfer, payload: Matrix) -> None:
        piece = (transfer.block, transfer.part, transfer.parts)
        if not transfer.is_sum:
            self.held[transfer.tensor][transfer.target][piece] = payload
            return
        arrived = self._arrived[transfer.target]
        arrived[piece] = arrived[piece] + payload if piece in arrived else payload

    def _bring_home(self, result: Tensor, copied: Sequence[BlockTransfer]) -> None:
        """Bring the result home: each owner's part of the sum, and where the home has copies, the others'."""
        home = self.partition.homes[result]
        totals: list[dict[Piece, Matrix]] = [{} for _ in home.blocks]
        for block, places in home.owners().items():
            for part, device in enumerate(places):
                totals[device][block, part, len(places)] = self._total(device, block, part, len(places))
        for transfer in copied:
            payload = totals[transfer.source][transfer.block, transfer.part, transfer.parts]
            totals[transfer.target][transfer.block, transfer.part, transfer.parts] = self._counted(
                transfer, payload
            )
        if home.parts == 1:
            owners = home.owners()
            totals = [
                {
                    (block, 0, 1): np.concatenate(
                        [pieces[block, part, len(owners[block])] for part in range(len(owners[block]))]
                    )
                    for block in blocks
                }
                for pieces, blocks in zip(totals, home.blocks, strict=True)
            ]
        self.held[result] = totals

    def _total(self, device: int, block: BlockIndex, part: int, parts: int) -> Matrix:
        arrived = self._arrived[device].get((block, part, parts))
        if block not in self._sums[device]:
            return self._arrived[device][block, part, parts]
        added = _part(self._sums[device][block], part, parts)
        return added if arrived is None else added + arrived
