"""Modules whose activations are on the host: where Megatron has them, and only where a search names them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.tensor_partition import partition_from_label
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, LiveJob
from quartet_plugin.space.knobs.offload_modules import OFFLOAD_MODULES, SETS
from quartet_plugin.space.knobs.recompute import RECOMPUTE, module_fault
from quartet_plugin.space.plan_space import Space
from tests.space.knobs.test_expert_overlap import plans, space_of, states

NAME = OFFLOAD_MODULES.name
NONE = {NAME: "none", "moe_grouped_gemm": True}
RINGS = {"tensor_partition": partition_from_label("rings"), "sequence_parallel": True}


def sets(space: Space) -> set[Any]:
    """The set of each plan; None is the command's."""
    return {plan.layout.setting(NAME) for plan in plans(space)}


def context_of(
    features: tuple[str, ...] = ("moe",), *, is_custom: bool = False, **layout: Any
) -> KnobContext:
    space = space_of(search={}, command=NONE, features=features)
    changed = replace(space.job.layout, **layout)
    return KnobContext(layout=changed, shape=space.job.shape, rules=space.rules(), is_custom=is_custom)


@pytest.mark.parametrize("search", [{}, {NAME: "auto"}])
def test_nothing_is_offloaded_unless_the_search_names_it(search: dict[str, Any]) -> None:
    assert sets(space_of(search=search, command=NONE)) == {None}


def test_named_sets_are_searched() -> None:
    asked = {NAME: ["none", "core_attn", "expert_fc1+moe_act"]}
    assert sets(space_of(search=asked, command=NONE)) == {None, "core_attn", "expert_fc1+moe_act"}
    command = {**NONE, NAME: "core_attn"}
    features = ("moe", "activation_offload")
    space = space_of(search={NAME: ["stock", "none"]}, command=command, features=features)
    assert sets(space) == {None, "none"}


def test_its_command_keeps_stages_and_degrees_free() -> None:
    command = {**NONE, NAME: "core_attn"}
    layout = {"pipeline_parallel": 2, "data_parallel": 2}
    space = space_of(search={}, command=command, features=("moe", "activation_offload"), layout=layout)
    assert set(space.locked) == {Axis.SCALING}
    assert {plan.layout.pipeline_parallel for plan in plans(space)} > {1, 2}


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"layer_impl": "local"}, "it copies between a GPU and its host; needs --transformer-impl"),
        ({"features": ("moe", "cuda_graphs")}, "cuda_graphs"),
        ({"features": ("moe", "cpu_offload")}, "cpu_offload"),
        ({"features": ("moe", "fsdp")}, "fsdp"),
        ({"features": ("moe", "attention_variant")}, "attention_variant"),
    ],
)
def test_what_keeps_it(job: dict[str, Any], reason: str) -> None:
    assert states(space_of(search={}, command=NONE, **job))[NAME].startswith(f"kept: {reason}")


@pytest.mark.parametrize(
    ("value", "context", "fault"),
    [
        ("core_attn", {}, None),
        ("qkv_linear", {"features": ()}, None),
        ("core_attn", {"is_custom": True}, "runs in the framework's own schedules alone"),
        ("core_attn", {"recompute": "full"}, "not with full recompute, which saves nothing of a module"),
        (
            "qkv_linear",
            {"features": (), "tensor_parallel": 2, **RINGS},
            "not with a tensor partition",
        ),
        ("core_attn", {"recompute": "selective"}, "core_attn: its recompute saves nothing of it"),
        ("expert_fc1", {"recompute": "selective"}, None),
        ("expert_fc1", {"features": ()}, "expert_fc1: the model has no experts"),
        (
            "moe_act",
            {"features": ("moe", "moe_capacity")},
            "moe_act: a stash of the tokens that experts take may hold it (moe_capacity)",
        ),
        ("mlp_norm", {}, None),
        ("mlp_norm", {"features": ()}, "mlp_norm: the norm is a part of the product behind it"),
        ("attn_norm", {}, "attn_norm: the norm is a part of the product behind it"),
        ("attn_norm+mlp_norm", {"features": ("moe", "multi_latent_attention")}, None),
    ],
)
def test_its_rules(value: str, context: dict[str, Any], fault: str | None) -> None:
    assert OFFLOAD_MODULES.fault(value, context_of(**context)) == fault


def test_experts_are_not_repeated_whole_beside_what_is_offloaded_inside_of_them() -> None:
    """Megatron asserts it (megatron/core/transformer/transformer_config.py)."""
    context = context_of(recompute="selective")
    assert module_fault("moe", context) is None
    inside = replace(context, layout=context.layout.with_setting(NAME, "core_attn+moe_act"))
    assert module_fault("moe", inside) == "moe: not supported with offloading of moe_act"
    repeated = replace(context, layout=context.layout.with_setting("recompute_modules", "moe"))
    assert OFFLOAD_MODULES.fault("expert_fc1", repeated) == "expert_fc1: not supported with recompute of moe"
    ungrouped = replace(context, layout=context.layout.with_setting("moe_grouped_gemm", False))
    assert OFFLOAD_MODULES.fault("expert_fc1", ungrouped) == "expert_fc1: needs --moe-grouped-gemm"


def test_full_recompute_does_not_begin_beside_offloading() -> None:
    fault = "full recompute saves nothing of a module that the command offloads"
    assert RECOMPUTE.fault("full", context_of(("moe", "activation_offload"))) == fault
    assert RECOMPUTE.fault("selective", context_of(("moe", "activation_offload"))) is None


def test_a_set_that_no_plan_can_have_is_refused_with_the_rule() -> None:
    reason = r"search\.offload_modules: moe_act; moe_act: the model has no experts"
    with pytest.raises(ConfigError, match=reason):
        space_of(search={NAME: ["moe_act"]}, command=NONE, features=())


def test_the_set_of_a_model_is_read_back() -> None:
    def read(**model: Any) -> Any:
        return OFFLOAD_MODULES.read_back(LiveJob(degrees={}, model=SimpleNamespace(**model)))

    assert read() is None
    assert read(fine_grained_activation_offloading=False, offload_modules=["moe_act"]) == "none"
    names = ["moe_act", "core_attn"]
    assert read(fine_grained_activation_offloading=True, offload_modules=names) == "core_attn+moe_act"
    assert read(fine_grained_activation_offloading=True, offload_modules=["layer_input"]) is None


def test_every_set_has_its_names_in_order() -> None:
    for text in SETS:
        assert text == "+".join(sorted(text.split("+")))
        assert "attn_proj" not in text or "core_attn" in text
