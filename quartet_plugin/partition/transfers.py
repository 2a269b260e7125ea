"""The transfers that a partition's table implies: what each device receives, from whom, during which step.

A factor's block that a device does not hold is received while the product before runs. A sum that does not
belong to the device is sent home while the product after its last one runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quartet_plugin.partition.table import (
    PRODUCTS,
    BlockIndex,
    Home,
    Partition,
    Phase,
    Tensor,
    block_of,
)

Held = list[set[BlockIndex]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTransfer:
    """One block, or one of `parts` parts of it, that goes from one device to another.

    It runs during the product of `step`: -1 is before the phase's first product, and from the number of steps
    on it is after the last; both are exposed. `is_sum` says that the receiver adds it to what it has.
    """

    phase: Phase
    step: int
    tensor: Tensor
    block: BlockIndex
    source: int
    target: int
    part: int = 0
    parts: int = 1
    is_sum: bool = False


def transfers_of(partition: Partition) -> tuple[BlockTransfer, ...]:
    """All transfers of one microbatch, phase by phase and step by step.

    The table must be a valid one (`validate`).
    """
    held = {tensor: _at_home(partition.homes[tensor]) for tensor in Tensor}
    transfers: list[BlockTransfer] = []
    for phase in Phase:
        for tensor in PRODUCTS[phase][:2]:
            transfers += _factor(partition, phase, tensor, held)
        transfers += _results(partition, phase)
    return tuple(sorted(transfers, key=lambda transfer: ("FBG".index(transfer.phase), transfer.step)))


def _at_home(home: Home) -> Held:
    return [set(blocks) if home.parts == 1 else set() for blocks in home.blocks]


def _factor(
    partition: Partition, phase: Phase, tensor: Tensor, held: dict[Tensor, Held]
) -> Iterator[BlockTransfer]:
    """What one factor of a phase needs; `held` is brought to what the devices hold after the phase."""
    home, steps = partition.homes[tensor], partition.steps[phase]
    owners, resident = home.owners(), _at_home(home)
    is_carried = tensor in partition.carried
    used: list[BlockIndex | None] = [None] * partition.num_devices
    for step, triples in enumerate(steps):
        needed = [block_of(tensor, triple) for triple in triples]
        before = held[tensor]
        for device, block in enumerate(needed):
            if block in before[device]:
                continue
            for source, part, parts in _sources(block, device, used, before, home.parts, owners):
                yield BlockTransfer(
                    phase=phase,
                    step=step - 1,
                    tensor=tensor,
                    block=block,
                    source=source,
                    target=device,
                    part=part,
                    parts=parts,
                )
        held[tensor] = [
            {block} if is_carried else (earlier if tensor in partition.kept else resident[device]) | {block}
            for device, (block, earlier) in enumerate(zip(needed, before, strict=True))
        ]
        used = list(needed)
    if is_carried:
        yield from _returned(partition, phase, tensor, held)
    elif tensor not in partition.kept:
        held[tensor] = resident


def _sources(
    block: BlockIndex,
    device: int,
    used: Sequence[BlockIndex | None],
    held: Held,
    parts: int,
    owners: dict[BlockIndex, tuple[int, ...]],
) -> Iterator[tuple[int, int, int]]:
    """(source, part, parts) of what a device must receive to hold a block.

    The device that used the block in the step before, so that blocks go round a ring; else who holds it;
    a block that is in parts comes from all of its owners.
    """
    users = [other for other, earlier in enumerate(used) if earlier == block]
    holders = users or [other for other, blocks in enumerate(held) if block in blocks]
    if holders and (parts == 1 or users):
        yield min(holders, key=lambda other: (abs(other - device), other)), 0, 1
        return
    for part, owner in enumerate(owners[block]):
        if owner != device:
            yield owner, part, parts


def _returned(
    partition: Partition, phase: Phase, tensor: Tensor, held: dict[Tensor, Held]
) -> Iterator[BlockTransfer]:
    """The weight goes back to where the next microbatch's forward needs it, beside the last product."""
    if tensor is not Tensor.WEIGHT or phase is not Phase.B:
        return
    home = _at_home(partition.homes[tensor])
    for device, blocks in enumerate(home):
        for block in sorted(blocks - held[tensor][device]):
            source = next(other for other, kept in enumerate(held[tensor]) if block in kept)
            yield BlockTransfer(
                phase=phase,
                step=len(partition.steps[phase]) - 1,
                tensor=tensor,
                block=block,
                source=source,
                target=device,
            )
    held[tensor] = home


def _results(partition: Partition, phase: Phase) -> Iterator[BlockTransfer]:
    """The sums that leave the device which computed them."""
    tensor, steps = PRODUCTS[phase][2], partition.steps[phase]
    home = partition.homes[tensor]
    owners = home.owners()
    last: dict[tuple[int, BlockIndex], int] = {}
    for step, triples in enumerate(steps):
        for device, triple in enumerate(triples):
            last[device, block_of(tensor, triple)] = step
    for (device, block), step in last.items():
        places = owners[block]
        for part, owner in enumerate(places):
            if owner != device:
                yield BlockTransfer(
                    phase=phase,
                    step=step + 1,
                    tensor=tensor,
                    block=block,
                    source=device,
                    target=owner,
                    part=part,
                    parts=len(places),
                    is_sum=True,
                )
    if home.parts == 1:
        yield from _copies(phase, len(steps) + 1, tensor, owners)


def _copies(
    phase: Phase, step: int, tensor: Tensor, owners: dict[BlockIndex, tuple[int, ...]]
) -> Iterator[BlockTransfer]:
    """The second half of an all-reduce: each owner sends the part that it has summed to the others."""
    for block, places in owners.items():
        for part, source in enumerate(places):
            for target in places:
                if target != source:
                    yield BlockTransfer(
                        phase=phase,
                        step=step,
                        tensor=tensor,
                        block=block,
                        source=source,
                        target=target,
                        part=part,
                        parts=len(places),
                    )
