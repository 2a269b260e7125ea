"""Plans that spread experts over ranks train as one process does: real Megatron, one checkpoint, on gloo."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.model.plan import Plan
from quartet_plugin.space.knobs.expert_tensor_parallel import EXPERT_TENSOR_PARALLEL, WHOLE
from tests.megatron.entry_launch import MEGATRON_FLAGS, make_plan
from tests.megatron.same_training import Alone, assert_same_training, reports_as_planned, train_alone
from tests.megatron.test_parity import train

# Megatron's own bias of sequential experts writes into a view, which torch refuses on every device.
EXPERTS = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64
    --moe-layer-freq ([0]*1+[1]*5) --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
    --moe-token-dispatcher-type alltoall --moe-router-dtype fp32 --disable-bias-linear
"""
FLAGS = [*MEGATRON_FLAGS, *shlex.split(EXPERTS)]


def spread(
    plan: Plan, *, expert: int = 1, sequence_parallel: bool = False, has_whole_experts: bool = False
) -> Plan:
    layout = replace(plan.layout, expert_parallel=expert, sequence_parallel=sequence_parallel)
    if has_whole_experts:
        layout = layout.with_setting(EXPERT_TENSOR_PARALLEL.name, WHOLE)
    return replace(plan, layout=layout)


PLANS = {
    "dp2 ep2": spread(make_plan(split=(6,), data=2), expert=2),
    "pp2 dp2 ep2": spread(make_plan(split=(2, 4), pipeline=2, data=2, order=(2, 0, 3, 1)), expert=2),
    "tp2 dp2 ep2": spread(make_plan(split=(6,), tensor=2, data=2), expert=2, sequence_parallel=True),
    # One expert a rank; without copies of the model tensor-parallel ranks have all experts between them.
    "tp2 dp2 ep4 whole": spread(
        make_plan(split=(6,), tensor=2, data=2), expert=4, sequence_parallel=True, has_whole_experts=True
    ),
    "tp2 pp2 ep2 whole": spread(
        make_plan(split=(2, 4), tensor=2, pipeline=2, order=(2, 3, 0, 1)),
        expert=2,
        sequence_parallel=True,
        has_whole_experts=True,
    ),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return train_alone(make_plan(split=(6,)), folder=tmp_path_factory.mktemp("one"), command=FLAGS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("dp2 ep2", marks=pytest.mark.slow),
        pytest.param("pp2 dp2 ep2", marks=pytest.mark.nightly),
        pytest.param("tp2 dp2 ep2", marks=pytest.mark.nightly),
        pytest.param("tp2 dp2 ep4 whole", marks=pytest.mark.slow),
        pytest.param("tp2 pp2 ep2 whole", marks=pytest.mark.nightly),
    ],
)
def test_plan_trains_as_one_process_does(name: str, alone: Alone, tmp_path: Path) -> None:
    plan = PLANS[name]
    done = train(plan, folder=tmp_path, weights=alone.weights, command=FLAGS)
    assert_same_training(plan, done, alone.launch)
    job = next(content["job"] for content in done.ranks.values() if content["rank"] == 0)
    assert job["layout"]["expert_parallel"] == plan.layout.expert_parallel
    reports_as_planned(plan, tmp_path)
    assert job["experts"]["num_dense_layers"] == 1
    assert {"moe", "moe_microbatch_loss"} <= set(job["features"])
