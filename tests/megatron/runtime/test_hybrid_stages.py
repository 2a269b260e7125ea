"""The stages of a hybrid model's pattern on the devices of a placement, against Megatron's own selection."""

from typing import Any
from unittest import mock

import pytest
from megatron.core.models.hybrid.hybrid_layer_allocation import select_pipeline_segment

from quartet_plugin.errors import PlanError
from quartet_plugin.megatron.placement.layout import wrappers
from quartet_plugin.megatron.placement.state import StagePlacement
from quartet_plugin.megatron.seams.declared import FROM_STR, HYBRID_SEGMENT

V, ROUND = StagePlacement((0, 1, 1, 0)), StagePlacement((0, 1, 0, 1))
PATTERN = "M*|E|-|ME"


def selected(pattern: str, rank: int, chunk: int) -> Any:
    select = wrappers(V, is_hybrid=True)[HYBRID_SEGMENT](select_pipeline_segment)
    with (
        mock.patch("torch.distributed.get_rank", return_value=rank),
        mock.patch("torch.distributed.get_world_size", return_value=2),
        mock.patch("megatron.core.models.hybrid.hybrid_layer_allocation.log_on_each_pipeline_stage"),
    ):
        return select(pattern, mock.sentinel.group, chunk, tp_group=None)


def test_a_device_selects_the_stages_of_its_chunks() -> None:
    stages = {(rank, chunk): selected(PATTERN, rank, chunk) for rank in range(2) for chunk in range(2)}
    assert stages == {
        (0, 0): (["M", "*"], 0),
        (1, 0): (["E"], 2),
        (1, 1): (["-"], 3),
        (0, 1): (["M", "E"], 4),
    }


def test_another_number_of_stages_is_refused() -> None:
    with pytest.raises(PlanError, match="3 stages on 2 ranks; the plan places 4"):
        selected("M*|E|-ME", 0, 0)


def test_megatrons_own_order_of_stages_is_left_to_it() -> None:
    assert set(wrappers(ROUND, is_hybrid=True)) == {FROM_STR}
    assert set(wrappers(V)) == {FROM_STR}
