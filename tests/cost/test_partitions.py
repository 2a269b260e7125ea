"""Prices of tensor partitions against closed forms, against counted bytes, and against all choices."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from quartet_plugin.cost.partition_table import price_rows, price_table
from quartet_plugin.cost.partitions import (
    SCALE_OUT,
    SCALE_UP,
    PartitionRates,
    best_grid,
    border_elements,
    price_layer,
    price_linear,
)
from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.partition.layer import Linear
from quartet_plugin.partition.named import named_partition
from quartet_plugin.partition.table import Phase
from tests.partition.lockstep import run_lockstep
from tests.partition.test_lockstep import factors, sizes_for

RATES = PartitionRates(
    flops_per_s=1e9,
    bytes_per_s={SCALE_UP: 1e6, SCALE_OUT: 1e5},
    hop_s=0.0,
    element_bytes=2,
    units=1,
    devices_per_domain=1024,
)
BYTES_ALONE = PartitionRates(
    flops_per_s=1e30,
    bytes_per_s={SCALE_UP: 1.0, SCALE_OUT: 1.0},
    hop_s=0.0,
    element_bytes=1,
    units=1,
    devices_per_domain=1024,
)


def layer(hidden: int, tokens: int) -> tuple[Linear, ...]:
    return (
        Linear(name="qkv", role="in", sizes=(tokens, hidden, 3 * hidden)),
        Linear(name="proj", role="out", sizes=(tokens, hidden, hidden)),
        Linear(name="fc1", role="in", sizes=(tokens, hidden, 4 * hidden)),
        Linear(name="fc2", role="out", sizes=(tokens, 4 * hidden, hidden)),
    )


@pytest.mark.parametrize("q", [2, 4])
@pytest.mark.parametrize("sizes", [(64, 64, 64), (512, 512, 1024), (1024, 16, 2048)])
def test_a_ring_takes_one_product_and_the_longer_of_both_in_the_others(
    q: int, sizes: tuple[int, int, int]
) -> None:
    m, n, k = sizes
    price = price_linear(
        Linear(name="fc1", role="in", sizes=sizes), named_partition(f"home{q}x{q}-in"), RATES
    )
    product_s = 2 * m * n * k / q**3 / 1e9
    for phase, moved in ((Phase.F, m * n + n * k), (Phase.B, m * k + n * k), (Phase.G, m * n + m * k)):
        ring_s = 2 * moved / q**2 / 1e6
        expected = product_s + (q - 1) * max(product_s, ring_s)
        assert price.phases[phase].time_s == pytest.approx(expected, rel=1e-12)
        assert price.phases[phase].exposed_s == 0


def test_collectives_stop_the_products() -> None:
    price = price_linear(Linear(name="fc1", role="in", sizes=(64, 64, 64)), named_partition("column4"), RATES)
    product_s = 2 * 64**3 / 4 / 1e9
    gather_s = 3 / 4 * 64 * 64 * 2 / 1e6
    for phase in Phase:
        assert price.phases[phase].time_s == pytest.approx(product_s + gather_s, rel=1e-12)


@pytest.mark.parametrize(
    "name", ["column4", "row4", "ring-row4", "2D2x2", "3D2x2x2", "P2x2", "home2x2-in-KMN"]
)
def test_priced_bytes_are_counted_bytes(name: str) -> None:
    partition = named_partition(name)
    sizes = sizes_for(partition)
    price = price_linear(Linear(name="fc1", role="in", sizes=sizes), partition, RATES)
    done = run_lockstep(partition, *factors(sizes, np.float32))
    counted: dict[tuple[Phase, str], float] = {}
    for (phase, tensor, _), elements in done.sent_elements.items():
        counted[phase, tensor] = counted.get((phase, tensor), 0) + elements
    priced = {(phase, tensor): size for (phase, tensor, _), size in price.sent_bytes.items()}
    assert priced == {key: 2 * value / partition.num_devices for key, value in counted.items()}


def test_levels_are_told_apart() -> None:
    nodes = PartitionRates(
        flops_per_s=1e30,
        bytes_per_s={SCALE_UP: 10.0, SCALE_OUT: 1.0},
        hop_s=0.0,
        element_bytes=1,
        units=1,
        devices_per_domain=2,
    )
    linear = Linear(name="fc1", role="in", sizes=(8, 8, 8))
    price = price_linear(linear, named_partition("home2x2-in"), nodes)
    assert {key[1:]: size for key, size in price.sent_bytes.items() if key[0] is Phase.F} == {
        ("I", SCALE_UP): 16.0,
        ("W", SCALE_OUT): 16.0,
    }
    assert price.phases[Phase.F].time_s == pytest.approx(16.0)


def test_a_mesh_reaches_a_peer_with_its_share() -> None:
    """A ring has one peer a step, a gather all of them: only the ring is slower on a mesh."""
    mesh = replace(BYTES_ALONE, peer_share=1 / 3)
    linear = Linear(name="fc1", role="in", sizes=(8, 8, 8))
    for name, slower in (("ring-column4", 3.0), ("column4", 1.0)):
        times = [price_linear(linear, named_partition(name), rates).time_s for rates in (BYTES_ALONE, mesh)]
        assert times[1] / times[0] == pytest.approx(slower)


# Elements sent a device in tokens x hidden, borders included: docs/partitions.md.
@pytest.mark.parametrize(
    ("devices", "ratio", "form", "expected"),
    [
        (4, 1, "stock", 7.5),
        (4, 1, "rings", 7.5),
        (4, 1, "grid", 14.0),
        (4, 4, "grid", 7.25),
        (16, 1, "stock", 9.375),
        (16, 1, "grid", 9.75),
        (16, 4, "grid", 4.6875),
        (8, 1, "3d", 7.0),
    ],
)
def test_elements_of_a_layer(devices: int, ratio: int, form: str, expected: float) -> None:
    hidden = 64
    tokens = ratio * hidden
    prices = price_layer(form, layer(hidden, tokens), num_devices=devices, rates=BYTES_ALONE)
    sent = sum(sum(price.sent_bytes.values()) + price.border_bytes for price in prices)
    assert sent / (tokens * hidden) == expected


@pytest.mark.parametrize("sizes", [(64, 16, 16), (16, 64, 16), (16, 16, 64), (32, 32, 32)])
@pytest.mark.parametrize("rates", [RATES, BYTES_ALONE], ids=["products hide", "bytes alone"])
def test_the_grid_is_the_best_of_all_walks(sizes: tuple[int, int, int], rates: PartitionRates) -> None:
    linear = Linear(name="fc1", role="in", sizes=sizes)
    chosen = best_grid(linear, named_partition("home2x2-in"), rates)
    times = [
        price_linear(linear, named_partition(f"home2x2-in-{''.join(walk)}"), rates).time_s
        for walk in product("MNK", repeat=3)
    ]
    assert price_linear(linear, chosen, rates).time_s == min(times)


def test_borders_are_the_exchanges_of_a_layer() -> None:
    """Four row exchanges and those of attention's columns, forward and backward: 2.0 Th on four devices."""
    linears = layer(64, 64)
    total = sum(border_elements(linear, named_partition(f"home2x2-{linear.role}")) for linear in linears)
    assert total == 2 * 64 * 64
    assert border_elements(linears[0], named_partition("column4")) == 0


def test_the_table_has_the_forms_that_fit() -> None:
    content = price_table(hidden=1024, tokens=1024, num_devices=8, device="H100-SXM-80GB")
    assert set(content["forms"]) == {"stock", "stock-replicated", "rings", "3d"}
    assert len(price_rows(content)) == 5
    assert sum("must be a square" in remark for remark in content["remarks"]) == 3
    times = [row["time_s"] for row in content["forms"].values()]
    assert times == sorted(times)


def test_devices_beyond_the_fast_links_are_refused() -> None:
    with pytest.raises(PlanError, match="16 devices: the fast links of H100-SXM-80GB join 8"):
        price_table(hidden=1024, tokens=1024, num_devices=16, device="H100-SXM-80GB")
    with pytest.raises(ConfigError, match="device 'none'"):
        price_table(hidden=1024, tokens=1024, num_devices=4, device="none")
    with pytest.raises(PlanError, match="no form of partition fits"):
        price_table(hidden=1023, tokens=1021, num_devices=4, device="H100-SXM-80GB")
