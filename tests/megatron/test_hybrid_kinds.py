"""Experts and state-space layers of a HybridModel train over ranks as in one process: real Megatron on gloo.

The scan of state-space layers is the CPU device's, and is compared with the recurrence that it stands for.
"""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet_plugin.megatron.cpu_device.state_space import causal_convolution, scan, split_conv_scan
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.shape import LayerKinds
from tests.megatron.entry_launch import SHAPE, make_plan
from tests.megatron.same_training import (
    Alone,
    assert_same_training,
    reports_as_planned,
    train_alone,
    with_named_schedule,
    with_settings,
)
from tests.megatron.test_hybrid_models import FLAGS, SCRIPT
from tests.megatron.test_parity import train

LAYERS = """
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 --disable-bias-linear
    --moe-token-dispatcher-type alltoall --moe-router-dtype fp32
    --mamba-num-heads 8 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 16
"""
# Megatron's log of experts wants some of them on every device.
PATTERN, STAGES = "M*E-ME", "M*E-|ME"
MODEL = replace(
    SHAPE,
    layer_kinds=LayerKinds(
        attention=1,
        mlp=1,
        experts=2,
        state_space=2,
        state_space_heads=8,
        state_space_groups=2,
        projected_size=3 * 64 + 2 * 2 * 16 + 8,
        state_size=16,
    ),
)


def command_of(plan: Plan) -> list[str]:
    stages = plan.layout.pipeline_parallel
    pattern = PATTERN if stages == 1 else STAGES
    words = ["--hybrid-layer-pattern", pattern, "--pipeline-model-parallel-size", str(stages)]
    return [*FLAGS, *shlex.split(LAYERS), *words]


def plan_of(
    *,
    split: tuple[int, ...] = (6,),
    schedule: str = "",
    settings: dict[str, Any] | None = None,
    **sizes: Any,
) -> Plan:
    plan = make_plan(split=split, shape=MODEL, made_for_shape=MODEL, **sizes)
    plan = with_settings(plan, sequence_parallel=plan.layout.tensor_parallel > 1, **settings or {})
    return with_named_schedule(plan, schedule) if schedule else plan


OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 2000}
SETTINGS = {"expert_parallel": 2, "recompute": "selective", "moe_token_dispatcher": "allgather", **OVERLAPS}
PLANS = {
    "pp2 dp2 ep2 permuted": plan_of(split=(4, 2), pipeline=2, data=2, order=(2, 0, 3, 1), settings=SETTINGS),
    "zb-h1 pp2 dp2 ep2": plan_of(
        schedule="zb-h1",
        split=(3, 3),
        pipeline=2,
        data=2,
        micro_batch=1,
        settings={"expert_parallel": 2, "overlap_grad_reduce": True},
    ),
    # Every device has an E: M* and ME, E and -.
    "zb-v pp2 dp2": plan_of(
        schedule="zb-v", split=(2, 1, 1, 2), pipeline=2, data=2, chunks=2, group=2, micro_batch=1
    ),
    "tp2 dp2 ep2": plan_of(tensor=2, data=2, settings={"expert_parallel": 2, "expert_tensor_parallel": 1}),
    "cp2 dp2 ep4": plan_of(context=2, data=2, settings={"expert_parallel": 4}),
    "micro-batch": plan_of(data=2, micro_batch=1, settings={"recompute": "full"}),
    "pp2 tp2 dp2, eight processes": plan_of(
        split=(4, 2),
        pipeline=2,
        tensor=2,
        data=2,
        micro_batch=1,
        order=(4, 1, 6, 3, 0, 5, 2, 7),
        settings={"expert_parallel": 2},
    ),
}
FIRST = ("pp2 dp2 ep2 permuted", "zb-v pp2 dp2")
ONE = plan_of()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return train_alone(ONE, folder=tmp_path_factory.mktemp("one"), command=command_of(ONE), script=SCRIPT)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in FIRST),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in sorted(PLANS.keys() - set(FIRST))),
    ],
)
def test_plan_trains_as_one_process_does(name: str, alone: Alone, tmp_path: Path) -> None:
    plan = PLANS[name]
    done = train(plan, folder=tmp_path, weights=alone.weights, command=command_of(plan), script=SCRIPT)
    assert_same_training(plan, done, alone.launch)
    reports_as_planned(plan, tmp_path)
    assert {part for part, _ in done.expert_loads()[0]} == {"layer.2", "layer.5"}


def random_parts(length: int = 11) -> dict[str, torch.Tensor]:
    """Two sequences, four heads of three values, two groups of five states, in fp64."""
    torch.manual_seed(0)
    shapes = {"values": (4, 3), "steps": (4,), "keys": (2, 5), "queries": (2, 5)}
    parts = {name: torch.randn(2, length, *shape, dtype=torch.float64) for name, shape in shapes.items()}
    return {**parts, "steps": parts["steps"].exp(), "decay": -torch.rand(4, dtype=torch.float64)}


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_chunks_of_a_scan_make_the_recurrence(chunk: int) -> None:
    parts = random_parts()
    for part in parts.values():
        part.requires_grad_()
    values, steps, decay = parts["values"], parts["steps"], parts["decay"]
    keys, queries = (parts[name].repeat_interleave(2, dim=2) for name in ("keys", "queries"))
    state, expected = torch.zeros(2, 4, 3, 5, dtype=torch.float64), []
    for at in range(values.size(1)):
        step = steps[:, at, :, None, None]
        added = values[:, at, :, :, None] * keys[:, at, :, None]
        state = (step * decay[:, None, None]).exp() * state + step * added
        expected.append((state * queries[:, at, :, None]).sum(-1))
    made = scan(**parts, chunk=chunk)
    weights = torch.randn_like(made)
    torch.testing.assert_close(made, torch.stack(expected, dim=1))
    of_made, of_expected = (
        torch.autograd.grad((outputs * weights).sum(), list(parts.values()), retain_graph=True)
        for outputs in (made, torch.stack(expected, dim=1))
    )
    torch.testing.assert_close(of_made, of_expected)


def test_a_channel_is_convolved_over_what_lies_before() -> None:
    mixed = torch.arange(1.0, 6.0).view(1, 5, 1)
    made = causal_convolution(mixed, torch.tensor([[10.0, 1.0]]), torch.zeros(1))
    assert made.flatten().tolist() == [1.0, 12.0, 23.0, 34.0, 45.0]


def test_packed_sequences_are_refused() -> None:
    part = torch.zeros(1)
    with pytest.raises(NotImplementedError, match="whole sequences"):
        split_conv_scan(
            part, part, part, part, part, part, 1, activation="silu", headdim=1, ngroups=1, seq_idx=part
        )
