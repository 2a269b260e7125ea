"""Seconds and bytes of a layer's linears under a tensor partition: products, what hides behind them, borders.

A phase takes its exposed transfers, then in each step the longer of the product and the transfers beside it
(PrimePar's Eq. 7 without its memory term). Products are as many times smaller as there are steps, and lose
what incomplete waves lose. Transfers of one step and level share a device's link; levels work side by side.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from quartet_plugin.cost.compute import waves
from quartet_plugin.cost.partition_loads import SCALE_OUT, SCALE_UP, PartitionLoads, loads_of
from quartet_plugin.partition.layer import Linear, partition_of
from quartet_plugin.partition.named import named_partition
from quartet_plugin.partition.table import DIMS, Partition, Phase, Tensor
from quartet_plugin.partition.traffic import check_divides

__all__ = ["SCALE_OUT", "SCALE_UP", "PartitionRates", "price_layer", "price_linear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRates:
    """The rates of products and transfers on each device.

    `flops_per_s` of large products, `bytes_per_s` of a device's link in one direction by level, `hop_s` the
    latency of a step's transfers, `element_bytes` of a tensor's element, `units` the compute units over which
    a product's tiles are spread, `devices_per_domain` how many devices the scale-up links join, `peer_share`
    the part of a device's scale-up bandwidth that reaches one peer. Of a transfer beside a product the part
    `exposed_share` is exposed all the same; without `has_overlap` all of it is.
    """

    flops_per_s: float
    bytes_per_s: Mapping[str, float]
    hop_s: float
    element_bytes: int
    units: int
    devices_per_domain: int
    peer_share: float = 1.0
    exposed_share: float = 0.0
    has_overlap: bool = True

    def product_s(self, phase: Phase, sizes: tuple[float, float, float]) -> float:
        """Seconds of one product of a phase for pieces of `sizes` (M, N, K)."""
        m, n, k = sizes
        rows, columns = {Phase.F: (m, k), Phase.B: (m, n), Phase.G: (n, k)}[phase]
        return 2 * m * n * k / self.flops_per_s * waves(rows, columns, self.units)

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
    return price_loads(linear, loads_of(partition, devices_per_domain=rates.devices_per_domain), rates)


def price_loads(linear: Linear, loads: PartitionLoads, rates: PartitionRates) -> LinearPrice:
    """The price of a linear under a partition whose loads are known. Raises PlanError as `price_linear`."""
    partition = loads.partition
    check_divides(partition, linear.sizes)
    border_bytes, border_s = border_price(linear, partition, rates)
    return LinearPrice(
        name=linear.name,
        partition=partition.name,
        phases={phase: phase_price(linear, loads, phase, rates) for phase in Phase},
        sent_bytes={
            key: float(blocks * partition.num_elements(key[1], linear.sizes)) * rates.element_bytes
            for key, blocks in loads.sent_blocks.items()
        },
        border_s=border_s,
        border_bytes=border_bytes,
        buffer_bytes=loads.buffer_elements(linear.sizes) * rates.element_bytes,
    )


def border_price(linear: Linear, partition: Partition, rates: PartitionRates) -> tuple[float, float]:
    """Bytes and seconds of the exchanges between a grid's layouts and the layer's, forward and backward."""
    sent = float(border_elements(linear, partition)) * rates.element_bytes
    if not sent:
        return 0.0, 0.0
    widest = rates.level_of(0, partition.num_devices - 1)
    return sent, sent / rates.bytes_per_s[widest] + 2 * rates.hop_s


def border_elements(linear: Linear, partition: Partition) -> Fraction:
    """Elements that a device sends to bring a grid's tensors into Megatron's layouts, forward and backward.

    Among the devices of a row between shards of tokens and the grid's blocks, for the layer's input and
    output; among those of a column between blocks and whole sequences of some heads, for attention.
    Partitions in one dimension have the layer's layouts already.
    """
    if not is_grid(partition):
        return Fraction(0)
    m, n, k = linear.sizes
    side = partition.mesh[-1]
    layer_side, inner_side = (m * n, m * k) if linear.role == "in" else (m * k, m * n)
    crossed = layer_side + (inner_side if linear.name in ("qkv", "proj") else 0)
    return 2 * Fraction(crossed * (side - 1), partition.num_devices * side)


def is_grid(partition: Partition) -> bool:
    """Whether a partition cuts in two dimensions, maybe with another one around: its layouts have borders."""
    name = partition.name
    return name.startswith(("2D", "P")) or "home" in name


def price_layer(
    form: str, linears: tuple[Linear, ...], *, num_devices: int, rates: PartitionRates
) -> tuple[LinearPrice, ...]:
    """Every linear of a layer in a form of `layer.LAYER_FORMS`; a grid keeps what is best kept in each phase.

    Raises PlanError where devices or sizes do not fit the form.
    """
    prices = []
    for linear in linears:
        partition = partition_of(form, linear, num_devices)
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
            loads = loads_of(walk, devices_per_domain=rates.devices_per_domain)
            times[dim] = phase_price(linear, loads, phase, rates).time_s
        best.append(min(times, key=lambda dim: (times[dim], dim != _RESULT_WALKS[phase])))
    return named_partition(f"{grid.name}-{''.join(best)}")


_RESULT_WALKS = {Phase.F: "N", Phase.B: "K", Phase.G: "M"}


def phase_price(linear: Linear, loads: PartitionLoads, phase: Phase, rates: PartitionRates) -> PhasePrice:
    """The price of one phase of a linear whose sizes divide."""
    partition = loads.partition
    steps = len(partition.steps[phase])
    m, n, k = (size / pieces for size, pieces in zip(linear.sizes, partition.pieces, strict=True))
    product_s = rates.product_s(phase, (m, n, k))
    by_step = _transfer_seconds(linear, loads, phase, rates)
    is_beside = {step: rates.has_overlap and 0 <= step < steps for step in by_step}
    exposed_s = sum(seconds for step, seconds in by_step.items() if not is_beside[step])
    hidden = [by_step[step] if is_beside.get(step) else 0.0 for step in range(steps)]
    return PhasePrice(
        time_s=exposed_s + sum(max(product_s + rates.exposed_share * ring_s, ring_s) for ring_s in hidden),
        product_s=product_s * steps,
        exposed_s=exposed_s,
    )


def _transfer_seconds(
    linear: Linear, loads: PartitionLoads, phase: Phase, rates: PartitionRates
) -> dict[int, float]:
    """Seconds of the transfers of each step: those of the busiest device, on its slowest level."""
    seconds: dict[int, float] = {}
    for load in loads.steps[phase]:
        size = load.elements(loads.partition, linear.sizes) * rates.element_bytes
        reached = rates.bytes_per_s[load.level] * (rates.peer_share if load.is_pair else 1.0)
        seconds[load.step] = max(seconds.get(load.step, 0.0), size / reached + rates.hop_s)
    return seconds
