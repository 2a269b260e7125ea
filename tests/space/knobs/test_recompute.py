"""The settings of recompute: seen where they do something, legal, and kept without a request."""

import random
from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.job_description import Experts
from quartet_plugin.model.layout import Layout, Setting
from quartet_plugin.space.knobs.recompute_modules import SETS
from quartet_plugin.space.param_sources import RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes

FREE = dict.fromkeys(("recompute", "recompute_method", "recompute_num_layers", "recompute_modules"), "auto")
EXPERTS = Experts(
    num_experts=8, experts_per_token=2, ffn_hidden_size=96, shared_ffn_hidden_size=96, num_dense_layers=1
)
DENSE = ("no_linear_bias",)
WITH_EXPERTS = ("moe", "moe_grouped_gemm", "no_linear_bias")


def space_of(
    features: tuple[str, ...] = (),
    *,
    search: dict[str, Any] = FREE,
    impl: str = "transformer_engine",
    **layout: Any,
) -> Space:
    job = make_job(
        layout=make_layout(**{"data_parallel": 1, "pipeline_parallel": 2, **layout}),
        features=features,
        experts=EXPERTS if "moe" in features else None,
    )
    settings = (
        Setting(name="recompute_method", value="uniform"),
        Setting(name="recompute_modules", value="core_attn"),
        Setting(name="recompute_num_layers", value=1),
    )
    named = {"schedule": ["no-pipelining", "1f1b"], "pipeline_parallel": 2, "tensor_parallel": 1, **search}
    asked = parse_config({"search": named}, where="q.yaml").search
    job = replace(job, settings=settings, layer_impl=impl)
    return build_space(job, nodes=make_nodes(2), search=asked, run="r", seed=0)


def layouts(space: Space) -> list[Layout]:
    generator = random.Random(0)
    return [space.decode(RandomParams(generator), trial=1).layout for _ in range(300)]


def modules_of(space: Space) -> set[object]:
    return {x.setting("recompute_modules") for x in layouts(space) if x.recompute == "selective"}


def test_method_and_layers_are_those_of_full_recompute() -> None:
    offered: dict[str, set[object]] = {"none": set(), "selective": set(), "full": set()}
    for layout in layouts(space_of(DENSE)):
        offered[layout.recompute].add(
            (layout.setting("recompute_method"), layout.setting("recompute_num_layers"))
        )
    assert offered["none"] == offered["selective"] == {(None, None)}
    # Stages of four layers: one (the command's value), two or three of them by the block method.
    assert offered["full"] == {(None, None), ("block", None), ("block", 2), ("block", 3)}


def test_modules_are_those_of_the_layers() -> None:
    assert modules_of(space_of(DENSE)) == {None, "mlp"}
    assert modules_of(space_of(DENSE, impl="local")) == {None, "mlp", "core_attn+mlp"}
    assert modules_of(space_of()) == {None}
    with_experts = {str(modules) for modules in modules_of(space_of(WITH_EXPERTS)) - {None}}
    assert {"moe", "moe_act", "shared_experts", "mlp", "layernorm+moe_act"} <= with_experts
    assert not [modules for modules in with_experts if "mla_up_proj" in modules or "core_attn" in modules]
    latent = modules_of(space_of((*WITH_EXPERTS, "multi_latent_attention")))
    assert {"mla_up_proj", "mla_up_proj+mlp", "layernorm+mla_up_proj+moe_act"} <= latent
    assert not [x for x in modules_of(space_of((*WITH_EXPERTS, "fp8"))) if x and "moe_act" in str(x)]


def test_without_a_request_all_is_as_the_command_has_it() -> None:
    assert {layout.settings for layout in layouts(space_of(search={"recompute": "auto"}))} == {None}


def test_a_resumed_study_of_before_decodes_the_same() -> None:
    space = space_of(DENSE)
    before = build_space(
        replace(space.job, settings=None), nodes=space.nodes, search=space.search, run="r", seed=0
    )
    assert {layout.settings for layout in layouts(before)} == {None}


@pytest.mark.parametrize(
    ("features", "impl", "modules", "rule"),
    [
        ((), "local", "mlp", "mlp: needs --disable-bias-linear"),
        (DENSE, "local", "layernorm", "layernorm: needs --transformer-impl transformer_engine"),
        (DENSE, "local", "mla_up_proj", "mla_up_proj: needs --multi-latent-attention"),
        (DENSE, "local", "moe_act", "moe_act: the model has no experts"),
        (("moe",), "local", "moe_act", "moe_act: needs --moe-grouped-gemm"),
    ],
)
def test_a_refused_set_names_the_rule(features: tuple[str, ...], impl: str, modules: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"search.recompute_modules: {modules}; {rule}"):
        space_of(features, search={**FREE, "recompute_modules": modules}, impl=impl)


def test_uniform_groups_are_single_beside_multi_token_prediction() -> None:
    many = {**FREE, "recompute_num_layers": [2]}
    methods = {x.setting("recompute_method") for x in layouts(space_of(("mtp",), search=many)) if x.settings}
    assert methods == {"block"}


def test_names_of_a_set_are_in_order() -> None:
    assert all(text.split("+") == sorted(set(text.split("+"))) for text in SETS)
    assert len(set(SETS)) == len(SETS)


def test_the_list_of_knobs_has_the_modules_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-layers", "4", "--recompute-modules", "mlp", "layernorm"]
    assert main(["knobs", "--", "torchrun", "pretrain_gpt.py", *flags]) == 0
    assert "recompute_modules, now layernorm+mlp (class A" in capsys.readouterr().out
