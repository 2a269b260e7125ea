"""`quartet tune` on a model of bare convolution, pooling and lambda layers, from its command to its end."""

import json
import sys
from pathlib import Path

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.errors import ExitCode
from quartet_plugin.model.plan import read_plan
from tests.cli.tuning import living
from tests.deepspeed.support import ROOT, environment
from tests.deepspeed.test_tune import DS_CONFIG
from tests.short_rounds import short_rounds as short_rounds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("short_rounds")]

CONFIG = """\
run: alexnet
search: {pipeline_parallel: 2, micro_batch_size: 2, schedule: [stock, zb-h1], mapping: stock}
trial: {warmup: 1, measure: 4, deadline_s: 120}
study: {trials: 3, top_k: 1, rounds: 3}
device: cpu
"""


def test_a_model_of_foreign_layers_is_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "q.yaml").write_text(CONFIG)
    (tmp_path / "ds.json").write_text(json.dumps(DS_CONFIG))
    script = str(ROOT / "tests" / "deepspeed" / "alexnet_pretrain.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = [*torchrun, script, "--deepspeed_config", str(tmp_path / "ds.json")]
    options = ["tune", "--config", str(tmp_path / "q.yaml"), "--run-dir", str(tmp_path / "runs")]
    assert main([*options, "--", *words]) == int(ExitCode.DONE)
    said = capfd.readouterr().out
    assert "is faster than your command" in said or "no better plan was found" in said
    run = tmp_path / "runs" / "alexnet"
    outcomes = {
        path.parents[1].name: json.loads(path.read_text())
        for path in run.glob("trials/*/attempt-1/result.json")
    }
    assert len(outcomes) >= 3
    assert {result["outcome"] for result in outcomes.values()} <= {"OK", "UNSTABLE"}, outcomes
    tried = [read_plan(path) for path in run.glob("trials/*/attempt-1/plan.json")]
    assert len({plan.split for plan in tried}) > 1
    # Layers have sizes although most of them hold no matrix: their parameters together are the model's.
    shape = tried[0].made_for.shape
    convolutions = sum(9 * a * b + b for a, b in ((3, 16), (16, 32), (32, 48), (48, 32)))
    linear = (128 + 1) * 128 * 2 + (128 + 1) * 10
    total = shape.num_layers * shape.matrix_parameters_per_layer
    assert total == pytest.approx(convolutions + linear, rel=0.3)
    assert not living(tmp_path)
