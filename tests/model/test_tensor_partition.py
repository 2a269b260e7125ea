"""How a plan says that a layer is cut: texts, JSON, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.schema import dump, parse
from quartet_plugin.model.tensor_partition import (
    BlockPartition,
    TensorPartition,
    partition_from_label,
)
from tests.space.jobs import make_layout

BLOCKS = st.sampled_from(
    [BlockPartition(form=form) for form in ("stock", "rings", "grid")]
    + [BlockPartition(form="grid", outer=outer) for outer in (2, 3, 1024)]
)
GRID = BlockPartition(form="grid")


@given(BLOCKS, BLOCKS)
def test_a_label_and_a_file_are_read_back(attention: BlockPartition, mlp: BlockPartition) -> None:
    if attention.form == mlp.form == "stock":
        with pytest.raises(ConfigError, match="both blocks are stock"):
            TensorPartition(attention=attention, mlp=mlp)
        return
    partition = TensorPartition(attention=attention, mlp=mlp)
    assert partition_from_label(partition.label) == partition
    assert parse(TensorPartition, dump(partition), where="plan") == partition


def test_stock_is_no_partition() -> None:
    assert partition_from_label("stock") is None
    assert partition_from_label("attention stock, mlp stock") is None


@pytest.mark.parametrize(
    "text", ["", "Grid", "grid outer 1", "rings outer 2", "grid outer 9999999", "mlp grid"]
)
def test_another_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="tensor_partition") as caught:
        partition_from_label(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("outer", "devices", "side"), [(None, 4, 2), (None, 9, 3), (2, 8, 2), (3, 48, 4)])
def test_the_side_of_a_grid(outer: int | None, devices: int, side: int) -> None:
    assert BlockPartition(form="grid", outer=outer).side(devices) == side


@pytest.mark.parametrize(("outer", "devices"), [(None, 1), (None, 2), (None, 8), (2, 4), (2, 2), (3, 8)])
def test_other_devices_make_no_grid(outer: int | None, devices: int) -> None:
    with pytest.raises(ConfigError, match=f"on {devices} devices"):
        BlockPartition(form="grid", outer=outer).side(devices)


def test_a_layout_without_one_is_written_as_before() -> None:
    layout = make_layout(tensor_parallel=4, sequence_parallel=True)
    assert "tensor_partition" not in dump(layout)
    cut = replace(layout, tensor_partition=TensorPartition(attention=BlockPartition(form="stock"), mlp=GRID))
    assert dump(cut)["tensor_partition"] == {"attention": {"form": "stock"}, "mlp": {"form": "grid"}}
    assert parse(Layout, dump(cut), where="plan") == cut
    assert cut.reductions != layout.reductions
    assert cut.label.startswith("tp4 ")
    assert "partition attention stock, mlp grid" in cut.label


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequence_parallel": False}, "goes with sequence_parallel"),
        ({"tensor_parallel": 8}, "grid on 8 devices: must be 4, 9, 16"),
    ],
)
def test_a_layout_that_has_no_such_partition_is_refused(changes: dict[str, Any], words: str) -> None:
    layout = make_layout(tensor_parallel=4, sequence_parallel=True)
    cut = replace(layout, tensor_partition=TensorPartition(attention=GRID, mlp=GRID))
    with pytest.raises(ConfigError, match=words):
        replace(cut, **changes)
