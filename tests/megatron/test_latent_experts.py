"""A small model of the DeepSeek kind, tuned knob by knob on four processes, trains as its command does.

Eight experts, two of them a token's, a shared one, a dense first layer, latent attention, a layer of
multi-token prediction: real Megatron on gloo, under the parity gate, which also compares the tokens of every
expert, in layers of multi-token prediction too.
"""

import functools
import inspect
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.plan import Plan
from quartet_plugin.trial.parity import ParityGate
from tests import warm_ranks
from tests.megatron.entry_launch import MEGATRON_FLAGS, ROOT, SCRIPT, SHAPE, make_plan
from tests.megatron.same_training import with_named_schedule, with_settings

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
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
SIZES = frozenset(inspect.signature(make_plan).parameters)


def plan_of(*, schedule: str = "", split: Sequence[int] = (6,), **values: Any) -> Plan:
    """A plan of these sizes; a named schedule has its stages in a line, or in a V where there are four."""
    sizes = {name: value for name, value in values.items() if name in SIZES}
    settings = {name: value for name, value in values.items() if name not in SIZES}
    plan = make_plan(split=split, shape=LATENT, made_for_shape=LATENT, **sizes)
    plan = with_settings(plan, sequence_parallel=plan.layout.tensor_parallel > 1, **settings)
    if schedule:
        plan = with_named_schedule(plan, schedule)
    made_for = replace(plan.made_for, mtp_layers=1)
    return replace(plan, made_for=made_for)


TWO: dict[str, Any] = {"pipeline": 2, "data": 2, "expert_parallel": 2}
OVERLAPS: dict[str, Any] = {
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_bucket_size": 2000,
}
PLANS = {
    # The axes that change no order of work at once: whole experts beside split layers, the other dispatcher.
    "tp2 ep2 settings": plan_of(
        tensor=2,
        data=2,
        expert_parallel=2,
        expert_tensor_parallel=1,
        recompute="selective",
        moe_token_dispatcher="allgather",
        **OVERLAPS,
    ),
    "tp2 ep2": plan_of(tensor=2, data=2, expert_parallel=2),
    "zb-h1 pp2 ep2 permuted": plan_of(
        schedule="zb-h1", split=(4, 2), order=(1, 0, 3, 2), micro_batch=1, **TWO
    ),
    "ep4": plan_of(data=4, expert_parallel=4),
    "micro-batch": plan_of(data=4, micro_batch=1),
    "all-gather dispatcher": plan_of(data=4, expert_parallel=2, moe_token_dispatcher="allgather"),
    "overlaps": plan_of(data=4, expert_parallel=2, **OVERLAPS),
    "recompute": plan_of(data=4, recompute="full"),
    "recompute of blocks": plan_of(
        data=4, recompute="full", recompute_method="block", recompute_num_layers=2
    ),
    "recompute of experts": plan_of(
        data=4, expert_parallel=2, recompute="selective", recompute_modules="core_attn+moe"
    ),
    "recompute of parts": plan_of(
        data=4, expert_parallel=2, recompute="selective", recompute_modules="layernorm+mla_up_proj+moe_act"
    ),
    "recompute of the dense FFN": plan_of(data=4, recompute="selective", recompute_modules="mla_up_proj+mlp"),
    "recompute of the shared expert": plan_of(
        data=4, recompute="selective", recompute_modules="moe_act+shared_experts"
    ),
    "distributed optimizer": plan_of(data=4, expert_parallel=2, distributed_optimizer=True),
    "zb-h1 tp2": plan_of(schedule="zb-h1", split=(4, 2), pipeline=2, tensor=2, micro_batch=1),
    "pp2 uneven": plan_of(split=(5, 1), pipeline=2, data=2),
    "pp4": plan_of(split=(2, 2, 1, 1), pipeline=4, order=(0, 2, 3, 1)),
    "interleaved": plan_of(split=(1, 2, 2, 1), chunks=2, group=2, **TWO),
    "zb-v": plan_of(schedule="zb-v", split=(2, 2, 1, 1), chunks=2, group=2, micro_batch=1, **TWO),
    "pp2 dp4 ep4, eight processes": plan_of(
        split=(4, 2), pipeline=2, data=4, micro_batch=1, expert_parallel=4, order=(2, 5, 0, 3, 6, 1, 4, 7)
    ),
}
FIRST = ("tp2 ep2 settings", "zb-h1 pp2 ep2 permuted")


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], ParityGate]:
    """By the number of processes the gate of their command, made when it is first asked for."""

    @functools.cache
    def gate(num_processes: int) -> ParityGate:
        folder = tmp_path_factory.mktemp("latent")
        micro_batch = ["--micro-batch-size", str(min(2, 8 // num_processes))]
        words = [*TORCHRUN, str(num_processes), str(SCRIPT), *FLAGS, *micro_batch]
        return ParityGate(
            launcher=warm_ranks.launcher(),
            command=parse_command(words, environment={}),
            folder=folder,
            weights=folder / "weights",
            num_steps=4,
            device="cpu",
            deadline_s=240.0,
            cwd=ROOT,
        )

    return gate


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in FIRST),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in sorted(PLANS.keys() - set(FIRST))),
    ],
)
def test_a_plan_trains_as_the_command_does(name: str, gates: Callable[[int], ParityGate]) -> None:
    plan = PLANS[name]
    gate = gates(plan.layout.world_size)
    receipt = gate.check(plan)
    assert (receipt.verdict, receipt.reference) == ("passed", "command")
    assert len(receipt.steps) == 4
    tolerance = 5e-6 if plan.layout.tensor_parallel > 1 else 1e-6
    for step in receipt.steps:
        assert max(float(step.loss_deviation), float(step.grad_norm_deviation)) <= tolerance
        assert step.expert_load_deviation == 0
    written = gate.folder.glob(f"plan-{plan.key[:12]}/*/rank-*.parity.json")
    sheets = [json.loads(path.read_text()) for path in written]
    counted = {part for sheet in sheets for part in sheet["steps"][0]["expert_tokens"]}
    assert counted == {*(f"layer.{layer}" for layer in range(1, 6)), "mtp.0"}
