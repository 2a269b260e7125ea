"""The axes that are tuned of recipes of mixtures of experts, read through the real parser."""

from typing import Any

import pytest

from quartet_plugin.space.features import Axis
from tests.megatron.recipes import axes_of_recipe

RECIPE: dict[str, Any] = {
    "recipe": "test",
    "gpus": 64,
    "precision_and_variant": "fp8cs",
    "tp": 1,
    "cp": 1,
    "mbs": 1,
    "knobs": {
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_force_load_balancing": True,
        "expert_tensor_parallel_size": 1,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "seq_length": 4096,
    },
}
EXPERTS = {Axis.SPLIT, Axis.SCHEDULE, Axis.MAPPING, Axis.DEGREES, Axis.MICRO_BATCH}


def axes(model: str, knobs: dict[str, Any], **changes: Any) -> set[Axis] | str:
    return axes_of_recipe({**RECIPE, "model": model, "knobs": {**RECIPE["knobs"], **knobs}, **changes})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_recipes_of_experts_have_axes() -> None:
    qwen = {"pp": 2, "vpp": 4, "ep": 8, "gbs": 256}
    assert axes("qwen3_30b_a3b", {}, **qwen) == EXPERTS
    # Overlap of experts' communication has Megatron's own schedules, under rules of its own.
    overlap = {"moe_a2a_overlap": True}
    assert axes("qwen3_30b_a3b", overlap, **qwen) == EXPERTS
    # A capacity is that of one rank, and the flex dispatcher's groups of 32 ranks move as a whole.
    capacity = {"moe_token_dispatcher_type": "flex", "moe_expert_rank_capacity_factor": 1.5}
    wide = {"pp": 2, "vpp": 4, "ep": 32, "gbs": 256}
    kept = axes("qwen3_30b_a3b", {**overlap, **capacity}, **wide)
    assert kept == EXPERTS - {Axis.DEGREES, Axis.MICRO_BATCH}
    deepseek = {"pp": 8, "vpp": 2, "ep": 8, "gbs": 256}
    knobs = {
        "mtp_num_layers": 1,
        "moe_token_dispatcher_type": "flex",
        "cuda_graph_impl": "transformer_engine",
    }
    assert axes("deepseek_v3", knobs, **deepseek) == EXPERTS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_recipes_of_sharded_parameters_have_axes() -> None:
    knobs = {"use_megatron_fsdp": True, "moe_router_force_load_balancing": None}
    sharded = {"pp": 1, "vpp": 1, "ep": None, "gbs": 256}
    assert axes("llama3_70b", knobs, **sharded) == {Axis.MAPPING, Axis.DEGREES, Axis.MICRO_BATCH}
    # Whole nodes of replicas have one arrangement alone.
    overlap = {**knobs, "tp_comm_overlap": True, "sequence_parallel": True}
    assert axes("llama31_405b", overlap, **{**sharded, "tp": 2}) == {Axis.DEGREES, Axis.MICRO_BATCH}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_recipes_of_hybrid_models_have_axes() -> None:
    knobs = {"moe_token_dispatcher_type": "flex", "cuda_graph_impl": "transformer_engine"}
    nano = {"gpus": 16, "pp": 1, "vpp": 1, "ep": 8, "gbs": 512}
    assert axes("nemotron_3_nano", knobs, **nano) == EXPERTS
    lightning = {**knobs, "mtp_num_layers": 2}
    assert axes("nemotron_3_5_lightning", lightning, **nano) == EXPERTS
