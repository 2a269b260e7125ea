"""Seconds and bytes of a layer's linears under a tensor partition: products, what hides behind them, borders.

A phase takes its exposed transfers, then in each step the longer of the product and the transfers beside it
(PrimePar's Eq. 7 without its memory term). Products are as many times smaller as there are steps, and lose
what incomplete waves lose. Transfers of one step and level share a device's link; levels work side by side.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

from quartet_plugin.cost.compute import waves
from quartet_plugin.partition.layer import Linear, partition_of
from quartet_plugin.partition.named import named_partition
from quartet_plugin.partition.table import DIMS, Partition, Phase, Tensor
from quartet_plugin.partition.traffic import check_divides, elements_of
from quartet_plugin.partition.transfers import BlockTransfer, transfers_of

SCALE_UP, SCALE_OUT = "scale-up", "scale-out"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRates:
    """What products and transfers run at on each device.

    `flops_per_s` of large products, `bytes_per_s` of a device's link in one direction by level, `hop_s` the
    latency of a step's transfers, `element_bytes` of a tensor's element, `units` the compute units over which
    a product's tiles are spread, `devices_per_domain` how many devices the scale-up links join, `peer_share`
    the part of a device's scale-up bandwidth that reaches one peer.
    """

    flops_per_s: float
    bytes_per_s: Mapping[str, float]
    hop_s: float
    element_bytes: int
    units: int
    devices_per_domain: int
    peer_share: float = 1.0

    def level_of(self, source: int, target: int) -> str:
        """The level that a transfer between two devices crosses."""
        domains = source // self.devices_per_domain, target // self.devices_per_domain
        return SCALE_UP if domains[0] == domains[1] else SCALE_OUT


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePrice:
    """Seconds of one phase: all of it, its products alone, and transfers that no product runs beside."""

    time_s: float
    product_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPrice:
    """One linear under one partition, for a microbatch.

    `sent_bytes` of a device, the mean of all, by phase, tensor and level. `border_s` and `border_bytes` are
    of the exchanges between the layer's layouts and the grid's; `buffer_bytes` the most that a device holds
    beside homes: received blocks, those on their way, and sums that belong elsewhere.
    """

    name: str
    partition: str
    phases: Mapping[Phase, PhasePrice]
    sent_bytes: Mapping[tuple[Phase, Tensor, str], float]
    border_s: float
    border_bytes: float
    buffer_bytes: float

    @property
    def time_s(self) -> float:
        """Seconds of the three phases and the borders."""
        return sum(price.time_s for price in self.phases.values()) + self.border_s

    @property
    def product_s(self) -> float:
        """Seconds of the products alone."""
        return sum(price.product_s for price in self.phases.values())


def price_linear(linear: Linear, partition: Partition, rates: PartitionRates) -> LinearPrice:
    """The price of a linear. Raises PlanError where its sizes do not divide."""
    check_divides(partition, linear.sizes)
    transfers = transfers_of(partition)
    sent: dict[tuple[Phase, Tensor, str], float] = {}
    for transfer in transfers:
        level = rates.level_of(transfer.source, transfer.target)
        key = (transfer.phase, transfer.tensor, level)
        share = float(elements_of(transfer, partition, linear.sizes)) / partition.num_devices
        sent[key] = sent.get(key, 0.0) + share * rates.element_bytes
    border_bytes = float(border_elements(linear, partition)) * rates.element_bytes
    border_s = 0.0
    if border_bytes:
        widest = rates.level_of(0, partition.num_devices - 1)
        border_s = border_bytes / rates.bytes_per_s[widest] + 2 * rates.hop_s
    return LinearPrice(
        name=linear.name,
        partition=partition.name,
        phases={phase: _phase(linear, partition, phase, transfers, rates) for phase in Phase},
        sent_bytes=sent,
        border_s=border_s,
        border_bytes=border_bytes,
        buffer_bytes=_buffers(linear, partition, transfers, rates),
    )


def border_elements(linear: Linear, partition: Partition) -> Fraction:
    """Elements that a device sends to bring a grid's tensors into Megatron's layouts, forward and backward.

    Among the devices of a row between shards of tokens and the grid's blocks, for the layer's input and
    output; among those of a column between blocks and whole sequences of some heads, for attention.
    Partitions in one dimension have the layer's layouts already.
    """
    if not partition.name.startswith(("home", "2D", "P")):
        return Fraction(0)
    m, n, k = linear.sizes
    side = isqrt(partition.num_devices)
    layer_side, inner_side = (m * n, m * k) if linear.role == "in" else (m * k, m * n)
    crossed = layer_side + (inner_side if linear.name in ("qkv", "proj") else 0)
    return 2 * Fraction(crossed * (side - 1), partition.num_devices * side)


def price_layer(
    form: str, linears: tuple[Linear, ...], *, devices: int, rates: PartitionRates
) -> tuple[LinearPrice, ...]:
    """Every linear of a layer in a form of `layer.LAYER_FORMS`; a grid keeps what is best kept in each phase.

    Raises PlanError where devices or sizes do not fit the form.
    """
    prices = []
    for linear in linears:
        partition = partition_of(form, linear, devices)
        if form == "grid":
            partition = best_grid(linear, partition, rates)
        prices.append(price_linear(linear, partition, rates))
    return tuple(prices)


def best_grid(linear: Linear, grid: Partition, rates: PartitionRates) -> Partition:
    """The home-anchored grid of which each phase walks along the dimension that takes it the least time."""
    check_divides(grid, linear.sizes)
    best = []
    for phase in Phase:
        times = {}
        for dim in DIMS:
            # The other phases do not matter here.
            walk = named_partition(f"{grid.name}-{dim * 3}")
            times[dim] = _phase(linear, walk, phase, transfers_of(walk), rates).time_s
        best.append(min(times, key=lambda dim: (times[dim], dim != _RESULT_WALKS[phase])))
    return named_partition(f"{grid.name}-{''.join(best)}")


_RESULT_WALKS = {Phase.F: "N", Phase.B: "K", Phase.G: "M"}


def _phase(
    linear: Linear,
    partition: Partition,
    phase: Phase,
    transfers: tuple[BlockTransfer, ...],
    rates: PartitionRates,
) -> PhasePrice:
    steps = len(partition.steps[phase])
    m, n, k = (size / pieces for size, pieces in zip(linear.sizes, partition.pieces, strict=True))
    rows, columns = {Phase.F: (m, k), Phase.B: (m, n), Phase.G: (n, k)}[phase]
    product_s = 2 * m * n * k / rates.flops_per_s * waves(rows, columns, rates.units)
    by_step = _transfer_seconds(
        [transfer for transfer in transfers if transfer.phase is phase], linear, partition, rates
    )
    hidden = {step: seconds for step, seconds in by_step.items() if 0 <= step < steps}
    exposed_s = sum(seconds for step, seconds in by_step.items() if step not in hidden)
    return PhasePrice(
        time_s=exposed_s + sum(max(product_s, hidden.get(step, 0.0)) for step in range(steps)),
        product_s=product_s * steps,
        exposed_s=exposed_s,
    )


def _transfer_seconds(
    transfers: list[BlockTransfer], linear: Linear, partition: Partition, rates: PartitionRates
) -> dict[int, float]:
    """Seconds of the transfers of each step: those of the busiest device, on its slowest level."""
    busy: dict[tuple[int, str, int, bool], float] = {}
    pairs: dict[tuple[int, int, int], float] = {}
    for transfer in transfers:
        level = rates.level_of(transfer.source, transfer.target)
        size = float(elements_of(transfer, partition, linear.sizes)) * rates.element_bytes
        for device, is_sent in ((transfer.source, True), (transfer.target, False)):
            key = (transfer.step, level, device, is_sent)
            busy[key] = busy.get(key, 0.0) + size
        if level == SCALE_UP:
            pair = (transfer.step, transfer.source, transfer.target)
            pairs[pair] = pairs.get(pair, 0.0) + size
    seconds: dict[int, float] = {}
    for (step, level, _, _), size in busy.items():
        seconds[step] = max(seconds.get(step, 0.0), size / rates.bytes_per_s[level] + rates.hop_s)
    for (step, _, _), size in pairs.items():
        reached = rates.bytes_per_s[SCALE_UP] * rates.peer_share
        seconds[step] = max(seconds.get(step, 0.0), size / reached + rates.hop_s)
    return seconds


def _buffers(
    linear: Linear, partition: Partition, transfers: tuple[BlockTransfer, ...], rates: PartitionRates
) -> float:
    """The most bytes of received blocks that one step has: those in use and those on their way."""
    arriving: dict[tuple[Phase, int], float] = {}
    for transfer in transfers:
        size = float(elements_of(transfer, partition, linear.sizes)) / partition.num_devices
        key = (transfer.phase, transfer.step)
        arriving[key] = arriving.get(key, 0.0) + size
    most = max(
        (arriving.get((phase, step), 0.0) + arriving.get((phase, step - 1), 0.0))
        for phase in Phase
        for step in range(len(partition.steps[phase]) + 1)
    )
    return most * rates.element_bytes
