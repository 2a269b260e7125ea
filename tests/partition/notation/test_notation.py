"""Every annotation, parsed back, says where a step's blocks lie; every signature is a legal product."""

import subprocess
import sys
from math import isqrt
from pathlib import Path

import numpy as np
import pytest

from quartet_plugin.errors import PlanError
from quartet_plugin.partition.layer import LAYER_FORMS, linears_of, partition_of
from quartet_plugin.partition.named import FAMILIES, named_partition
from quartet_plugin.partition.notation.colossal import to_colossal
from quartet_plugin.partition.notation.dtensor import mesh_to_dtensor, to_dtensor
from quartet_plugin.partition.notation.gspmd import to_gspmd
from quartet_plugin.partition.notation.layer_notation import layer_notation
from quartet_plugin.partition.notation.sbp import product_to_sbp, to_sbp
from quartet_plugin.partition.table import Partition, Phase, Tensor
from quartet_plugin.partition.tiles import TileAssignment, home_tiles, signature
from tests.partition.lockstep import Matrix, pieces_at_home, run_lockstep
from tests.partition.notation.parsers import (
    as_plain_product,
    from_colossal,
    from_dtensor,
    from_gspmd,
    from_sbp,
    is_legal_product,
    product_from_sbp,
    tiles_of,
)
from tests.partition.test_lockstep import factors, sizes_for
from tests.space.jobs import make_shape

NAMES = [*(family.example for family in FAMILIES), "row4", "column4-replicated", "ring-row4", "home3x3-out"]
UNSKEWED = ["column4", "row4", "column4-replicated", "row4-replicated", "ring-column4", "ring-row4", "2D2x2"]


def local_values(partition: Partition, tensor: Tensor) -> tuple[Matrix, list[Matrix]]:
    """A tensor of a step, whole as one product gives it, and what each device holds of it."""
    input_, weight, grad = factors(sizes_for(partition), np.float64)
    done = run_lockstep(partition, input_, weight, grad)
    whole = {
        Tensor.INPUT: input_,
        Tensor.WEIGHT: weight,
        Tensor.OUTPUT_GRAD: grad,
        Tensor.OUTPUT: input_ @ weight,
        Tensor.INPUT_GRAD: grad @ weight.T,
        Tensor.WEIGHT_GRAD: input_.T @ grad,
    }[tensor]
    if tensor in (Tensor.INPUT, Tensor.OUTPUT_GRAD) and tensor in partition.carried:
        # These have travelled; what is annotated is where they begin.
        return whole, [stacked(pieces) for pieces in pieces_at_home(partition, tensor, whole)]
    return whole, [stacked(pieces) for pieces in done.held[tensor]]


def stacked(pieces: dict[tuple[tuple[int, int], int, int], Matrix]) -> Matrix:
    """The blocks of a device as one matrix."""
    rows = sorted({(block[0], part) for block, part, _ in pieces})
    columns = sorted({block[1] for block, _, _ in pieces})
    parts = next(iter(pieces))[2]
    return np.block([[pieces[(row, column), part, parts] for column in columns] for row, part in rows])


def cut(whole: Matrix, tiles: TileAssignment) -> list[Matrix]:
    """What each device holds by an annotation."""
    rows, columns = whole.shape[0] // tiles.rows, whole.shape[1] // tiles.columns
    return [
        whole[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
        for row, column in tiles_of(tiles)
    ]


@pytest.mark.parametrize("tensor", Tensor)
@pytest.mark.parametrize("name", NAMES)
def test_parsed_back_the_annotation_is_where_the_tensor_lies(name: str, tensor: Tensor) -> None:
    partition = named_partition(name)
    tiles = home_tiles(partition, tensor)
    whole, held = local_values(partition, tensor)
    for parsed in (from_gspmd(to_gspmd(tiles)), from_sbp(to_sbp(tiles))):
        assert parsed == tiles
        for local, expected in zip(held, cut(whole, parsed), strict=True):
            np.testing.assert_allclose(local, expected, rtol=0, atol=1e-13 * np.abs(whole).max())


@pytest.mark.parametrize("tensor", [Tensor.INPUT, Tensor.WEIGHT, Tensor.OUTPUT])
@pytest.mark.parametrize("name", [*UNSKEWED, "2.5D2x2x2"])
def test_dtensor_says_the_same_of_unpermuted_meshes(name: str, tensor: Tensor) -> None:
    partition = named_partition(name)
    words = to_dtensor(partition, tensor)
    assert from_dtensor(mesh_to_dtensor(partition), words, tensor) == home_tiles(partition, tensor)


@pytest.mark.parametrize("name", ["P2x2", "home2x2-in", "3D2x2x2"])
def test_dtensor_refuses_permuted_meshes(name: str) -> None:
    with pytest.raises(PlanError, match=r"W lies on a permuted mesh \(0, .*use --gspmd or --sbp"):
        to_dtensor(named_partition(name), Tensor.WEIGHT)


@pytest.mark.parametrize(
    ("name", "tensor", "devices", "sbp"),
    [
        ("home2x2-in", Tensor.INPUT, "0,1,3,2", "[[0,1],[3,2]]"),
        ("home2x2-in", Tensor.WEIGHT, "0,3,2,1", "[[0,3],[2,1]]"),
        ("home2x2-in", Tensor.OUTPUT, "0,1,2,3", "[[0,1],[2,3]]"),
        ("home2x2-out", Tensor.INPUT, "0,1,2,3", "[[0,1],[2,3]]"),
        ("home2x2-out", Tensor.WEIGHT, "0,2,3,1", "[[0,2],[3,1]]"),
        ("home2x2-out", Tensor.OUTPUT, "0,1,3,2", "[[0,1],[3,2]]"),
    ],
)
def test_grids_are_ordinary_shardings_on_permuted_devices(
    name: str, tensor: Tensor, devices: str, sbp: str
) -> None:
    tiles = home_tiles(named_partition(name), tensor)
    assert to_gspmd(tiles) == f"{{devices=[2,2]{devices}}}"
    assert to_sbp(tiles) == f'placement("cuda", ranks={sbp}), sbp=(split(0), split(1))'


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("name", NAMES)
def test_every_signature_is_legal_for_a_product(name: str, phase: Phase) -> None:
    partition = named_partition(name)
    known = signature(partition, phase)
    if known is None:
        # The result of the paper's last phase changes hands, so devices cover no equal boxes.
        assert (name, phase) == ("P2x2", Phase.G)
        return
    parsed = product_from_sbp(phase, product_to_sbp(phase, known))
    assert parsed == known.placements
    assert all(is_legal_product(*axis) for axis in as_plain_product(phase, parsed))


def test_signatures_of_the_four_kinds() -> None:
    texts = {}
    for name in ("column4", "row4", "home2x2-in"):
        known = signature(named_partition(name), Phase.F)
        assert known is not None
        texts[name] = product_to_sbp(Phase.F, known)
    assert texts == {
        "column4": "I (broadcast,), W (split(1),) -> O (split(1),) on ranks=[0,1,2,3]",
        "row4": "I (split(1),), W (split(0),) -> O (partial_sum,) on ranks=[0,1,2,3]",
        "home2x2-in": "I (split(0), broadcast), W (broadcast, split(1)) -> O (split(0), split(1)) "
        "on ranks=[[0,1],[2,3]]",
    }


@pytest.mark.parametrize("form", LAYER_FORMS)
def test_colossal_is_read_back_or_refused(form: str) -> None:
    if form in ("rings", "grid", "primepar"):
        with pytest.raises(PlanError, match=f"partition {form}: Colossal-AI has no mode"):
            to_colossal(form, 4, stages=2)
    else:
        assert from_colossal(to_colossal(form, 64, stages=2)) == (form, 64, 2)


@pytest.mark.parametrize("form", LAYER_FORMS)
def test_layers_divide_or_are_refused(form: str) -> None:
    linears = linears_of(make_shape(), tokens=512)
    for devices in (4, 8):
        power = {"grid": 2, "primepar": 2, "2d": 2, "3d": 3}.get(form, 1)
        fits = power == 1 or (isqrt(devices) ** 2 == devices if power == 2 else devices == 8)
        if fits:
            cut = [(linear, partition_of(form, linear, devices)) for linear in linears]
            content = layer_notation("gspmd", cut, form=form, devices=devices, stages=1)
            assert [linear["name"] for linear in content["linears"]] == ["qkv", "proj", "fc1", "fc2"]
            for linear in linears:
                assert partition_of(form, linear, devices).num_devices == devices
        else:
            with pytest.raises(PlanError, match=f"tensor_parallel {devices}: must be a"):
                partition_of(form, linears[0], devices)


def test_torch_places_shards_where_the_plan_says() -> None:
    """DTensor's local shapes and offsets on each rank, and its own signature of the product."""
    run_check("dtensor_check.py", *UNSKEWED)


def test_jax_puts_shards_where_the_annotation_says() -> None:
    """XLA reads the annotations, places the matrices on four devices and multiplies them."""
    pytest.importorskip("jax", reason="jax runs GSPMD's annotations: pip install 'quartet-plugin[dev]'")
    run_check("gspmd_check.py", *UNSKEWED, "P2x2", "home2x2-in", "home2x2-out")


def run_check(name: str, *partitions: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.partition.notation.{name.removesuffix('.py')}", *partitions],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == list(partitions)
