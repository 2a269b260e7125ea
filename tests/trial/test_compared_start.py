"""The first iterations of a trial, read back from its ranks' files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.schema import dump
from quartet_plugin.protocol.attempt_files import (
    KEPT_FILE,
    KeptWeights,
    ResultRecord,
    TrialSpec,
    read_shared,
)
from quartet_plugin.protocol.rank_files import RankGradients, StepGradients
from quartet_plugin.trial.attempt import read_result, refuse_result
from quartet_plugin.trial.compared_start import ComparedStart, kept_by, read_compared_steps
from quartet_plugin.trial.request import Outcome, TrialResult

ID = "a" * 32
NUM_COMPARED = 2


def put(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def report(rank: int, *, losses: tuple[float | None, ...]) -> dict[str, Any]:
    iterations = [
        {"iteration": i, "iteration_s": 0.5 + rank, "loss": loss, "grad_norm": 2.0 + i, "skipped": False}
        for i, loss in enumerate(losses, start=1)
    ]
    return {
        "schema_version": 1,
        "attempt_id": ID,
        "rank": rank,
        "launch_rank": rank,
        "host": "here",
        "local_rank": rank,
        "pid": 100 + rank,
        "plan_key": None,
        "device": "cpu",
        "phases_s": {"import": 1.0, "init": 2.0, "first_step": 0.5},
        "iterations": iterations,
        "peak_memory_bytes": 1,
        "cores": None,
        "job": None,
    }


def gradients(rank: int, **changes: Any) -> RankGradients:
    steps = tuple(StepGradients(squares={"layer.0": 9.0, "head": 16.0 * rank}) for _ in range(NUM_COMPARED))
    sheet = RankGradients(
        schema_version=1, attempt_id=ID, launch_rank=rank, steps=steps, settings=("p",), weights_s=0.1 + rank
    )
    return replace(sheet, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a trial of four iterations on two ranks, of which two are compared."""
    for rank, losses in enumerate(((None,) * 4, (9.0, 8.0, 7.0, 6.0))):
        put(tmp_path / f"rank-{rank}.json", report(rank, losses=losses))
        put(tmp_path / f"rank-{rank}.parity.json", dump(gradients(rank)))
    sheet = ResultRecord(
        attempt_id=ID,
        plan_key=None,
        outcome="OK",
        reason="measured",
        phase="done",
        memory_excess_bytes=0,
        iteration_s=(1.5, 1.5),
        loss=(7.0, 6.0),
        grad_norm=(5.0, 6.0),
        peak_memory_bytes=1,
        wall_s=9.0,
        num_compared=NUM_COMPARED,
    )
    put(tmp_path / "result.json", dump(sheet))
    return tmp_path


def result_of(folder: Path) -> TrialResult:
    result = read_result(folder)
    assert result is not None
    return result


def test_the_compared_steps_are_the_first_of_every_rank(folder: Path) -> None:
    result = result_of(folder)
    assert (result.num_compared, result.compared_s, result.warmup_s) == (2, 3.0, 3.0)
    compared = read_compared_steps(result)
    assert compared.unavailable is None
    assert [(step.loss, step.grad_norm) for step in compared.steps] == [(9.0, 3.0), (8.0, 4.0)]
    assert compared.steps[0].parts == {"layer.0": pytest.approx(18.0**0.5), "head": 4.0}
    assert (compared.settings, compared.weights_s) == (("p",), 1.1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (None, "no record of compared iterations"),
        ({"attempt_id": "b" * 32}, "no record of compared iterations"),
        ({"steps": ()}, "fewer iterations"),
        ({"unavailable": "CUDA graphs"}, "CUDA graphs"),
    ],
)
def test_what_a_rank_lacks_makes_them_unavailable(
    folder: Path, changes: dict[str, Any] | None, reason: str
) -> None:
    path = folder / "rank-1.parity.json"
    if changes is None:
        path.unlink()
    else:
        put(path, dump(gradients(1, **changes)))
    compared = read_compared_steps(result_of(folder))
    assert compared.unavailable is not None
    assert reason in compared.unavailable
    assert compared.steps == ()


def test_a_refused_trial_keeps_no_measurement(folder: Path) -> None:
    refused = refuse_result(result_of(folder), "step 1: loss 2, stock has 1")
    assert (refused.outcome, refused.iteration_s) == (Outcome.WRONG, ())
    assert refused == read_result(folder)


def test_weights_count_once_they_are_whole(tmp_path: Path) -> None:
    assert kept_by(tmp_path) is None
    (tmp_path / KEPT_FILE).write_text('{"attempt_id": "aaa')
    assert kept_by(tmp_path) is None
    put(tmp_path / KEPT_FILE, dump(KeptWeights(attempt_id=ID)))
    assert kept_by(tmp_path) == ID


def test_compared_iterations_are_not_measured(tmp_path: Path) -> None:
    start = ComparedStart(num_steps=5, restores_settings=True)
    assert (start.num_warmup(3), replace(start, restores_settings=False).num_warmup(3)) == (8, 5)
    spec = {"attempt_id": ID, "folder": "/f", "measure": 3, "plan_key": None, "schema_version": 1}
    put(tmp_path / "trial.json", {**spec, "warmup": 5, "weights": "/w", "num_compared": 5})
    assert not read_shared(TrialSpec, tmp_path / "trial.json").is_compared
    put(tmp_path / "trial.json", {**spec, "warmup": 5, "weights": "/w"})
    assert read_shared(TrialSpec, tmp_path / "trial.json").is_compared
    put(tmp_path / "trial.json", {**spec, "warmup": 4, "weights": "/w", "num_compared": 5})
    with pytest.raises(ConfigError, match=r"num_compared: 5; must be at most warmup \(4\)"):
        read_shared(TrialSpec, tmp_path / "trial.json")
