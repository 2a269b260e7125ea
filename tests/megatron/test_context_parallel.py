"""Devices that share sequences train as one process does: real Megatron, the CPU device's attention."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet_plugin.megatron.cpu_device.attention import causal_mask, positions
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.receipt import read_receipt
from quartet_plugin.trial.request import Outcome
from quartet_plugin.tuner.history import read_history
from tests.megatron.entry_launch import MEGATRON_FLAGS, SCRIPT, SHAPE, make_plan
from tests.megatron.same_training import (
    Alone,
    assert_same_training,
    reports_as_planned,
    train_alone,
    with_named_schedule,
    with_settings,
)
from tests.megatron.test_parity import train
from tests.short_rounds import short_rounds as short_rounds
from tests.tuner.live_studies import launch_settings as launch_settings
from tests.tuner.live_studies import tune

# Two key heads for four query heads; a window in every second layer, across the borders of chunks.
MODEL = """
    --position-embedding-type rope --untie-embeddings-and-output-weights --group-query-attention
    --num-query-groups 2 --window-size 5,0 --window-attn-skip-freq 2
"""
EXPERTS = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-layer-freq ([0]*1+[1]*5)
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 --disable-bias-linear
    --moe-token-dispatcher-type alltoall --moe-router-dtype fp32
"""
DENSE = [*MEGATRON_FLAGS, *shlex.split(MODEL)]
FLAGS = [*DENSE, *shlex.split(EXPERTS)]
ROPE = replace(SHAPE, position_embedding="rope", tied_embeddings=False, num_query_groups=2)


def plan_of(*, split: tuple[int, ...] = (6,), settings: dict[str, Any] | None = None, **sizes: Any) -> Plan:
    plan = make_plan(split=split, shape=ROPE, made_for_shape=ROPE, **sizes)
    return with_settings(plan, sequence_parallel=plan.layout.tensor_parallel > 1, **settings or {})


# Experts are spread over the devices that share sequences, too.
SETTINGS: dict[str, Any] = {
    "expert_parallel": 2,
    "moe_token_dispatcher": "allgather",
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_bucket_size": 2000,
}
PLANS: dict[str, tuple[Plan, str]] = {
    "cp2": (plan_of(context=2), ""),
    "cp4 by all-to-all": (plan_of(context=4), "--cp-comm-type a2a"),
    "cp2 by a plan's gathers": (plan_of(context=2, settings={"cp_comm_type": "all_gather"}), ""),
    "cp2 dp2 by a plan's all-to-all": (
        plan_of(context=2, data=2, settings={"cp_comm_type": "a2a", "expert_parallel": 2}),
        "",
    ),
    "cp4 by a plan's hierarchy": (
        plan_of(
            context=4, settings={"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": "2+2"}
        ),
        "",
    ),
    "cp2 of a command with a hierarchy of four": (
        plan_of(context=2, data=2),
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2",
    ),
    "cp2 without a mask of the loader": (
        plan_of(context=2, settings={"recompute": "full", "expert_parallel": 2}),
        "--no-create-attention-mask-in-dataloader",
    ),
    "cp2 pp2 permuted": (
        plan_of(
            split=(4, 2),
            context=2,
            pipeline=2,
            micro_batch=1,
            order=(2, 0, 3, 1),
            settings={**SETTINGS, "recompute": "selective"},
        ),
        "",
    ),
    "cp2 tp2": (
        plan_of(context=2, tensor=2, settings={"expert_parallel": 2, "expert_tensor_parallel": 1}),
        "",
    ),
    "cp2 dp2 overlapped": (plan_of(context=2, data=2, settings={**SETTINGS, "expert_parallel": 4}), ""),
    "cp2 pp2 interleaved": (
        plan_of(split=(1, 2, 2, 1), context=2, pipeline=2, chunks=2, group=4),
        "",
    ),
    "cp2 pp2 zb-h1": (
        with_named_schedule(plan_of(split=(4, 2), context=2, pipeline=2, micro_batch=1), "zb-h1"),
        "",
    ),
    "cp2 pp2 zb-v": (
        with_named_schedule(
            plan_of(
                split=(2, 2, 1, 1),
                context=2,
                pipeline=2,
                chunks=2,
                group=2,
                micro_batch=1,
                settings={"expert_parallel": 2, "overlap_grad_reduce": True},
            ),
            "zb-v",
        ),
        "",
    ),
    "cp2 pp2 dp2, eight processes": (
        plan_of(
            split=(2, 4),
            context=2,
            pipeline=2,
            data=2,
            micro_batch=1,
            order=(5, 0, 7, 2, 1, 4, 3, 6),
            settings={"expert_parallel": 4},
        ),
        "",
    ),
}
FIRST = ("cp2 without a mask of the loader", "cp2 pp2 permuted", "cp4 by a plan's hierarchy")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return train_alone(plan_of(), folder=tmp_path_factory.mktemp("one"), command=FLAGS)


@pytest.mark.parametrize(
    "name",
    [
        "cp2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in FIRST),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in sorted(PLANS.keys() - {"cp2", *FIRST})),
    ],
)
def test_plan_trains_as_one_process_does(name: str, alone: Alone, tmp_path: Path) -> None:
    plan, words = PLANS[name]
    done = train(plan, folder=tmp_path, weights=alone.weights, command=[*FLAGS, *shlex.split(words)])
    assert_same_training(plan, done, alone.launch)
    reports_as_planned(plan, tmp_path)
    job = next(content["job"] for content in done.ranks.values() if content["rank"] == 0)
    assert job["layout"]["context_parallel"] == plan.layout.context_parallel
    assert job["shares_sequences"] is True


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_query_of_a_rank_sees_what_lies_before_it(size: int) -> None:
    ranks = range(size)
    of_ranks = [positions(16, rank=rank, size=size) for rank in ranks]
    assert sorted(torch.cat(of_ranks).tolist()) == list(range(16))
    rows = torch.triu(torch.ones(16, 16), diagonal=1).bool()
    for rank, places in zip(ranks, of_ranks, strict=True):
        half = len(places) // 2
        assert places[0] == rank * half
        assert places[-1] == 15 - rank * half
        assert torch.equal(causal_mask(16, rank=rank, size=size)[0, 0], rows[places])
        inside = ~causal_mask(16, rank=rank, size=size, window=(3, 0))[0, 0]
        assert inside.sum(1).tolist() == [min(place + 1, 4) for place in places.tolist()]


CONFIG = """\
run: own
search:
  {context_parallel: 2, cp_comm_type: all_gather, tensor_parallel: 1, micro_batch_size: 2, mapping: stock}
trial: {warmup: 1, measure: 3, deadline_s: 240}
study: {trials: 1, top_k: 1, rounds: 3, control: 0}
device: cpu
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("short_rounds", "launch_settings")
def test_a_study_tries_devices_that_share_sequences(tmp_path: Path) -> None:
    command = ["torchrun", "--nproc-per-node", "2", str(SCRIPT), *DENSE]
    run = tune(tmp_path, CONFIG, command)
    trials = [trial for trial in read_history(run).trials if trial.number > 0]
    assert {trial.outcome for trial in trials} <= {Outcome.OK, Outcome.UNSTABLE}
    shared = [
        trial.plan for trial in trials if trial.plan is not None and trial.plan.layout.context_parallel == 2
    ]
    assert shared
    assert {plan.layout.setting("cp_comm_type") for plan in shared} == {"all_gather"}
    for plan in shared:
        receipt = read_receipt(run / "parity" / f"plan-{plan.key[:12]}" / "plan.parity.json")
        assert receipt.verdict == "passed"
