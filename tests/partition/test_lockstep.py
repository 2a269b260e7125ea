"""Every named partition computes the layer, sends what is derived, and leaves the weight where it was."""

from itertools import product
from math import lcm

import numpy as np
import pytest

from quartet_plugin.errors import PlanError
from quartet_plugin.partition.named import FAMILIES, named_partition
from quartet_plugin.partition.table import Partition, Phase, Tensor, Triple
from quartet_plugin.partition.traffic import num_parts
from quartet_plugin.partition.validate import validate
from tests.partition.counted import sent_by_tensor
from tests.partition.lockstep import Matrix, assembled, pieces_at_home, run_lockstep

HOME = [f"home2x2-{skew}-{''.join(walk)}" for skew in ("in", "out") for walk in product("MNK", repeat=3)]
NAMED = [
    "row4",
    "column4-replicated",
    "ring-row4",
    "2D3x3",
    "P3x3",
    "P4x4",
    "P8x8",
    "home3x3-in",
    "home4x4-out",
    "home8x8-in",
    "M2-home2x2-in",
    "N2-home2x2-out",
    "K2-ring-row2",
    *(family.example for family in FAMILIES),
]


def sizes_for(partition: Partition) -> Triple:
    """Sizes that every piece and part divides, each another one."""
    parts = max(num_parts(partition, tensor) for tensor in Tensor)
    m, n, k = (pieces * parts for pieces in partition.pieces)
    return 3 * m, 2 * n, 5 * k


def factors(sizes: Triple, dtype: type) -> tuple[Matrix, Matrix, Matrix]:
    m, n, k = sizes
    rng = np.random.default_rng(m + n + k)
    return (
        rng.normal(size=(m, n)).astype(dtype),
        rng.normal(size=(n, k)).astype(dtype),
        rng.normal(size=(m, k)).astype(dtype),
    )


def worst_error(partition: Partition, sizes: Triple, dtype: type, num_microbatches: int) -> float:
    """The largest error of the three results, relative to the largest value."""
    input_, weight, grad = factors(sizes, dtype)
    done = run_lockstep(partition, input_, weight, grad, num_microbatches=num_microbatches)
    expected = {
        Tensor.OUTPUT: input_ @ weight,
        Tensor.INPUT_GRAD: grad @ weight.T,
        Tensor.WEIGHT_GRAD: input_.T @ grad,
    }
    return max(
        float(
            np.abs(assembled(partition, tensor, done.held[tensor], sizes) - whole).max() / np.abs(whole).max()
        )
        for tensor, whole in expected.items()
    )


@pytest.mark.parametrize("name", [*NAMED, *HOME])
def test_results_are_the_layers(name: str) -> None:
    partition = named_partition(name)
    validate(partition)
    sizes = sizes_for(partition)
    assert worst_error(partition, sizes, np.float64, 2) < 1e-14
    assert worst_error(partition, sizes, np.float32, 1) < 1e-6


@pytest.mark.parametrize("name", [*NAMED, *HOME])
def test_elements_sent_are_those_derived(name: str) -> None:
    partition = named_partition(name)
    sizes = sizes_for(partition)
    done = run_lockstep(partition, *factors(sizes, np.float64))
    sent: dict[tuple[Phase, Tensor], int] = {}
    for (phase, tensor, _), elements in done.sent_elements.items():
        sent[phase, tensor] = sent.get((phase, tensor), 0) + elements
    derived = {key: value * partition.num_devices for key, value in sent_by_tensor(partition, sizes).items()}
    assert sent == derived


@pytest.mark.parametrize("name", ["P4x4", "home4x4-in-KMN", "3D2x2x2"])
def test_the_weight_is_where_it_was(name: str) -> None:
    partition = named_partition(name)
    input_, weight, grad = factors(sizes_for(partition), np.float64)
    done = run_lockstep(partition, input_, weight, grad, num_microbatches=3)
    before = pieces_at_home(partition, Tensor.WEIGHT, weight)
    assert [pieces.keys() for pieces in done.held[Tensor.WEIGHT]] == [pieces.keys() for pieces in before]
    for held, first in zip(done.held[Tensor.WEIGHT], before, strict=True):
        assert all((held[piece] == first[piece]).all() for piece in first)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_sizes_that_do_not_divide_are_refused(axis: int) -> None:
    sizes = [lcm(2, 3)] * 3
    sizes[axis] = 5
    with pytest.raises(PlanError, match=f"P2x2: {'MNK'[axis]} is 5; must be a multiple of 2"):
        run_lockstep(named_partition("P2x2"), *factors((sizes[0], sizes[1], sizes[2]), np.float64))
