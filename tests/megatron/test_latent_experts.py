"""A small model of the DeepSeek kind, tuned knob by knob on four processes, trains as its command does.

Eight experts, two of them a token's, a shared one, a dense first layer, latent attention, a layer of
multi-token prediction: real Megatron on gloo, under the parity gate, which also compares the tokens of every
expert.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.plan import Plan, ScheduleChoice
from quartet_plugin.schedule.choice import choice_of
from quartet_plugin.schedule.named import named
from quartet_plugin.trial.parity import ParityGate
from tests import warm_ranks
from tests.megatron.entry_launch import MEGATRON_FLAGS, ROOT, SCRIPT, SHAPE, make_plan
from tests.runtime.pipelines import stage_costs

pytestmark = pytest.mark.timeout(300)

MODEL = """
    --position-embedding-type rope --untie-embeddings-and-output-weights --normalization RMSNorm --swiglu
    --disable-bias-linear --ffn-hidden-size 128
    --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4
    --v-head-dim 12 --qk-layernorm
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64
    --moe-layer-freq ([0]*1+[1]*5) --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01
    --moe-token-dispatcher-type alltoall --moe-router-dtype fp32 --mtp-num-layers 1
"""
FLAGS = [*MEGATRON_FLAGS, *shlex.split(MODEL)]
LATENT = replace(SHAPE, position_embedding="rope", tied_embeddings=False, gated_ffn=True, kv_channels=12)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
SETTINGS = ("moe_token_dispatcher", "overlap_grad_reduce", "overlap_param_gather")


def plan_of(*, schedule: str = "", split: Sequence[int] = (6,), **sizes: Any) -> Plan:
    """A plan of these sizes; a named schedule has its stages in a line, or in a V where there are four."""
    fields = {name: sizes.pop(name) for name in ("expert_parallel", "recompute") if name in sizes}
    settings = {name: sizes.pop(name) for name in SETTINGS if name in sizes}
    plan = make_plan(split=split, shape=LATENT, made_for_shape=LATENT, **sizes)
    is_split, is_gathered = plan.layout.tensor_parallel > 1, "overlap_param_gather" in settings
    layout = replace(plan.layout, sequence_parallel=is_split, distributed_optimizer=is_gathered, **fields)
    for name, value in settings.items():
        layout = layout.with_setting(name, value)
    choice = plan.schedule
    if schedule:
        microbatches = layout.num_microbatches(8)
        order = named(schedule, num_devices=layout.pipeline_parallel, num_microbatches=microbatches)
        custom = choice_of(order, stage_costs((0, 1, 1, 0) if layout.virtual_stages > 1 else (0, 1)))
        choice = ScheduleChoice(name="custom", custom=custom)
    made_for = replace(plan.made_for, mtp_layers=1)
    return replace(plan, layout=layout, schedule=choice, made_for=made_for)


TWO: dict[str, Any] = {"pipeline": 2, "data": 2, "expert_parallel": 2}
PLANS = {
    "tp2 ep2": plan_of(tensor=2, data=2, expert_parallel=2),
    "zb-h1 pp2 ep2 permuted": plan_of(
        schedule="zb-h1", split=(4, 2), order=(1, 0, 3, 2), micro_batch=1, **TWO
    ),
    "ep4": plan_of(data=4, expert_parallel=4),
    "micro-batch": plan_of(data=4, micro_batch=1),
    "all-gather dispatcher": plan_of(data=4, expert_parallel=2, moe_token_dispatcher="allgather"),
    "overlaps": plan_of(data=4, expert_parallel=2, overlap_grad_reduce=True, overlap_param_gather=True),
    "recompute": plan_of(data=4, recompute="full"),
    "pp2 uneven": plan_of(split=(5, 1), pipeline=2, data=2),
    "pp4": plan_of(split=(2, 2, 1, 1), pipeline=4, order=(0, 2, 3, 1)),
    "interleaved": plan_of(split=(1, 2, 2, 1), chunks=2, group=2, **TWO),
    "zb-v": plan_of(schedule="zb-v", split=(2, 2, 1, 1), chunks=2, group=2, micro_batch=1, **TWO),
}
FIRST = ("tp2 ep2", "zb-h1 pp2 ep2 permuted")


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> ParityGate:
    folder = tmp_path_factory.mktemp("latent")
    return ParityGate(
        launcher=warm_ranks.launcher(),
        command=parse_command([*TORCHRUN, str(SCRIPT), *FLAGS], environment={}),
        folder=folder,
        weights=folder / "weights",
        num_steps=4,
        device="cpu",
        deadline_s=240.0,
        cwd=ROOT,
    )


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in FIRST),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in sorted(PLANS.keys() - set(FIRST))),
    ],
)
def test_a_plan_trains_as_the_command_does(name: str, gate: ParityGate) -> None:
    plan = PLANS[name]
    receipt = gate.check(plan)
    assert (receipt.verdict, receipt.reference) == ("passed", "command")
    assert len(receipt.steps) == 4
    tolerance = 5e-6 if plan.layout.tensor_parallel > 1 else 1e-6
    for step in receipt.steps:
        assert max(float(step.loss_deviation), float(step.grad_norm_deviation)) <= tolerance
        assert step.expert_load_deviation == 0
