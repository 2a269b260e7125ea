"""`quartet tune` of a model with multi-token prediction on real Megatron: split, schedule and degrees."""

import shlex
from pathlib import Path

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.model.plan import read_plan
from quartet_plugin.model.receipt import read_receipt
from quartet_plugin.trial.request import Outcome
from quartet_plugin.tuner.history import read_history
from tests.megatron.entry_launch import MEGATRON_FLAGS, SCRIPT
from tests.short_rounds import short_rounds as short_rounds
from tests.tuner.live_studies import launch_settings as launch_settings
from tests.tuner.live_studies import tune

FULL_SEARCHES = True  # read by `short_searches`
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("short_rounds", "launch_settings"),
]

CONFIG = """\
run: own
search: {micro_batch_size: 2, mapping: stock, schedule: [no-pipelining, 1f1b, zb-h1]}
trial: {warmup: 1, measure: 3, deadline_s: 240}
study: {trials: 4, top_k: 1, rounds: 3, control: 0}
device: cpu
"""
FURTHER_TOKENS = """
    --position-embedding-type rope --untie-embeddings-and-output-weights --mtp-num-layers 1
    --pipeline-model-parallel-size 2
"""


def test_plans_of_every_schedule_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*MEGATRON_FLAGS, *shlex.split(FURTHER_TOKENS)]
    command = ["torchrun", "--nproc-per-node", "2", str(SCRIPT), *words]
    run = tune(tmp_path, CONFIG, command)

    trials = [trial for trial in read_history(run).trials if trial.number > 0]
    assert {trial.outcome for trial in trials} <= {Outcome.OK, Outcome.UNSTABLE}
    plans = [trial.plan for trial in trials if trial.plan is not None]
    assert all(plan.made_for.mtp_layers == 1 for plan in plans)
    assert {plan.layout.pipeline_parallel for plan in plans} == {1, 2}
    pipelines = [plan for plan in plans if plan.layout.pipeline_parallel == 2]
    # The command's own stages have three layers each; a further layer and a second head weigh on the last.
    assert any(
        plan.split.transformer_layers_per_stage[0] > plan.split.transformer_layers_per_stage[1]
        for plan in pipelines
    )
    for plan in pipelines:
        if plan.schedule.custom is not None:
            receipt = read_receipt(run / "parity" / f"plan-{plan.key[:12]}" / "plan.parity.json")
            assert (receipt.verdict, plan.schedule.label) == ("passed", "zb-h1")
    capsys.readouterr()
    path = next(run.glob("trials/*/attempt-1/plan.json"))
    plan = read_plan(path)
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert f"split     {plan.split.label} transformer layers, embedding first, " in shown
    assert "multi-token prediction (1) and head last" in shown
