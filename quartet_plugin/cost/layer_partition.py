"""The price of a plan's tensor partition in a layer: products, what they leave exposed, buffers.

Blocks that a plan leaves stock have the collectives of `communication`; the others follow from their tables.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from quartet_plugin.cost.compute import Rates
from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.partition_loads import SCALE_OUT, SCALE_UP, PartitionLoads, planned_loads
from quartet_plugin.cost.partitions import (
    LinearPrice,
    PartitionRates,
    border_price,
    phase_price,
    price_loads,
)
from quartet_plugin.cost.run import Overlap, TrainingRun
from quartet_plugin.cost.times import Times
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.tensor_partition import BlockPartition, TensorPartition
from quartet_plugin.partition.layer import BLOCK_OF, Linear, linears_of
from quartet_plugin.partition.table import Phase

_STOCK = BlockPartition(form="stock")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRates(PartitionRates):
    """The rates of a run: products take what the run's other products take."""

    compute: Rates

    def product_s(self, phase: Phase, sizes: tuple[float, float, float]) -> float:
        """Seconds of one product; a weight gradient's is added to the sum of gradients."""
        m, n, k = sizes
        match phase:
            case Phase.F:
                return self.compute.gemm_s(m, k, n)
            case Phase.B:
                return self.compute.gemm_s(m, n, k)
        return self.compute.gemm_s(k, n, m, is_gradient=True) * self.compute.ratios.weight_product


def run_rates(run: TrainingRun, constants: Constants) -> RunRates:
    """The rates of a run's devices. Where its software overlaps no collective nothing is hidden.

    Elsewhere a transfer beside a product leaves the share that overlapped collectives leave.
    """
    cluster = run.cluster
    device = cluster.device
    is_mesh = device.scale_up_topology == "mesh"
    rates = Rates(run, constants)
    return RunRates(
        flops_per_s=rates.matmul,
        bytes_per_s={
            SCALE_UP: cluster.scale_up_bytes_per_s * constants.scale_up,
            SCALE_OUT: cluster.scale_out_bytes_per_s * constants.scale_out,
        },
        hop_s=constants.hop_s / 4,
        element_bytes=run.element_bytes,
        units=device.compute_units,
        devices_per_domain=cluster.scale_up_devices,
        peer_share=1 / max(1, device.scale_up_devices - 1) if is_mesh else 1.0,
        exposed_share=constants.tensor_exposed,
        has_overlap=run.software.tensor_overlap is not Overlap.NONE,
        compute=rates,
    )


def linear_prices(run: TrainingRun, constants: Constants) -> tuple[LinearPrice, ...]:
    """The prices of the linears that the plan does not leave stock, for a microbatch."""
    partition = run.layout.tensor_partition
    if partition is None:
        return ()
    rates = run_rates(run, constants)
    return tuple(
        price_loads(linear, loads, rates)
        for linear, block, loads in _cut_linears(run, partition)
        if block.form != "stock"
    )


def exposed_times(run: TrainingRun, constants: Constants) -> Times:
    """Seconds of a layer's transfers that no product hides, borders included."""
    partition = run.layout.tensor_partition
    if partition is None:
        return Times()
    rates = run_rates(run, constants)
    exposed = []
    for linear, block, loads in _cut_linears(run, partition):
        if block.form == "stock":
            continue
        border_s = border_price(linear, loads.partition, rates)[1]
        prices = (phase_price(linear, loads, phase, rates) for phase in Phase)
        forward, inputs, weights = (price.time_s - price.product_s for price in prices)
        exposed.append(Times(forward + border_s / 2, inputs + border_s / 2, weights))
    return Times.sum_of(exposed)


def stock_share(partition: TensorPartition) -> float:
    """The part of a layer's two blocks that a plan leaves stock."""
    blocks = partition.blocks.values()
    return sum(block.form == "stock" for block in blocks) / len(blocks)


def partition_products(run: TrainingRun, rates: Rates, partition: TensorPartition) -> tuple[Times, Times]:
    """Seconds of a layer's products, and those of starting the products that a table adds."""
    products, starts = [], []
    for linear, _, loads in _cut_linears(run, partition):
        m, n, k = (size / pieces for size, pieces in zip(linear.sizes, loads.partition.pieces, strict=True))
        steps = [len(loads.partition.steps[phase]) for phase in Phase]
        seconds = (rates.gemm_s(m, k, n), rates.gemm_s(m, n, k), rates.gemm_s(k, n, m, is_gradient=True))
        forward, inputs, weights = (count * each for count, each in zip(steps, seconds, strict=True))
        products.append(Times(forward, inputs, weights * rates.ratios.weight_product))
        starts.append(Times(*((count - 1) * rates.launch_s for count in steps)))
    return Times.sum_of(products), Times.sum_of(starts)


def buffer_bytes(run: TrainingRun) -> float:
    """Bytes of received blocks at most, beyond the gathered tensors that stock holds in the same place."""
    partition = run.layout.tensor_partition
    if partition is None:
        return 0.0
    received = gathered = 0.0
    for linear, _, loads in _cut_linears(run, partition):
        received = max(received, loads.buffer_elements(linear.sizes))
        gathered = max(gathered, _loads(run, _STOCK, linear).buffer_elements(linear.sizes))
    return run.element_bytes * max(0.0, received - gathered)


def _cut_linears(
    run: TrainingRun, partition: TensorPartition
) -> Iterator[tuple[Linear, BlockPartition, PartitionLoads]]:
    blocks = partition.blocks
    for linear in _linears(run.shape, round(run.tokens_per_microbatch)):
        block = blocks[BLOCK_OF[linear.name]]
        yield linear, block, _loads(run, block, linear)


@lru_cache(maxsize=256)
def _linears(shape: ModelShape, tokens: int) -> tuple[Linear, ...]:
    return linears_of(shape, tokens=tokens)


def _loads(run: TrainingRun, block: BlockPartition, linear: Linear) -> PartitionLoads:
    return planned_loads(
        block,
        linear.role,
        num_devices=run.layout.tensor_parallel,
        devices_per_domain=run.cluster.scale_up_devices,
    )
