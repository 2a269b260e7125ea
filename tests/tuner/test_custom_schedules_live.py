"""A whole tuning run on real Megatron whose only schedules are our own: gate, trial, receipt, train."""

import json
import os
import sys
from pathlib import Path

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.cli.plan_checks import check_receipt
from quartet_plugin.model.plan import read_plan, write_plan
from quartet_plugin.model.receipt import needs_receipt, read_receipt
from quartet_plugin.protocol.rank_files import read_actions
from tests.megatron.entry_launch import MEGATRON_FLAGS, SCRIPT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = """\
run: own
search: {pipeline_parallel: 2, virtual_stages: 1, micro_batch_size: 2, mapping: stock, schedule: [zb-h1]}
trial: {warmup: 1, measure: 3, deadline_s: 240}
study: {trials: 1, top_k: 1, rounds: 3}
device: cpu
"""


def test_zb_h1_is_checked_then_timed_on_our_runtime(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "q.yaml").write_text(CONFIG)
    command = ["torchrun", "--nproc-per-node", "2", str(SCRIPT), *MEGATRON_FLAGS]
    # The local layers are those whose backward is split.
    pipeline = ["--pipeline-model-parallel-size", "2"]
    options = ["--config", str(tmp_path / "q.yaml"), "--run-dir", str(tmp_path)]
    assert main(["tune", *options, "--", *command, *pipeline]) == 0
    printed = capfd.readouterr().out
    assert "parity check of zb-h1 (linear): trains as stock does" in printed

    run = tmp_path / "own"
    attempt = run / "trials" / "000001" / "attempt-1"
    plan = read_plan(attempt / "plan.json")
    assert plan.schedule.label == "zb-h1"
    assert json.loads((attempt / "result.json").read_text())["outcome"] in ("OK", "UNSTABLE")
    devices = read_actions(attempt)
    assert [sheet.device for sheet in devices] == [0, 1]
    # Megatron has no such action. On device 0 every W follows its I, and both may run as one.
    assert any("W" in text for text in devices[1].actions)

    checked = run / "parity" / f"plan-{plan.key[:12]}"
    receipt = read_receipt(checked / "plan.parity.json")
    assert (receipt.verdict, receipt.plan_key, receipt.precision) == ("passed", plan.key, "fp32")
    assert max(float(step.loss_deviation) for step in receipt.steps) <= 1e-6
    assert not (run / "parity" / "weights").exists()
    # Whatever won: with its receipt beside it a plan of ours is taken by `quartet train` at once.
    assert needs_receipt(plan)
    write_plan(plan, path=tmp_path / "again.json")
    (tmp_path / "again.parity.json").write_text((checked / "plan.parity.json").read_text())
    check_receipt(plan, path=tmp_path / "again.json", skip=False)
    best = run / "best" / "plan.json"
    assert best.exists() == best.with_name("plan.parity.json").exists()
