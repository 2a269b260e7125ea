"""The flex dispatcher by name: legal as Megatron and its kernels have it, and followed by the other rules."""

from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.plan import Plan
from quartet_plugin.space.knob_table import knob_rows
from quartet_plugin.space.knobs.expert_tensor_parallel import EXPERT_TENSOR_PARALLEL
from quartet_plugin.space.knobs.knob import KnobContext
from quartet_plugin.space.knobs.token_dispatcher import TOKEN_DISPATCHER
from quartet_plugin.space.plan_space import Space
from tests.space.jobs import make_layout
from tests.space.knobs.test_expert_overlap import plans, space_of

NAME = TOKEN_DISPATCHER.name
DEEPEP, HYBRIDEP = "flex-deepep", "flex-hybridep"
EVERY = ["allgather", "alltoall", DEEPEP, HYBRIDEP]
FLEX = ("moe", "moe_flex_dispatcher", "moe_deepep")


def space(asked: Any, *, command: str = "alltoall", **job: Any) -> Space:
    features = FLEX if command.startswith("flex") else ("moe",)
    return space_of(
        search={NAME: asked, "moe_grouped_gemm": "auto"},
        command={NAME: command, "moe_grouped_gemm": False},
        **{"features": (*features, "no_linear_bias"), **job},
    )


def values(made: Space) -> set[Any]:
    return {plan.layout.setting(NAME) for plan in plans(made)}


def fault(value: str, made: Space, **layout: Any) -> str | None:
    context = KnobContext(
        layout=make_layout(**{"data_parallel": 4, "pipeline_parallel": 1, "expert_parallel": 2, **layout}),
        shape=made.job.shape,
        rules=made.rules(),
    )
    return TOKEN_DISPATCHER.fault(value, context)


def has_flex(plan: Plan, command: str) -> bool:
    return str(plan.layout.setting(NAME) or command).startswith("flex")


def test_it_is_searched_by_name_alone() -> None:
    assert values(space("stock")) == {None}
    assert values(space("auto")) == {None, "allgather"}
    assert values(space("auto", command=DEEPEP)) == {None}
    assert values(space(EVERY)) == {None, "allgather", DEEPEP, HYBRIDEP}
    assert values(space(["alltoall", HYBRIDEP])) == {None, HYBRIDEP}


def test_a_plan_has_it_only_with_several_devices_of_experts() -> None:
    made = plans(space(EVERY))
    assert {plan.layout.expert_parallel for plan in made} == {1, 2, 4}
    assert {plan.layout.expert_parallel for plan in made if has_flex(plan, "alltoall")} == {2, 4}
    assert fault(HYBRIDEP, space(EVERY), expert_parallel=1, tensor_parallel=2) == "needs EP above 1"


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"layer_impl": "local"}, "its kernels run on GPUs; needs --transformer-impl transformer_engine"),
        ({"precision": "fp32"}, "needs --bf16"),
        ({"precision": "fp16"}, "needs --bf16"),
        ({"features": ("moe", "moe_router_fp64")}, "its kernels round the probabilities to fp32"),
        ({"features": ("moe", "moe_capacity")}, "must be the command's own alltoall: moe_capacity"),
        ({"features": ("moe", "cuda_graphs")}, "must be the command's own alltoall: cuda_graphs"),
        ({"features": ()}, "must be the command's own alltoall: the model has no experts"),
    ],
)
def test_a_request_that_no_layout_can_have_is_refused_with_the_rule(job: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"search\.{NAME}: {DEEPEP}; {reason}"):
        space([DEEPEP, HYBRIDEP], **job)


def test_its_back_end_is_named() -> None:
    with pytest.raises(ConfigError, match="must be the command's own; a plan names its back end"):
        space(["flex"])
    # A back end that no plan has stays the command's.
    other = space(["stock", "alltoall"], command="flex")
    assert values(other) == {None, "alltoall"}
    assert fault("flex", other) is None


@pytest.mark.parametrize("beside", ["overlap_moe", "moe_shared_expert_overlap", "moe_router_padding"])
def test_what_megatron_has_with_alltoall_and_flex_keeps_allgather_out(beside: str) -> None:
    made = space(EVERY, features=("moe", beside))
    assert values(made) == {None, DEEPEP, HYBRIDEP}
    assert fault("allgather", made) == f"must be the command's own alltoall: {beside}"
    assert values(space("auto", features=("moe", beside))) == {None}


@pytest.mark.parametrize(("version", "is_legal"), [("0.17.1", False), ("0.18.2", True)])
def test_before_a_release_it_has_no_overlap_of_the_shared_expert(version: str, is_legal: bool) -> None:
    beside = "moe_shared_expert_overlap"
    made = space(EVERY, features=("moe", beside), framework_version=version)
    assert values(made) == ({None, DEEPEP, HYBRIDEP} if is_legal else {None})
    both = {NAME: EVERY, beside: [False, True]}
    layouts = [plan.layout for plan in plans(space_of(search=both, framework_version=version))]
    overlapped = {layout.setting(NAME) for layout in layouts if layout.setting(beside)}
    assert overlapped == ({None, DEEPEP, HYBRIDEP} if is_legal else {None})


def test_a_command_with_flex_is_tuned_to_its_other_back_end_or_to_alltoall() -> None:
    assert values(space([DEEPEP, HYBRIDEP], command=DEEPEP)) == {None, HYBRIDEP}
    assert values(space(["alltoall", HYBRIDEP], command=DEEPEP)) == {"alltoall", HYBRIDEP}
    rows = {row.knob.name: row for row in knob_rows(space(["stock", "alltoall"], command=DEEPEP))}
    assert (rows[NAME].value, rows[NAME].state) == (DEEPEP, "tuned")
    assert set(rows[NAME].choices) == {"stock", "alltoall"}
    kept = {row.knob.name: row.state for row in knob_rows(space("stock", command=DEEPEP))}
    assert kept[NAME] == "kept: moe_flex_dispatcher"


@pytest.mark.parametrize(
    ("asked", "degrees"),
    [
        ("stock", {2, 4}),
        ([DEEPEP, HYBRIDEP], {2, 4}),
        (["alltoall"], {1, 2, 4}),
        (["stock", "alltoall"], {1, 2, 4}),
    ],
)
def test_experts_of_a_command_with_flex_lie_on_a_device_alone_without_it(
    asked: Any, degrees: set[int]
) -> None:
    made = plans(space(asked, command=DEEPEP))
    assert {plan.layout.expert_parallel for plan in made} == degrees
    alone = [plan for plan in made if plan.layout.expert_parallel == 1]
    assert not any(has_flex(plan, DEEPEP) for plan in alone)
    assert {plan.layout.tensor_parallel for plan in alone} == ({1, 2, 4} if alone else set())


def test_orders_of_ranks_keep_groups_of_experts_where_a_plan_may_have_it() -> None:
    keeps = {
        (command, tuple(asked)): space(asked, command=command).order_rules.keeps_experts
        for command in ("alltoall", DEEPEP)
        for asked in (["stock"], ["alltoall"], ["alltoall", HYBRIDEP])
    }
    assert keeps == {
        ("alltoall", ("stock",)): False,
        ("alltoall", ("alltoall",)): False,
        ("alltoall", ("alltoall", HYBRIDEP)): True,
        (DEEPEP, ("stock",)): True,
        (DEEPEP, ("alltoall",)): False,
        (DEEPEP, ("alltoall", HYBRIDEP)): True,
    }
    # A layout whose settings are chosen before its order, as in `quartet plan`, has the rule of its own.
    rules = replace(space(["alltoall", HYBRIDEP]).rules(), is_planned=True)
    layout = make_layout(expert_parallel=2)
    assert not rules.order_rules_of(layout).keeps_experts
    assert rules.order_rules_of(layout.with_setting(NAME, HYBRIDEP)).keeps_experts
    of_flex = replace(space(["alltoall", HYBRIDEP], command=DEEPEP).rules(), is_planned=True)
    assert of_flex.order_rules_of(layout).keeps_experts
    assert not of_flex.order_rules_of(layout.with_setting(NAME, "alltoall")).keeps_experts


@pytest.mark.parametrize("command", ["alltoall", DEEPEP])
def test_grouped_products_stay_beside_it(command: str) -> None:
    made = plans(space(["alltoall", HYBRIDEP], command=command))
    grouped = {(has_flex(plan, command), plan.layout.setting("moe_grouped_gemm")) for plan in made}
    assert grouped == {(True, None), (False, None), (False, True)}


@pytest.mark.parametrize(
    ("asked", "command", "is_refused"),
    [
        ("stock", DEEPEP, True),
        (["stock", "alltoall"], DEEPEP, True),
        (["alltoall"], DEEPEP, False),
        (["alltoall", DEEPEP], "alltoall", False),
    ],
)
def test_the_commands_flex_has_devices_to_exchange_tokens_with(
    asked: Any, command: str, is_refused: bool
) -> None:
    """Whole experts with EP 1 lie on one device each; tensor-parallel devices that share them are several."""
    made = space(asked, command=command)
    layout = make_layout(data_parallel=2, tensor_parallel=2, pipeline_parallel=1, expert_parallel=1)
    context = KnobContext(layout=layout, shape=made.job.shape, rules=made.rules())
    refusal = EXPERT_TENSOR_PARALLEL.fault(1, context)
    assert (refusal is not None) == is_refused
    assert refusal is None or "flex dispatcher" in refusal
    assert EXPERT_TENSOR_PARALLEL.fault(0, context) is None
