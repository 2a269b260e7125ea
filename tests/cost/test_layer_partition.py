"""A plan's tensor partition in the cost model: bytes of the table, what is hidden, products, memory."""

from dataclasses import replace
from fractions import Fraction

import pytest

from quartet_plugin.cost import communication, held_bytes
from quartet_plugin.cost.compute import Rates
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.devices import device_named
from quartet_plugin.cost.layer_partition import (
    buffer_bytes,
    exposed_times,
    linear_prices,
    partition_products,
    run_rates,
)
from quartet_plugin.cost.memory import peak_memory
from quartet_plugin.cost.predict import predict, predict_rows
from quartet_plugin.cost.run import ON_CPU, TrainingRun, run_of, uniform_cluster_of_device
from quartet_plugin.model.tensor_partition import partition_from_label
from quartet_plugin.partition.layer import linears_of, planned_layer
from quartet_plugin.partition.table import Phase, Tensor
from tests.partition.counted import traffic
from tests.space.jobs import make_layout, make_shape

CONSTANTS = fitted()
LABELS = (
    ("rings", 4),
    ("grid", 4),
    ("grid", 9),
    ("grid outer 2", 8),
    ("attention rings, mlp grid", 4),
    ("attention stock, mlp grid outer 2", 8),
)


def run(label: str, devices: int, *, on_cpu: bool = False, hidden: int = 1152) -> TrainingRun:
    shape = make_shape(
        num_layers=2,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=72,
        num_query_groups=72,
        kv_channels=hidden // 72,
        seq_length=1152,
    )
    layout = make_layout(
        tensor_parallel=devices,
        pipeline_parallel=1,
        micro_batch_size=2,
        sequence_parallel=True,
        tensor_partition=partition_from_label(label),
    )
    return run_of(
        shape,
        layout,
        global_batch_size=8,
        layers_per_stage=(2,),
        cluster=uniform_cluster_of_device(
            device_named("H100-SXM-80GB"), num_devices=devices, devices_per_node=max(8, devices)
        ),
        precision="fp32" if on_cpu else "bf16",
        software=ON_CPU if on_cpu else None,
    )


@pytest.mark.parametrize(("label", "devices"), LABELS)
def test_bytes_priced_are_the_bytes_of_the_table(label: str, devices: int) -> None:
    found = run(label, devices)
    partition = found.layout.tensor_partition
    assert partition is not None
    linears = linears_of(found.shape, tokens=2 * 1152)
    prices = {price.name: price for price in linear_prices(found, CONSTANTS)}
    for linear, cut in zip(linears, planned_layer(partition, linears, devices), strict=True):
        if cut.name.startswith(("column", "row")):
            assert linear.name not in prices
            continue
        expected: dict[tuple[Phase, Tensor], Fraction] = {}
        for key, elements in traffic(cut, linear.sizes).items():
            expected[key.phase, key.tensor] = expected.get((key.phase, key.tensor), Fraction(0)) + elements
        sent = {key[:2]: size for key, size in prices[linear.name].sent_bytes.items()}
        assert sent == {key: 2 * float(elements) for key, elements in expected.items()}


@pytest.mark.parametrize(
    ("label", "devices", "side"), [("grid", 4, 2), ("grid", 9, 3), ("grid outer 2", 8, 2)]
)
def test_bytes_of_borders(label: str, devices: int, side: int) -> None:
    """Row exchanges and attention's column exchanges: each sends (q - 1)/q of a shard, both ways."""
    found = run(label, devices)
    sent = {price.name: price.border_bytes for price in linear_prices(found, CONSTANTS)}
    shard = 2 * 2 * 2 * 1152 * 1152 / devices * (side - 1) / side
    assert sent == {"qkv": shard * 4, "proj": shard * 2, "fc1": shard, "fc2": shard}


@pytest.mark.parametrize("hidden", [288, 4608])
def test_a_phase_takes_one_product_and_the_longer_of_both_in_the_others(hidden: int) -> None:
    found = run("grid", 9, hidden=hidden)
    rates = run_rates(found, CONSTANTS)
    for price in linear_prices(found, CONSTANTS):
        for phase in Phase:
            sent = sum(size for key, size in price.sent_bytes.items() if key[0] is phase)
            ring_s = sent / 2 / rates.bytes_per_s["scale-up"] + rates.hop_s
            product_s = price.phases[phase].product_s / 3
            expected = product_s + 2 * max(product_s + CONSTANTS.tensor_exposed * ring_s, ring_s)
            assert price.phases[phase].time_s == pytest.approx(expected, rel=1e-12)
            assert price.phases[phase].exposed_s == 0


def test_nothing_is_hidden_on_processors() -> None:
    found = run("grid", 4, on_cpu=True)
    rates = run_rates(found, CONSTANTS)
    for price in linear_prices(found, CONSTANTS):
        for phase in Phase:
            sent = sum(size for key, size in price.sent_bytes.items() if key[0] is phase)
            transfers_s = sent / rates.bytes_per_s["scale-up"] + rates.hop_s
            assert price.phases[phase].exposed_s == pytest.approx(transfers_s, rel=1e-12)
            assert price.phases[phase].time_s - price.phases[phase].product_s == pytest.approx(transfers_s)


def test_products_are_as_many_times_smaller() -> None:
    found, stock = run("grid", 9), run("stock", 9)
    rates = Rates(found, CONSTANTS)
    partition = found.layout.tensor_partition
    assert partition is not None
    products, starts = partition_products(found, rates, partition)
    expected = sum(
        3 * rates.gemm_s(m / 3, k / 3, n / 3)
        for m, n, k in (x.sizes for x in linears_of(found.shape, tokens=2304))
    )
    assert products.forward_s == pytest.approx(expected)
    assert products.total_s > sum(
        rates.gemm_s(m, k / 9, n) for m, n, k in (x.sizes for x in linears_of(stock.shape, tokens=2304))
    )
    assert starts.forward_s == pytest.approx(4 * 2 * rates.launch_s)


def test_blocks_are_priced_by_themselves() -> None:
    stock, repeated = communication.tensor_parallel(run("stock", 4), CONSTANTS)
    both = run("attention rings, mlp grid", 4)
    alone = [run(label, 4) for label in ("attention rings, mlp stock", "attention stock, mlp grid")]
    together = exposed_times(both, CONSTANTS)
    apart = [exposed_times(found, CONSTANTS) for found in alone]
    assert together.total_s == pytest.approx(sum(times.total_s for times in apart))
    for found, times in zip(alone, apart, strict=True):
        exposed, again = communication.tensor_parallel(found, CONSTANTS)
        assert exposed.total_s == pytest.approx(stock.total_s / 2 + times.total_s)
        assert again == pytest.approx(repeated / 2 + times.forward_s)
    assert communication.tensor_parallel(both, CONSTANTS)[0].total_s == pytest.approx(together.total_s)


@pytest.mark.parametrize(("label", "devices"), LABELS[:4])
def test_saved_tensors_are_those_of_stock_with_sequence_parallelism(label: str, devices: int) -> None:
    memories = [peak_memory(run(name, devices)) for name in (label, "stock")]
    assert memories[0].activations_bytes == memories[1].activations_bytes
    assert memories[0].parameters_bytes == memories[1].parameters_bytes
    buffers = buffer_bytes(run(label, devices))
    assert (
        0
        <= memories[0].temporary_bytes - memories[1].temporary_bytes
        <= buffers + 1e-6 * memories[1].temporary_bytes
    )


def test_a_weight_gradient_waits_with_shards_alone() -> None:
    held = {label: held_bytes.layer_bytes(run(label, 4), experts=None) for label in ("stock", "grid")}
    sizes = [linear.sizes for linear in linears_of(run("grid", 4).shape, tokens=2304)]
    assert held["grid"] == sum(2 * m * (n + k) / 4 for m, n, k in sizes)
    assert held["grid"] < held["stock"]


def test_a_row_may_say_its_partition() -> None:
    row = {
        "model": "gpt-3 175b",
        "gpu": "H100-SXM-80GB",
        "gpus": 8,
        "tp": 4,
        "pp": 2,
        "layers": 4,
        "hidden": 4096,
        "heads": 32,
        "seq_len": 2048,
        "vocab": 51200,
        "gbs": 8,
    }
    rows = [
        row,
        *({**row, "tensor_partition": label} for label in ("stock", "rings", "grid", "grid outer 2")),
    ]
    stock, same, rings, grid, outer = predict_rows(rows, where="rows")
    assert "must be 2 x 4" in outer["error"]
    assert len({entry["iter_time_s"] for entry in (stock, rings, grid)}) == 3
    assert stock["iter_time_s"] == same["iter_time_s"]


def test_a_longer_transfer_is_never_cheaper() -> None:
    found = run("rings", 4)
    slow = replace(found, cluster=replace(found.cluster, scale_up_bytes_per_s=1e9))
    assert predict(slow, CONSTANTS).iter_time_s > predict(found, CONSTANTS).iter_time_s
