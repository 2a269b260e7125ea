"""What a partition sends: messages by phase and tensor, and shares of whole matrices."""

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

from quartet_plugin.errors import PlanError
from quartet_plugin.partition.table import AXES, DIMS, PRODUCTS, Partition, Phase, Tensor, Triple
from quartet_plugin.partition.transfers import transfers_of


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


def messages(partition: Partition) -> Mapping[tuple[Phase, Tensor], Fraction]:
    """Messages that a device sends for one microbatch, the mean of all devices, by phase and tensor."""
    counts = Counter((transfer.phase, transfer.tensor) for transfer in transfers_of(partition))
    return {key: Fraction(count, partition.num_devices) for key, count in counts.items()}


def sent_in_shares(partition: Partition) -> dict[str, Fraction]:
    """What a device sends in all phases, as shares of whole matrices: of `MN`, `NK` and `MK` elements."""
    shares: dict[str, Fraction] = {}
    for transfer in transfers_of(partition):
        rows, columns = AXES[transfer.tensor]
        dims = DIMS[rows] + DIMS[columns]
        pieces = partition.pieces[rows] * partition.pieces[columns] * transfer.parts
        shares[dims] = shares.get(dims, Fraction(0)) + Fraction(1, pieces * partition.num_devices)
    return shares
