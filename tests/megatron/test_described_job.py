"""A plan of a described job with experts and latent attention, against Megatron's own parser."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.export import flags_of
from quartet_plugin.errors import PlanError
from quartet_plugin.megatron.apply import check_fit
from quartet_plugin.model.job_description import ExpertCapacity
from quartet_plugin.model.megatron_arguments import expert_capacity_of, model_words
from quartet_plugin.model.plan import Plan, read_plan, write_plan
from quartet_plugin.planner.job import parse_job
from quartet_plugin.planner.plans import plain_layout, plan_of
from quartet_plugin.planner.ranking import best_plans, rank
from tests.megatron.native import native_flags
from tests.planner.planning import job_data

LATENT = {
    "q_lora_rank": 96,
    "kv_lora_rank": 48,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,
}
EXPERTS = {
    "num_experts": 8,
    "experts_per_token": 3,
    "expert_ffn_hidden_size": 512,
    "shared_expert_ffn_hidden_size": 256,
    "num_dense_layers": 2,
}
MODEL = {"gated_ffn": True, "latent_attention": LATENT, **EXPERTS}


def planned(folder: Path, *, device: str = "H100-SXM-80GB", **model: Any) -> Plan:
    """The best plan of a small job on eight devices, written and read again."""
    data = job_data(model={**MODEL, **model}, cluster={"device": device}, search={"expert_parallel": 4})
    job = parse_job(data, where="job")
    best = best_plans(job).best[0]
    plan = plan_of(job, best, plain=plain_layout(job, best=best), name="job", place=1)
    write_plan(plan, path=folder / "plan.json")
    return read_plan(folder / "plan.json")


def words_of(plan: Plan, *, without: str = "") -> list[str]:
    words = []
    for name, value in flags_of(plan).items():
        if name != without:
            words += [name] if value is True else [name, str(value)]
    return words


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "fp8"])
def test_megatron_reads_the_exported_flags_as_the_job(tmp_path: Path, precision: str) -> None:
    plan = planned(tmp_path, precision=precision)
    assert plan.made_for.job is not None
    args = native_flags().values(words_of(plan))
    assert model_words(args) == plan.made_for.job.model_words
    check_fit(plan, args, version="0.19.2", world_size=8)
    assert args.expert_model_parallel_size == 4


@pytest.mark.parametrize(
    ("model", "search", "is_grouped", "has_bias"),
    [
        (EXPERTS, {}, True, False),
        (EXPERTS, {"recompute_modules": "moe_act"}, True, False),
        (EXPERTS, {"moe_grouped_gemm": [True, False]}, True, False),
        (EXPERTS, {"moe_grouped_gemm": False}, False, False),
        ({}, {}, False, True),
        ({}, {"recompute_modules": "mlp"}, False, False),
    ],
)
def test_the_flags_say_what_settings_are_legal_and_predicted_by(
    model: dict[str, Any], search: dict[str, Any], is_grouped: bool, has_bias: bool
) -> None:
    """Recompute of moe_act is refused without grouped products; that of mlp does not train with biases."""
    search = {"recompute": "selective", "tensor_parallel": 1, "schedule": "stock", **search}
    job = parse_job(job_data(model={"gated_ffn": True, **model}, search=search), where="job")
    best = rank(job).best[0]
    plan = plan_of(job, best, plain=plain_layout(job, best=best), name="job", place=1)
    args = native_flags().values(words_of(plan))
    assert (args.moe_grouped_gemm, args.add_bias_linear) == (is_grouped, has_bias)


@pytest.mark.parametrize(
    "capacity",
    [
        ExpertCapacity(factor=1.5),
        ExpertCapacity(factor=1.25, is_padded=True),
        ExpertCapacity(rank_factor=1.5),
        ExpertCapacity(rank_factor=1.5, stash_factor=1.1),
        ExpertCapacity(rank_factor=2.0, stash_factor=-1.2),
    ],
)
def test_the_flags_say_the_limits_on_the_tokens_of_experts(tmp_path: Path, capacity: ExpertCapacity) -> None:
    plan = planned(tmp_path)
    job = plan.made_for.job
    assert job is not None
    assert job.experts is not None
    limited = replace(job, experts=replace(job.experts, capacity=capacity))
    plan = replace(plan, made_for=replace(plan.made_for, job=limited))
    write_plan(plan, path=tmp_path / "limited.json")
    assert read_plan(tmp_path / "limited.json") == plan
    assert expert_capacity_of(vars(native_flags().values(words_of(plan)))) == capacity


def test_megatron_has_no_grouped_products_on_volta(tmp_path: Path) -> None:
    assert "--moe-grouped-gemm" not in flags_of(planned(tmp_path, device="V100-SXM2-32GB", precision="fp16"))


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--num-experts", "experts none"),
        ("--moe-router-topk", "2 a token"),
        ("--moe-ffn-hidden-size", "8 experts of 4096"),
        ("--moe-shared-expert-intermediate-size", "experts 8 experts of 512, 3 a token, the first"),
        ("--moe-layer-freq", "experts 8 experts of 512, 3 a token, a shared one of 256 (plan"),
        ("--multi-latent-attention", "attention plain"),
        ("--kv-lora-rank", "ranks 96 and 32"),
        ("--bf16", "precision fp32"),
    ],
)
def test_a_command_with_another_model_is_refused(tmp_path: Path, flag: str, says: str) -> None:
    plan = planned(tmp_path)
    args = native_flags().values(words_of(plan, without=flag))
    with pytest.raises(PlanError, match="made for another job") as error:
        check_fit(plan, args, version="0.19.2", world_size=8)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_what_a_described_job_cannot_say_is_refused_by_the_flags_name(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    for words, flag in (
        (["--moe-layer-freq", "([1]*4+[0]*4)"], "--moe-layer-freq"),
        (["--moe-layer-freq", "2"], "--moe-layer-freq"),
    ):
        args = native_flags().values([*words_of(plan, without=flag), *words])
        with pytest.raises(Exception, match=flag):
            check_fit(plan, args, version="0.19.2", world_size=8)
    args = native_flags().values(words_of(plan, without="--q-lora-rank"))
    with pytest.raises(Exception, match="--q-lora-rank: missing"):
        check_fit(plan, args, version="0.19.2", world_size=8)
