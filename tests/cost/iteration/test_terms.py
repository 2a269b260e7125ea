"""The terms of one layer: what recompute repeats of its transfers."""

from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.cost.compute import Rates
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.iteration.terms import StageParts, layer_parts
from quartet_plugin.cost.run import Overlap
from tests.cost.runs import EXPERTS, ROW, run

CONSTANTS = fitted()
CONTEXT: dict[str, Any] = ROW | {"gpus": 16, "tp": 1, "sp": False, "cp": 8, "dp": 2, "mbs": 1, "gbs": 8}


def parts_of(row: dict[str, Any], **changes: Any) -> StageParts:
    """The terms of a layer whose transfers nothing hides."""
    described = run(row, **changes)
    software = replace(described.software, tensor_overlap=Overlap.NONE, has_data_overlap=False)
    described = replace(described, software=software)
    return layer_parts(described, CONSTANTS, Rates(described, CONSTANTS), experts=described.experts)


@pytest.mark.parametrize(("row", "term"), [(EXPERTS, "ep_comm"), (CONTEXT, "cp_comm")])
def test_full_recompute_repeats_the_transfers_of_the_forward(row: dict[str, Any], term: str) -> None:
    plain, full = (parts_of(row, recompute=mode)[term] for mode in ("none", "full"))
    assert plain.forward_s > 0
    assert full.forward_s == plain.forward_s
    assert full.input_grad_s == pytest.approx(plain.input_grad_s + plain.forward_s)
    half = parts_of(row, recompute="full", knobs={"recompute_num_layers": row["layers"] // 2})[term]
    assert half.input_grad_s == pytest.approx(plain.input_grad_s + plain.forward_s / 2)


def test_recompute_of_attention_repeats_the_transfers_inside_of_it() -> None:
    plain, again = (parts_of(CONTEXT, recompute=mode)["cp_comm"] for mode in ("none", "selective"))
    assert again.input_grad_s == pytest.approx(plain.input_grad_s + plain.forward_s)
    plain, again = (parts_of(EXPERTS, recompute=mode)["ep_comm"] for mode in ("none", "selective"))
    assert again == plain
