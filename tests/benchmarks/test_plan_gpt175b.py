"""The comparison of the pruned ranking with the exhaustive one, on a job of which all plans are predicted."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import plan_gpt175b
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.ranking import Ranking, best_plans

SMALL: dict[str, Any] = {
    "model": {
        "num_layers": 4,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "seq_length": 1024,
        "vocab_size": 8192,
    },
    "cluster": {"device": "H100-SXM-80GB", "num_nodes": 1, "devices_per_node": 2},
    "batch": {"global_batch_size": 8},
    "search": {"micro_batch_size": [1, 2], "virtual_stages": 1},
}


def test_the_best_of_a_small_job_are_those_of_predicting_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_gpt175b.check_exhaustive(SMALL, top=3) == 0
    assert "the best 3 are the same" in capsys.readouterr().out


def test_another_best_plan_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def worse(job: PlanRequest, *, top: int, exhaustive: bool) -> Ranking:
        ranking = best_plans(job, top=top + 1)
        return replace(ranking, best=ranking.best[:top] if exhaustive else ranking.best[1:])

    monkeypatch.setattr(plan_gpt175b, "best_plans", worse)
    assert plan_gpt175b.check_exhaustive(SMALL, top=2) == 1
    assert ", but with pruning " in capsys.readouterr().out
