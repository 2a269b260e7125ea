"""Degrees as an order of blocks sees them."""

import pytest

from quartet_plugin.mapping.topology import degrees_alone, expert_blocks
from tests.space.jobs import make_layout


@pytest.mark.parametrize(
    ("tp", "ep", "shared", "whole"),
    [(1, 8, 8, 8), (2, 8, 8, 4), (4, 2, 2, 1), (8, 8, 8, 1), (2, 1, 1, 1), (2, 3, 3, 3)],
)
def test_groups_of_experts_in_blocks(tp: int, ep: int, shared: int, whole: int) -> None:
    """Whole experts are on consecutive ranks; two groups of three ranks share a block of two."""
    layout = make_layout(tensor_parallel=tp, data_parallel=24, expert_parallel=ep)
    assert expert_blocks(layout, has_whole_experts=False) == shared
    assert expert_blocks(layout, has_whole_experts=True) == whole
    degrees = degrees_alone(layout, has_whole_experts=True)
    assert degrees.expert_parallel == whole
    assert degrees_alone(degrees) == degrees
