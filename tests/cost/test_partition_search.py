"""The search over partition sequences: counts, the paper's figures, and all combinations of a small graph."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from quartet_plugin.cost.devices import device_named
from quartet_plugin.cost.partition_search import (
    edge_costs,
    layer_operators,
    operator_s,
    search_layer,
)
from quartet_plugin.cost.partition_table import rates_of
from quartet_plugin.cost.partitions import SCALE_OUT, SCALE_UP, PartitionRates, price_linear
from quartet_plugin.errors import PlanError
from quartet_plugin.partition.layer import Linear
from quartet_plugin.partition.named import named_partition
from quartet_plugin.partition.search import OperatorGraph, cheapest_states
from quartet_plugin.partition.sequences import overlaps, pieces_of, sequences, slice_layout
from quartet_plugin.partition.table import Phase

LETTERS = ("B", "M", "N", "K", "P2", "P4")
RATES = PartitionRates(
    flops_per_s=1e30,
    bytes_per_s={SCALE_UP: 1.0, SCALE_OUT: 1.0},
    hop_s=0.0,
    element_bytes=1,
    units=1,
    devices_per_domain=32,
)


def test_the_space_has_every_sequence() -> None:
    counts = [len(sequences(LETTERS, bits)) for bits in range(6)]
    assert counts == [1, 4, 17, 72, 306, 1300]
    assert all(len(set(sequences(LETTERS, bits))) == count for bits, count in enumerate(counts))
    assert pieces_of(("K", "P4")) == {"B": 1, "M": 4, "N": 4, "K": 8}


@pytest.mark.parametrize(("letter", "moved"), [("P2", 2), ("P4", 12)])
def test_chained_rings_move_the_papers_blocks(letter: str, moved: int) -> None:
    bits = 2 if letter == "P2" else 4
    before = slice_layout((letter,), Phase.F, ("B", "M", "K"), is_end=True, bits=bits)
    after = slice_layout((letter,), Phase.F, ("B", "M", "N"), is_end=False, bits=bits)
    kept = overlaps([before], [after])[0, 0] * 2**bits
    assert (1 - kept) * 2**bits == pytest.approx(moved)


@pytest.mark.parametrize(("sequence", "name"), [(("P2",), "P2x2"), (("P4",), "P4x4")])
def test_rings_cost_what_the_table_costs(sequence: tuple[str, ...], name: str) -> None:
    """Where nothing is hidden an operator's seconds are those of the partition's transfers."""
    operator = replace(layer_operators(hidden=64, num_heads=16)[9], columns=128)
    seconds = operator_s(operator, sequence, 32, 2 if name == "P2x2" else 4, RATES)
    price = price_linear(Linear(name="fc1", role="in", sizes=(32, 64, 128)), named_partition(name), RATES)
    assert seconds == pytest.approx(sum(phase.time_s for phase in price.phases.values()))


def test_one_dimension_costs_its_all_reduces() -> None:
    operator = layer_operators(hidden=64, num_heads=16)[9]
    assert operator_s(operator, ("K", "K"), 32, 2, RATES) == pytest.approx(2 * 3 / 4 * 32 * 64)
    assert operator_s(operator, ("N", "N"), 32, 2, RATES) == pytest.approx(2 * 3 / 4 * 32 * 256)
    assert operator_s(operator, ("B", "M"), 32, 2, RATES) == pytest.approx(2 * 3 / 4 * 64 * 256)


def test_the_cheapest_of_all_combinations() -> None:
    """fc1, activation and fc2 on four devices: every sequence of each with every one of the others."""
    operators = layer_operators(hidden=64, num_heads=16)[9:12]
    states = [list(sequences(operator.letters, 2)) for operator in operators]
    graph = OperatorGraph(
        [
            np.array([operator_s(operator, state, 64, 2, RATES) for state in of_operator])
            for operator, of_operator in zip(operators, states, strict=True)
        ],
        {
            (i, i + 1): edge_costs(
                states[i],
                operators[i + 1],
                states[i + 1],
                elements=64 * 256,
                bits=2,
                rates=RATES,
            )
            for i in range(2)
        },
    )
    expected = min(
        graph.node_costs[0][i]
        + graph.node_costs[1][j]
        + graph.node_costs[2][k]
        + graph.edge_costs[0, 1][i, j]
        + graph.edge_costs[1, 2][j, k]
        for i, j, k in product(*map(range, map(len, states)))
    )
    assert cheapest_states(graph)[0] == pytest.approx(expected)


def test_the_plan_that_the_paper_prints() -> None:
    """OPT-175B's MLP on eight devices: fc1 {K, P2x2}, relu {D, S, D}, fc2 {N, P2x2}."""
    rates = rates_of(device_named("H100-SXM-80GB"))
    result = search_layer(hidden=12288, num_heads=96, batch=8, tokens=2048, num_devices=8, rates=rates)
    assert result.num_states == 72
    assert result.sequences["fc1"] == ("K", "P2")
    assert result.sequences["activation"] == ("K", "M", "K")
    assert result.sequences["fc2"] == ("N", "P2")


@pytest.mark.timeout(60)
def test_the_whole_space_of_32_devices_is_searched() -> None:
    """All sequences of a linear; docs/partitions.md has the seconds that it takes."""
    rates = rates_of(device_named("H100-SXM-80GB"))
    result = search_layer(hidden=12288, num_heads=96, batch=32, tokens=2048, num_devices=32, rates=rates)
    assert result.num_states == len(sequences(LETTERS, 5))


def test_other_numbers_of_devices_are_refused() -> None:
    for devices in (3, 64):
        with pytest.raises(PlanError, match=f"{devices} devices: must be a power of two from 2 to 32"):
            search_layer(hidden=64, num_heads=4, batch=2, tokens=8, num_devices=devices, rates=RATES)
    with pytest.raises(PlanError, match="scores: no sequence divides its sizes among 4 devices"):
        search_layer(hidden=64, num_heads=1, batch=1, tokens=8, num_devices=4, rates=RATES)
