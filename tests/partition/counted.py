"""What a partition sends, counted in more ways than the package needs: by level, copies, in a row."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from quartet_plugin.partition.table import PRODUCTS, Partition, Phase, Tensor, Triple, block_of
from quartet_plugin.partition.traffic import check_divides
from quartet_plugin.partition.transfers import BlockTransfer, transfers_of

# The level of the machine that a transfer from one device to another crosses, such as "node".
LevelOf = Callable[[int, int], str]


@dataclass(frozen=True, slots=True)
class TrafficKey:
    """What traffic is counted by: the phase, the tensor, the level, and whether a product hides it."""

    phase: Phase
    tensor: Tensor
    level: str
    is_hidden: bool


def is_exposed(transfer: BlockTransfer, partition: Partition) -> bool:
    """Whether no product of the same phase runs beside the transfer."""
    return not 0 <= transfer.step < len(partition.steps[transfer.phase])


def traffic(
    partition: Partition, sizes: Triple, *, level_of: LevelOf | None = None
) -> dict[TrafficKey, Fraction]:
    """Elements that a device sends for one microbatch, the mean of all devices; one level without `level_of`.

    Raises PlanError where `sizes` (M, N, K) do not divide.
    """
    check_divides(partition, sizes)
    sent: dict[TrafficKey, Fraction] = {}
    for transfer in transfers_of(partition):
        key = TrafficKey(
            transfer.phase,
            transfer.tensor,
            "any" if level_of is None else level_of(transfer.source, transfer.target),
            not is_exposed(transfer, partition),
        )
        elements = Fraction(partition.num_elements(transfer.tensor, sizes), transfer.parts)
        sent[key] = sent.get(key, Fraction(0)) + elements
    return {key: total / partition.num_devices for key, total in sent.items()}


def sent_by_tensor(partition: Partition, sizes: Triple) -> dict[tuple[Phase, Tensor], Fraction]:
    """Elements that a device sends, the mean of all devices, by phase and tensor."""
    sums: dict[tuple[Phase, Tensor], Fraction] = {}
    for key, elements in traffic(partition, sizes).items():
        sums[key.phase, key.tensor] = sums.get((key.phase, key.tensor), Fraction(0)) + elements
    return sums


def copies(partition: Partition, phase: Phase, tensor: Tensor) -> int:
    """How many devices at most use one block of a factor, or add to one block of a result, in one step.

    1 says that a step needs shifts alone; more says broadcasts, or for a result reductions.
    """
    assert tensor in PRODUCTS[phase]
    return max(
        max(Counter(block_of(tensor, triple) for triple in triples).values())
        for triples in partition.steps[phase]
    )


def is_shift(partition: Partition, phase: Phase, tensor: Tensor) -> bool:
    """Whether each device sends at most one block of the tensor a step, and receives at most one."""
    sent: Counter[tuple[int, int]] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    for transfer in transfers_of(partition):
        if (transfer.phase, transfer.tensor) == (phase, tensor):
            sent[transfer.step, transfer.source] += 1
            received[transfer.step, transfer.target] += 1
    return max([*sent.values(), *received.values()], default=0) <= 1


def redistributed_blocks(producer: Partition, consumer: Partition) -> dict[str, int]:
    """Blocks that move between linears in a row: `forward` from O to the next I, `backward` from dI to dO."""
    assert (producer.pieces[0], producer.pieces[2]) == consumer.pieces[:2]
    return {
        "forward": _moved(producer, Tensor.OUTPUT, consumer, Tensor.INPUT),
        "backward": _moved(consumer, Tensor.INPUT_GRAD, producer, Tensor.OUTPUT_GRAD),
    }


def _moved(source: Partition, before: Tensor, target: Partition, after: Tensor) -> int:
    """Blocks that a device needs afterwards and did not hold before."""
    first, second = source.homes[before], target.homes[after]
    if first.parts != second.parts:
        return sum(len(blocks) for blocks in second.blocks)
    pairs = zip(first.blocks, second.blocks, strict=True)
    return sum(len(set(needed) - set(held)) for held, needed in pairs)
