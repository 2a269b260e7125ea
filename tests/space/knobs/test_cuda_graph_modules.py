"""Parts of a layer in CUDA graphs: searched where a command captures parts, by Megatron's rules."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from quartet_plugin.cost.run import ON_CPU, Software
from quartet_plugin.cost.software import with_features, with_settings
from quartet_plugin.megatron.apply import rewrite
from quartet_plugin.space.knobs.cuda_graph_modules import CUDA_GRAPH_MODULES
from quartet_plugin.space.knobs.knob import KnobContext, LiveJob
from tests.megatron.entry_launch import MEGATRON_FLAGS, make_plan
from tests.megatron.native import native_flags
from tests.space.knobs.test_expert_overlap import EXPERTS, plans, space_of, states

NAME = CUDA_GRAPH_MODULES.name
ROUTING = "moe_preprocess+moe_router"
GRAPHS = ("cuda_graphs", "graphed_attn")


def test_a_mixture_of_experts_tries_attention_and_routing() -> None:
    space = space_of(search={NAME: "auto"}, command={NAME: "attn"}, features=("moe", *GRAPHS))
    assert {plan.layout.setting(NAME) for plan in plans(space)} == {None, ROUTING, f"attn+{ROUTING}"}


def test_a_dense_model_tries_attention_and_mlp() -> None:
    layout = {"expert_parallel": 1}
    space = space_of(search={NAME: "auto"}, command={NAME: "attn"}, features=GRAPHS, layout=layout)
    assert {plan.layout.setting(NAME) for plan in plans(space)} == {None, "mlp", "attn+mlp"}


@pytest.mark.parametrize(
    ("features", "command", "reason"),
    [
        (("moe",), {}, "the command captures no graphs"),
        (("moe", "cuda_graphs", "graphed_layer"), {}, "the command captures whole layers, or the iteration"),
        (("moe", *GRAPHS), {NAME: "attn", "delay_wgrad_compute": True}, "delayed weight gradients in graphs"),
    ],
)
def test_what_keeps_it(features: tuple[str, ...], command: dict[str, Any], reason: str) -> None:
    space = space_of(search={}, command=command, features=features)
    assert states(space)[NAME].startswith(f"kept: {reason}")


@pytest.mark.parametrize(
    ("value", "changes", "fault"),
    [
        ("attn+mlp", {}, "mlp: every layer has experts"),
        (ROUTING, {"features": ("moe", "fp8", *GRAPHS)}, "moe_preprocess: not supported with a capacity"),
        (ROUTING, {"recompute_modules": "moe"}, "moe_router: not supported with recompute of moe"),
        (f"attn+{ROUTING}", {"recompute_modules": "core_attn"}, "attn: not supported with recompute"),
    ],
)
def test_its_rules_are_megatrons(value: str, changes: dict[str, Any], fault: str) -> None:
    features = changes.pop("features", ("moe", *GRAPHS))
    layout = {"recompute": "selective"} if changes else {}
    space = space_of(search={}, command={NAME: "mlp", **changes}, features=features, layout=layout)
    context = KnobContext(layout=space.job.layout, shape=space.job.shape, rules=space.rules())
    assert str(CUDA_GRAPH_MODULES.fault(value, context)).startswith(fault)


def test_dense_first_layers_have_an_mlp() -> None:
    experts = replace(EXPERTS, num_dense_layers=1)
    space = space_of(
        search={NAME: "auto"}, command={NAME: "attn"}, features=("moe", *GRAPHS), experts=experts
    )
    assert f"attn+mlp+{ROUTING}" in {plan.layout.setting(NAME) for plan in plans(space)}


@pytest.mark.parametrize("flag", ["--cuda-graph-modules", "--cuda-graph-scope"])
def test_it_becomes_a_flag_and_is_read_back(flag: str) -> None:
    words = [*MEGATRON_FLAGS, "--cuda-graph-impl", "transformer_engine", flag, "attn"]
    plan, flags = make_plan(split=(6,)), native_flags()
    planned = replace(plan, layout=plan.layout.with_setting(NAME, f"attn+{ROUTING}"))
    edited, _ = rewrite(planned, flags=flags, words=words)
    assert edited == [*words[:-2], "--cuda-graph-modules", "attn", "moe_preprocess", "moe_router"]
    args = flags.values(edited)
    assert CUDA_GRAPH_MODULES.read(args) == f"attn+{ROUTING}"
    live = LiveJob(degrees={}, model=SimpleNamespace(cuda_graph_modules=args.cuda_graph_modules))
    assert CUDA_GRAPH_MODULES.read_back(live) == f"attn+{ROUTING}"
    assert CUDA_GRAPH_MODULES.read(flags.values(MEGATRON_FLAGS)) is None


def test_its_price_is_the_share_of_starts_that_are_replayed() -> None:
    software = with_features(Software(), GRAPHS)
    assert software.graphed_share == pytest.approx(0.3)
    assert with_settings(software, {}) == software
    assert with_settings(software, {NAME: f"attn+{ROUTING}"}).graphed_share == pytest.approx(0.6)
    assert with_settings(ON_CPU, {NAME: "attn"}) == ON_CPU
