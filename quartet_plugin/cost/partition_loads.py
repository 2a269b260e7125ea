"""What a partition's transfers put on the links of its devices, in blocks: alike for layers of any size."""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from quartet_plugin.model.tensor_partition import BlockPartition
from quartet_plugin.partition.layer import Linear, planned_partition
from quartet_plugin.partition.table import Partition, Phase, Tensor, Triple
from quartet_plugin.partition.transfers import transfers_of

SCALE_UP, SCALE_OUT = "scale-up", "scale-out"


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one device sends, or receives, beside the product of `step` on links of one level.

    `blocks` of each tensor are counted in whole blocks. `is_pair`: to or from one peer alone.
    """

    step: int
    level: str
    is_pair: bool
    blocks: tuple[tuple[Tensor, float], ...]

    def elements(self, partition: Partition, sizes: Triple) -> float:
        """Elements for a layer of `sizes` (M, N, K)."""
        return sum(count * partition.num_elements(tensor, sizes) for tensor, count in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionLoads:
    """The loads of a partition: different ones of each phase, and what a device sends, the mean of all.

    `arriving` are the blocks that a device receives beside a step, the mean of all, by phase and step.
    """

    partition: Partition
    steps: dict[Phase, tuple[StepLoad, ...]]
    sent_blocks: dict[tuple[Phase, Tensor, str], Fraction]
    arriving: dict[tuple[Phase, int], dict[Tensor, float]]

    def buffer_elements(self, sizes: Triple) -> float:
        """The most elements of received blocks that a step has: those in use and those on their way."""
        arriving = {
            key: sum(count * self.partition.num_elements(tensor, sizes) for tensor, count in blocks.items())
            for key, blocks in self.arriving.items()
        }
        return max(
            arriving.get((phase, step), 0.0) + arriving.get((phase, step - 1), 0.0)
            for phase in Phase
            for step in range(len(self.partition.steps[phase]) + 1)
        )


def loads_of(partition: Partition, *, devices_per_domain: int) -> PartitionLoads:
    """The loads where this number of devices is joined by scale-up links."""
    by_device: dict[tuple[Phase, int, str, int, int, bool], Counter[Tensor]] = {}
    sent: Counter[tuple[Phase, Tensor, str]] = Counter()
    arriving: dict[tuple[Phase, int], Counter[Tensor]] = {}
    for transfer in transfers_of(partition):
        source, target = transfer.source, transfer.target
        level = SCALE_UP if source // devices_per_domain == target // devices_per_domain else SCALE_OUT
        part = Fraction(1, transfer.parts)
        phase, step, tensor = transfer.phase, transfer.step, transfer.tensor
        ends = [(source, -1, True), (target, -1, False)]
        if level == SCALE_UP:
            ends.append((source, target, True))
        for device, peer, is_sent in ends:
            load = by_device.setdefault((phase, step, level, device, peer, is_sent), Counter())
            load[tensor] += part  # type: ignore[assignment]
        share = part / partition.num_devices
        sent[phase, tensor, level] += share  # type: ignore[assignment]
        arriving.setdefault((phase, step), Counter())[tensor] += share  # type: ignore[assignment]
    steps: dict[Phase, dict[StepLoad, None]] = {phase: {} for phase in Phase}
    for (phase, step, level, _, peer, _), load in by_device.items():
        blocks = tuple(sorted((tensor, float(count)) for tensor, count in load.items()))
        steps[phase][StepLoad(step, level, peer >= 0, blocks)] = None
    return PartitionLoads(
        partition=partition,
        steps={phase: tuple(loads) for phase, loads in steps.items()},
        sent_blocks={key: Fraction(count) for key, count in sent.items()},
        arriving={
            key: {tensor: float(count) for tensor, count in load.items()} for key, load in arriving.items()
        },
    )


@lru_cache(maxsize=1024)
def planned_loads(
    block: BlockPartition, linear_role: str, *, num_devices: int, devices_per_domain: int
) -> PartitionLoads:
    """The loads of the linears with a role in a block of a plan."""
    linear = Linear(name="", role="in" if linear_role == "in" else "out", sizes=(1, 1, 1))
    return loads_of(planned_partition(block, linear, num_devices), devices_per_domain=devices_per_domain)
