"""A hybrid model in a JOB.yaml: the job that a command's flags say, and one line for what no plan has."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.export import flags_of
from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.planner.command_job import job_of_command
from quartet_plugin.planner.described_job import request_of
from quartet_plugin.planner.described_rules import rules_of
from quartet_plugin.planner.job import PlanRequest, parse_job, read_job
from quartet_plugin.planner.plans import plain_layout, plan_of
from quartet_plugin.planner.ranking import Ranked, rank

START = "torchrun --nproc-per-node 8 pretrain_hybrid.py"
FLAGS = (
    f"{START} --hidden-size 1024 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 "
    "--vocab-size 32768 --position-embedding-type none --untie-embeddings-and-output-weights --bf16 "
    "--micro-batch-size 1 --global-batch-size 32"
)
MODEL = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "seq_length": 4096,
    "vocab_size": 32768,
    "position_embedding": "none",
    "tied_embeddings": False,
}
STATE_SPACE_FLAGS = "--mamba-num-heads 16 --mamba-head-dim 32 --mamba-num-groups 4 --mamba-state-dim 64"
SIZES = {"mamba_num_heads": 16, "mamba_head_dim": 32, "mamba_num_groups": 4, "mamba_state_dim": 64}
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 256 "
    "--disable-bias-linear --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
)
ROUTED = {
    "num_experts": 8,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 512,
    "shared_expert_ffn_hidden_size": 256,
}
LOSSES = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01"
LATENT = "--q-lora-rank 96 --kv-lora-rank 48 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64"
RANKS = {
    "q_lora_rank": 96,
    "kv_lora_rank": 48,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,
}
# The same job by a command's flags and by the keys of its model.
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "Megatron's sizes of state spaces": ("M-M*M-M*", {}),
    "sizes of state spaces": ("M-M*M-M*M-M*", {"flags": STATE_SPACE_FLAGS, **SIZES}),
    "attention and MLPs": ("*-*-*-*-", {}),
    "experts": ("MEM*EMEM*-*-", {"flags": EXPERTS, **ROUTED}),
    "experts with logged losses": (
        "MEM*EMEM*-*-",
        {"flags": f"{EXPERTS} {LOSSES}", "router_losses": True, **ROUTED},
    ),
    "latent attention": ("M+-M+-M+-", {"flags": LATENT, "latent_attention": RANKS}),
    "further tokens": ("M-M*M-M*/*-/*-", {}),
    "further tokens with experts": (
        "M-M*MEM*/*E",
        {"flags": f"{EXPERTS} {LOSSES}", "router_losses": True, **ROUTED},
    ),
}


def described(pattern: str, *, search: dict[str, Any] | None = None, **model: Any) -> PlanRequest:
    """The job of a JOB.yaml."""
    data = {
        "model": {**MODEL, "hybrid_layer_pattern": pattern, **model},
        "cluster": {"device": "H100-SXM-80GB", "num_nodes": 1, "devices_per_node": 8},
        "batch": {"global_batch_size": 32},
        "search": search or {},
    }
    return parse_job(data, where="job")


def commanded(pattern: str, flags: str, *, search: dict[str, Any] | None = None) -> PlanRequest:
    """The job of a command."""
    words = [*shlex.split(f"{FLAGS} {flags}"), f"--hybrid-layer-pattern={pattern}"]
    sections = {"cluster": "H100", "search": search or {}}
    return job_of_command(parse_command(words), sections=sections).request


def both(name: str, *, search: dict[str, Any] | None = None) -> tuple[PlanRequest, PlanRequest]:
    """A job of `JOBS` by its command and by its description."""
    pattern, keys = JOBS[name]
    flags, model = keys.get("flags", ""), {key: value for key, value in keys.items() if key != "flags"}
    return commanded(pattern, flags, search=search), described(pattern, search=search, **model)


@pytest.mark.parametrize("name", JOBS)
def test_the_job_is_that_of_the_command(name: str) -> None:
    by_command, by_file = both(name)
    # The command pads the vocabulary, and has a split of its own and values of its settings.
    same = replace(
        by_file,
        vocab_size=None,
        baseline_split=by_command.baseline_split,
        settings=by_command.settings,
    )
    assert by_command == same
    assert by_command.settings == () or "experts" in name


def essence(ranked: Ranked) -> tuple[Any, ...]:
    """What of a ranked plan two equal jobs have in common, but for the settings of a command."""
    layout = replace(ranked.layout, settings=None)
    return layout, ranked.split, ranked.schedule, ranked.group, ranked.iteration_s


@pytest.mark.parametrize("name", JOBS)
def test_its_plans_are_ranked_like_the_commands(name: str) -> None:
    search = {"schedule": ["stock", "zb-h1"], "micro_batch_size": [1, 2]}
    rankings = [[essence(each) for each in rank(job, top=10).best] for job in both(name, search=search)]
    assert len(rankings[0]) == 10
    assert rankings[0] == rankings[1]


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("name", JOBS)
def test_the_flags_of_a_plan_are_a_command_of_the_same_job(name: str, pipeline: int) -> None:
    """They have the pattern and the sizes of state spaces: there is no command beside them."""
    search = {"schedule": "stock", "pipeline_parallel": pipeline}
    job = both(name, search=search)[1]
    best = rank(job).best[0]
    plan = plan_of(job, best, plain=plain_layout(job, best=best), name="plan", place=1)
    words = shlex.split(START)
    for flag, value in flags_of(plan).items():
        given = value if isinstance(value, list) else [] if value is True else [str(value)]
        words += [f"{flag}={given[0]}"] if flag == "--hybrid-layer-pattern" else [flag, *given]
    again = job_of_command(parse_command(words), sections={"cluster": "H100", "search": search})
    assert again.request.shape == plan.shape
    assert again.split == plan.split
    for field in ("experts", "latent", "mtp_layers", "mtp_kinds"):
        assert getattr(again.request, field) == getattr(job, field), field
    assert plan.made_for.job is not None
    assert request_of(plan, plan.made_for.job).logged_expert_layers == job.logged_expert_layers


def test_a_split_of_the_search_counts_the_letters() -> None:
    job = described("M-M*", search={"pipeline_parallel": 2, "split": "3+1", "schedule": "stock"})
    assert {ranked.split for ranked in rank(job, top=20).best} == {(3, 1)}
    with pytest.raises(ConfigError, match=r"search.split: '3\+2'; must sum to num_layers \(4\), the letters"):
        described("M-M*", search={"split": "3+2"})


def test_settings_of_a_described_hybrid_model_have_its_rules() -> None:
    """As in a study of one: FFNs and attention are not offloaded together where layers have one of them."""
    assert "hybrid" in described("M-M*").features
    job = described("M-M*", search={"recompute": "selective", "recompute_modules": "auto"})
    assert "hybrid" in rules_of(job).job.features


@pytest.mark.parametrize(
    ("pattern", "model", "line"),
    [
        ("M-X*", {}, "model.hybrid_layer_pattern: 'M-X*'; 'X' is no layer: layers are M * + - E; remove it"),
        ("M-G*", {}, "`quartet plan` does not price gated delta nets (G)"),
        ("M-*+", {}, "Megatron refuses attention (*) beside latent attention (+)"),
        ("M-M*/*-/--", {}, "all depths behind a slash must have the same layers"),
        ("", {}, "has 0 layers, must have 1 to 16384"),
        ("M-|M*", {}, "pipes fix the stages, which a plan chooses; remove the pipes, or fix the stages"),
        ("M-M*", {"num_layers": 5}, "model.num_layers: 5; must be 4, the number of layers in hybrid_layer"),
        ("M-M*", {"mtp_layers": 1}, "model.mtp_layers: 1; must be 0, the number of depths behind slashes"),
        ("M-M*/*-", {"mtp_layers": 2}, "model.mtp_layers: 2; must be 1, the number of depths behind slashes"),
        ("M-M*/*-", {"tied_embeddings": True}, "needs tied_embeddings: false"),
        ("MEM*", {}, "model.num_experts: missing; layers of hybrid_layer_pattern have experts (E)"),
        ("M-M*", {"num_experts": 8}, "model.num_experts: 8; no layer of hybrid_layer_pattern has"),
        ("M-M*", {"router_losses": True}, "model.router_losses: true; no layer of hybrid_layer_pattern has"),
        ("MEM*", {"num_experts": 8, "num_dense_layers": 1}, "model.num_dense_layers: 1; must be 0"),
        ("M-M+", {}, "model.latent_attention: missing; layers of hybrid_layer_pattern have latent"),
        ("M-M*", {"latent_attention": RANKS}, "model.latent_attention: given; no layer of"),
        ("M-M*", {"mamba_head_dim": 48}, "model.mamba_head_dim: 48; must divide twice the hidden_size"),
        ("M-M*", {"mamba_num_groups": 3}, "model.mamba_num_groups: 3; must divide the 32 heads"),
        (
            "M-M*",
            {"precision": "fp8", "mamba_num_heads": 17, "mamba_num_groups": 1},
            "model.precision: fp8; the 2449 columns of a state-space layer's first projection must be",
        ),
        ("M-M*", {"mamba_state_dim": 0}, "model.mamba_state_dim: 0"),
        ("M-M*", {"hybrid_layer_pattern": 5}, "model.hybrid_layer_pattern: 5"),
    ],
)
def test_illegal_hybrid_keys_are_refused_in_one_line(pattern: str, model: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        described(pattern, **model)
    assert str(caught.value).startswith("job: ")
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_of_a_pattern_need_one() -> None:
    data = {
        "model": {**MODEL, "num_layers": 4, "mamba_state_dim": 64},
        "cluster": {"device": "H100-SXM-80GB", "num_nodes": 1, "devices_per_node": 8},
        "batch": {"global_batch_size": 32},
    }
    with pytest.raises(ConfigError, match=r"mamba_state_dim: 64; needs model.hybrid_layer_pattern; give the"):
        parse_job(data, where="job")


def test_other_widths_are_not_tried() -> None:
    scaling = {"scaling": {"budget": "parameters", "tolerance": 0.02}}
    with pytest.raises(ConfigError, match=r"search.scaling: not known for hybrid models"):
        described("M-M*", search=scaling)


def test_the_example_is_a_hybrid_model() -> None:
    job = read_job(Path(__file__).parents[2] / "examples" / "plan" / "hybrid.yaml")
    kinds = job.shape.layer_kinds
    assert kinds is not None
    assert (kinds.state_space, kinds.mlp, kinds.attention) == (24, 24, 4)
    assert 7.5e9 < job.shape.num_parameters < 9e9
