"""`quartet tune` of a mixture of experts on real Megatron: degrees, dispatcher and a split backward."""

import shlex
from pathlib import Path

import pytest

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
search:
  {pipeline_parallel: [1, 2], expert_parallel: [1, 2], moe_token_dispatcher: [alltoall, allgather],
   micro_batch_size: 2, mapping: stock, split: even, schedule: [no-pipelining, zb-h1]}
trial: {warmup: 1, measure: 3, deadline_s: 240}
study: {trials: 6, top_k: 1, rounds: 3, control: 0}
device: cpu
"""
# Routing does not depend on how sequences are grouped; every rank of the command has half of the experts.
EXPERTS = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01
    --moe-token-dispatcher-type alltoall --disable-bias-linear --expert-model-parallel-size 2
"""


def test_every_plan_of_experts_is_measured_and_a_split_backward_is_proven(tmp_path: Path) -> None:
    command = ["torchrun", "--nproc-per-node", "2", str(SCRIPT), *MEGATRON_FLAGS, *shlex.split(EXPERTS)]
    run = tune(tmp_path, CONFIG, command)

    trials = [trial for trial in read_history(run).trials if trial.number > 0]
    assert {trial.outcome for trial in trials} <= {Outcome.OK, Outcome.UNSTABLE}
    plans = [trial.plan for trial in trials if trial.plan is not None]
    assert {plan.layout.expert_parallel for plan in plans} == {1, 2}
    assert {plan.layout.pipeline_parallel for plan in plans} == {1, 2}
    assert any(plan.layout.setting("moe_token_dispatcher") == "allgather" for plan in plans)
    custom = [plan for plan in plans if plan.schedule.custom is not None]
    assert custom
    for plan in custom:
        receipt = read_receipt(run / "parity" / f"plan-{plan.key[:12]}" / "plan.parity.json")
        assert (receipt.verdict, plan.schedule.label) == ("passed", "zb-h1")
