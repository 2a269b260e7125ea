"""What a partition sends: messages and elements by phase, tensor and level, copies, and redistributions."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from quartet_plugin.errors import PlanError
from quartet_plugin.partition.table import AXES, DIMS, PRODUCTS, Partition, Phase, Tensor, Triple, block_of
from quartet_plugin.partition.transfers import BlockTransfer, is_exposed, transfers_of

# The level of the machine that a transfer from one device to another crosses, such as "node".
LevelOf = Callable[[int, int], str]


@dataclass(frozen=True, slots=True)
class TrafficKey:
    """What traffic is counted by: the phase, the tensor, the level, and whether a product hides it."""

    phase: Phase
    tensor: Tensor
    level: str
    is_hidden: bool


def check_divides(partition: Partition, sizes: Triple) -> None:
    """Raise PlanError naming the size of a layer of `sizes` (M, N, K) that the partition does not divide."""
    for dim, size, pieces in zip(DIMS, sizes, partition.pieces, strict=True):
        if size < 1 or size % pieces:
            raise PlanError(f"{partition.name}: {dim} is {size}; must be a multiple of {pieces}")
    for tensor in Tensor:
        rows, parts = AXES[tensor][0], num_parts(partition, tensor)
        if sizes[rows] // partition.pieces[rows] % parts:
            raise PlanError(
                f"{partition.name}: {DIMS[rows]} is {sizes[rows]}; must be a multiple of "
                f"{partition.pieces[rows] * parts}, for blocks of {tensor} are sent in {parts} parts"
            )


def num_parts(partition: Partition, tensor: Tensor) -> int:
    """Parts that a block of the tensor is sent in: those of its home; of a sum with copies, its owners."""
    home = partition.homes[tensor]
    is_result = tensor in {result for _, _, result in PRODUCTS.values()}
    return max(map(len, home.owners().values())) if is_result else home.parts


def elements_of(transfer: BlockTransfer, partition: Partition, sizes: Triple) -> Fraction:
    """Elements of one transfer for a layer of `sizes` (M, N, K)."""
    return Fraction(partition.num_elements(transfer.tensor, sizes), transfer.parts)


def traffic(
    partition: Partition, sizes: Triple, *, level_of: LevelOf | None = None
) -> dict[TrafficKey, Fraction]:
    """Elements that a device sends for one microbatch, the mean of all devices; one level without `level_of`.

    Raises PlanError where `sizes` (M, N, K) do not divide.
    """
    check_divides(partition, sizes)
    sent: Counter[TrafficKey] = Counter()
    for transfer in transfers_of(partition):
        key = TrafficKey(
            transfer.phase,
            transfer.tensor,
            "any" if level_of is None else level_of(transfer.source, transfer.target),
            not is_exposed(transfer, partition),
        )
        sent[key] += elements_of(transfer, partition, sizes)  # type: ignore[assignment]
    return {key: Fraction(total) / partition.num_devices for key, total in sent.items()}


def sent_by_tensor(partition: Partition, sizes: Triple) -> dict[tuple[Phase, Tensor], Fraction]:
    """Elements that a device sends, the mean of all devices, by phase and tensor."""
    sums: dict[tuple[Phase, Tensor], Fraction] = {}
    for key, elements in traffic(partition, sizes).items():
        sums[key.phase, key.tensor] = sums.get((key.phase, key.tensor), Fraction(0)) + elements
    return sums


def messages(partition: Partition) -> Mapping[tuple[Phase, Tensor], Fraction]:
    """Messages that a device sends for one microbatch, the mean of all devices, by phase and tensor."""
    counts = Counter((transfer.phase, transfer.tensor) for transfer in transfers_of(partition))
    return {key: Fraction(count, partition.num_devices) for key, count in counts.items()}


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
    """Blocks that move between chained linears: `forward` from O to the next I, `backward` from dI to dO.

    Raises PlanError where the two cut the tensor between them into other blocks.
    """
    first = (producer.pieces[0], producer.pieces[2])
    second = consumer.pieces[:2]
    if producer.num_devices != consumer.num_devices or first != second:
        raise PlanError(
            f"{producer.name} then {consumer.name}: {first[0]} x {first[1]} blocks on {producer.num_devices} "
            f"devices, then {second[0]} x {second[1]} on {consumer.num_devices}; both must be equal"
        )
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


def sent_in_shares(partition: Partition) -> dict[str, Fraction]:
    """What a device sends in all phases, as shares of whole matrices: of `MN`, `NK` and `MK` elements."""
    shares: dict[str, Fraction] = {}
    for transfer in transfers_of(partition):
        rows, columns = AXES[transfer.tensor]
        dims = DIMS[rows] + DIMS[columns]
        pieces = partition.pieces[rows] * partition.pieces[columns] * transfer.parts
        shares[dims] = shares.get(dims, Fraction(0)) + Fraction(1, pieces * partition.num_devices)
    return shares
