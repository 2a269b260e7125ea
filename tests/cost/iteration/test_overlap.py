"""What compute hides of communication: with nothing overlapped nothing is, and the rest is in the terms."""

from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.iteration.overlap import hidden_terms
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import Overlap, ScheduleKind, TrainingRun
from tests.cost.runs import EXPERTS, PIPELINE, ROW, run


def without_overlap(training: TrainingRun) -> TrainingRun:
    software = replace(training.software, tensor_overlap=Overlap.NONE, has_data_overlap=False)
    return replace(training, software=software)


@pytest.mark.parametrize(
    "training",
    [
        run(ROW, tp=4, dp=2, gbs=8),
        run(ROW, tp=1, dp=8, gbs=64, mbs=1, zero=1, software="Megatron-Core"),
        run(ROW, tp=2, dp=2, cp=2, gbs=8, sp=True, software="NeMo"),
    ],
    ids=["tp", "dp", "cp"],
)
def test_hidden_and_exposed_are_the_time_of_the_traffic_alone(training: TrainingRun) -> None:
    apart = without_overlap(training)
    assert hidden_terms(apart, fitted()) == {}
    hidden, exposed = hidden_terms(training, fitted()), predict(training, fitted()).terms
    assert hidden
    alone = predict(apart, fitted()).terms
    for name in ("tp_comm_s", "cp_comm_s", "dp_comm_s"):
        assert exposed[name] + hidden.get(name, 0.0) == pytest.approx(alone[name]), name


@pytest.mark.parametrize("field", ["expert_overlap", "shared_expert_overlap"])
def test_exchanges_of_experts_hide_without_pairs_too(field: str) -> None:
    alone = run(EXPERTS, shared_ffn=3072)
    changes: dict[str, Any] = {field: True}
    beside = replace(alone, software=replace(alone.software, **changes))
    assert "ep_comm_s" not in hidden_terms(alone, fitted())
    hidden, exposed = hidden_terms(beside, fitted()), predict(beside, fitted()).terms
    assert hidden["ep_comm_s"] > 0
    assert exposed["ep_comm_s"] + hidden["ep_comm_s"] == pytest.approx(
        predict(alone, fitted()).terms["ep_comm_s"]
    )


def test_transfers_are_hidden_where_they_do_not_block() -> None:
    stock = run(PIPELINE)
    assert "pp_comm_s" not in hidden_terms(stock, fitted())
    assert hidden_terms(replace(stock, schedule=ScheduleKind.ZB_H1), fitted())["pp_comm_s"] > 0
