"""`quartet tune` on a DeepSpeed command: a plan of ours passes the parity gate before it is timed."""

import json
from pathlib import Path

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.errors import ExitCode
from quartet_plugin.model.plan import read_plan
from tests.cli.tuning import living
from tests.deepspeed.support import ROOT, STARTERS, prepare_launchers
from tests.short_rounds import short_rounds as short_rounds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("short_rounds")]

CONFIG = """\
run: small
search:
  scaling: {tolerance: 0.2, shapes: 10x32}
  pipeline_parallel: 2
  virtual_stages: 2
  micro_batch_size: 2
  schedule: zb-v
  mapping: stock
trial: {warmup: 1, measure: 4, deadline_s: 120}
study: {trials: 1, top_k: 1, rounds: 3}
device: cpu
"""
DS_CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 10**9,
    "quartet": {"plan": "auto", "layer_builder": "layers_of_sizes"},
}


# The deepspeed launcher starts its ranks anew for each launch: a study under it is made nightly.
@pytest.mark.parametrize(
    "starter",
    [pytest.param(STARTERS[0], marks=pytest.mark.nightly), STARTERS[1]],
    ids=["deepspeed", "torchrun"],
)
def test_a_schedule_of_ours_and_another_shape_are_checked_and_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starter: str
) -> None:
    prepare_launchers(tmp_path, monkeypatch)
    (tmp_path / "q.yaml").write_text(CONFIG)
    (tmp_path / "ds.json").write_text(json.dumps(DS_CONFIG))
    script = [str(ROOT / "examples" / "pretrain_deepspeed.py"), "--data-path", str(tmp_path / "text")]
    sizes = "--num-layers 4 --hidden-size 48 --num-attention-heads 3 --seq-length 16 --vocab-size 260"
    words = [*starter.split(), *script, *sizes.split(), "--pipeline-stages", "2"]
    words += ["--deepspeed_config", str(tmp_path / "ds.json")]
    options = ["tune", "--config", str(tmp_path / "q.yaml"), "--run-dir", str(tmp_path / "runs")]
    assert main([*options, "--", *words]) == int(ExitCode.DONE)
    run = tmp_path / "runs" / "small"
    outcomes = [json.loads(path.read_text()) for path in run.glob("trials/*/attempt-1/result.json")]
    assert len(outcomes) >= 2, "the baseline and a schedule of ours"
    assert {one["outcome"] for one in outcomes} <= {"OK", "UNSTABLE"}
    tried = [read_plan(path) for path in run.glob("trials/*/attempt-1/plan.json")]
    assert {plan.schedule.label.partition(" ")[0] for plan in tried} >= {"zb-v"}
    assert {plan.shape.label for plan in tried} >= {"10x32"}
    assert list(run.glob("trials/*/attempt-1/rank-0.actions.json"))
    assert list(run.glob("**/plan-*/plan.parity.json")), "checked before it was timed"
    assert not living(tmp_path)
