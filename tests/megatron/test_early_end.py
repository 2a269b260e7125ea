"""A trial of real processes that ends as soon as enough is measured: all ranks after the same iteration."""

import json
from pathlib import Path

import pytest

from quartet_plugin.model.schema import read_record
from quartet_plugin.protocol.rank_files import RankReport
from quartet_plugin.rank.files import read_trial_spec
from tests.megatron.entry_launch import MEGATRON_FLAGS, launch, write_trial


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_end_after_the_same_iteration(tmp_path: Path) -> None:
    """Any scatter is small enough here, so that the trial is as short as it can be."""
    trial = write_trial(tmp_path, warmup=1, measure=500)
    rule = {"least": 4, "precision": 0.99}
    trial.write_text(json.dumps({**json.loads(trial.read_text()), "max_warmup": 3, "early_end": rule}))
    of_trial = ["--quartet-trial", str(trial), "--quartet-device", "cpu"]
    done = launch(2, [*MEGATRON_FLAGS, "--train-iters", "600", *of_trial], folder=tmp_path)
    assert done.code == 0, done.output[-3000:]
    reports = [read_record(RankReport, tmp_path / f"rank-{rank}.json") for rank in (0, 1)]
    counts = {len(report.iterations) for report in reports}
    assert len(counts) == 1
    assert 6 <= counts.pop() < 100
    assert [report.ended_early for report in reports] == ["precise", None]
    measured = read_trial_spec(trial).measured([step.iteration_s for step in reports[0].iterations])
    assert measured.start in (1, 2, 3)
    assert len(measured) >= 4
