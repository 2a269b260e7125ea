"""A table with one wrong coefficient is refused where plain counting refuses it, and the cell is shown."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_plugin.errors import PlanError
from quartet_plugin.partition.named import build, named_partition
from quartet_plugin.partition.table import (
    DIMS,
    PRODUCTS,
    Home,
    Partition,
    Phase,
    Steps,
    Tensor,
    Triple,
    block_of,
    coordinates,
)
from quartet_plugin.partition.validate import validate
from tests.partition.test_lockstep import sizes_for, worst_error

# Of (row, column, step, 1), for M, N and K.
Coefficients = tuple[tuple[int, int, int, int], ...]
P = {
    Phase.F: ((1, 0, 0, 0), (1, 1, 1, 0), (0, 1, 0, 0)),
    Phase.B: ((1, 0, 0, 0), (1, 1, 0, -1), (0, 1, 1, 0)),
}


def steps_of(coefficients: Coefficients, q: int) -> Steps:
    """The products of a phase whose indices are linear in row, column and step."""
    return tuple(
        tuple(
            (
                int(np.dot(coefficients[0], (r, c, t, 1))) % q,
                int(np.dot(coefficients[1], (r, c, t, 1))) % q,
                int(np.dot(coefficients[2], (r, c, t, 1))) % q,
            )
            for r, c in coordinates((q, q))
        )
        for t in range(q)
    )


def is_valid(partition: Partition) -> bool:
    try:
        validate(partition)
    except PlanError:
        return False
    return True


def has_every_product(steps: Steps, q: int) -> bool:
    counts = Counter(triple for triples in steps for triple in triples)
    return len(counts) == q**3 and set(counts.values()) == {1}


def goes_round(partition: Partition) -> bool:
    """Whether the carried tensors have one user a block and step, and each phase begins where one ended."""
    at: dict[Tensor, list[tuple[int, int]]] = {
        tensor: [blocks[0] for blocks in partition.homes[tensor].blocks] for tensor in partition.carried
    }
    for phase in Phase:
        for tensor in PRODUCTS[phase][:2]:
            rows = [[block_of(tensor, triple) for triple in triples] for triples in partition.steps[phase]]
            if rows[0] != at[tensor] or any(len(set(row)) != len(row) for row in rows):
                return False
            at[tensor] = rows[-1]
        if phase is Phase.B:
            at[Tensor.WEIGHT] = [blocks[0] for blocks in partition.homes[Tensor.WEIGHT].blocks]
    return True


coefficient = st.integers(-1, 2)
coefficients = st.tuples(*[st.tuples(*[coefficient] * 4)] * 3)


@given(q=st.integers(2, 4), chosen=st.tuples(*[coefficients] * 3))
def test_random_tables_are_judged_as_by_counting(q: int, chosen: tuple[Coefficients, ...]) -> None:
    steps = {phase: steps_of(table, q) for phase, table in zip(Phase, chosen, strict=True)}
    partition = replace(named_partition(f"home{q}x{q}-in"), steps=steps)
    assert is_valid(partition) == all(has_every_product(rows, q) for rows in steps.values())


@given(
    q=st.integers(2, 4),
    phase=st.sampled_from([Phase.F, Phase.B]),
    dim=st.integers(0, 2),
    place=st.integers(0, 3),
    value=coefficient,
)
def test_one_coefficient_of_the_paper_changed(q: int, phase: Phase, dim: int, place: int, value: int) -> None:
    changed = [list(row) for row in P[phase]]
    changed[dim][place] = value
    table: Coefficients = tuple((row[0], row[1], row[2], row[3]) for row in changed)
    original = named_partition(f"P{q}x{q}")
    partition = replace(original, steps={**original.steps, phase: steps_of(table, q)})
    expected = has_every_product(partition.steps[phase], q) and goes_round(partition)
    assert is_valid(partition) == expected
    if expected:
        assert worst_error(partition, sizes_for(partition), np.float64, 2) < 1e-14
    else:
        with pytest.raises(PlanError) as refused:
            validate(partition)
        assert str(refused.value).count("[") == 1, "the offending cell alone is in brackets"


def test_a_refusal_shows_the_table_with_the_cell() -> None:
    partition = named_partition("P2x2")
    steps = [list(row) for row in partition.steps[Phase.F]]
    steps[1][2] = steps[0][1]
    changed = replace(partition, steps={**partition.steps, Phase.F: tuple(map(tuple, steps))})
    with pytest.raises(PlanError) as refused:
        validate(changed)
    assert str(refused.value).splitlines()[:4] == [
        "P2x2: product (M 0, N 1, K 1) at F1, device (1,0): twice, also at F0, device (0,1); each once",
        "step  (0,0)            (0,1)            (1,0)            (1,1)",
        "F0    O00+=I00 W00     (O01+=I01 W11)   O10+=I11 W10     O11+=I10 W01",
        "F1    O00+=I01 W10     O01+=I00 W01     [O01+=I01 W11]   O11+=I11 W11",
    ]


def test_a_phase_must_begin_where_the_one_before_ended() -> None:
    partition = named_partition("P3x3")
    rotated = partition.steps[Phase.B][1:] + partition.steps[Phase.B][:1]
    with pytest.raises(PlanError, match=r"at B0, device \(0,0\): the device holds W20; a phase begins where"):
        validate(replace(partition, steps={**partition.steps, Phase.B: rotated}))


def test_a_carried_tensor_has_no_copies() -> None:
    summa = named_partition("2D2x2")
    with pytest.raises(PlanError, match=r"I00 at F0, device \(0,1\): device \(0,0\) needs the only copy"):
        validate(replace(summa, carried=frozenset({Tensor.INPUT})))


def test_homes_that_lack_a_block_are_refused() -> None:
    partition = named_partition("home2x2-in")
    homes = {**partition.homes, Tensor.INPUT: Home((((0, 0),),) * 4)}
    with pytest.raises(PlanError, match="I01 is assigned to no device"):
        validate(replace(partition, homes=homes))
    homes = {**partition.homes, Tensor.WEIGHT: partition.homes[Tensor.OUTPUT]}
    with pytest.raises(PlanError, match="homes of W and dW differ"):
        validate(replace(partition, homes=homes))


def test_pieces_that_no_product_needs_are_refused() -> None:
    def index(place: tuple[int, ...], step: int) -> Triple:
        return place[0], step, 0

    blocks = {tensor: lambda place: [(0, 0), (1, 0), (0, 1), (1, 1)] for tensor in Tensor}
    table = build((2,), (2, 2, 2), dict.fromkeys(Phase, index), 2, blocks)
    with pytest.raises(PlanError, match="phase F has 4 of 8 products"):
        validate(table)
    assert DIMS == ("M", "N", "K")
