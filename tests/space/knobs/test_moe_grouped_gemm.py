"""Grouped products of experts: searched with Transformer Engine's layers, kept where they do nothing."""

from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.space.knobs.knob import KnobContext
from quartet_plugin.space.knobs.moe_grouped_gemm import MOE_GROUPED_GEMM
from quartet_plugin.space.knobs.recompute_modules import RECOMPUTE_MODULES
from quartet_plugin.space.rules import LayoutRules
from tests.space.knobs.test_expert_overlap import changes, plans, space_of, states

NAME = MOE_GROUPED_GEMM.name
EXPERTS = ("moe", "no_linear_bias")
BIASED = ("moe", "moe_linear_bias")


@pytest.mark.parametrize("command", [False, True])
def test_it_is_searched_in_both_directions(command: bool) -> None:
    features = (*EXPERTS, "moe_grouped_gemm") if command else EXPERTS
    space = space_of(search={NAME: "auto"}, command={NAME: command}, features=features)
    assert {plan.layout.setting(NAME) for plan in plans(space)} == {None, not command}
    assert {changes(plan.layout) for plan in plans(space)} == {()}


@pytest.mark.parametrize(
    ("command", "more", "found"),
    [
        (True, (), {None, False}),
        (True, ("moe_unfused_bias",), {None, False}),
        (False, ("moe_unfused_bias",), {None, True}),
        (False, (), {None}),
    ],
)
def test_the_commands_own_value_is_a_choice_beside_biases(
    command: bool, more: tuple[str, ...], found: set[bool | None]
) -> None:
    space = space_of(search={NAME: "auto"}, command={NAME: command}, features=(*BIASED, *more))
    assert {plan.layout.setting(NAME) for plan in plans(space)} == found


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"features": ()}, "the model has no experts"),
        ({"layer_impl": "local"}, "local layers, as a CPU has them, compute one expert after the other"),
        ({"features": (*EXPERTS, "moe_flex_dispatcher")}, "moe_flex_dispatcher"),
    ],
)
def test_what_keeps_it(job: dict[str, Any], reason: str) -> None:
    flex = {"moe_token_dispatcher": "flex-deepep"} if reason == "moe_flex_dispatcher" else {}
    space = space_of(search={}, command={NAME: False, **flex}, **{"features": EXPERTS, **job})
    assert states(space)[NAME].startswith(f"kept: {reason}")


def contexts(rules: LayoutRules, **settings: bool) -> KnobContext:
    layout = replace(rules.job.layout, recompute="selective")
    for name, value in settings.items():
        layout = layout.with_setting(name, value)
    return KnobContext(layout=layout, shape=rules.job.shape, rules=rules)


def test_its_rules_are_megatrons() -> None:
    biased = space_of(search={}, command={NAME: False}, features=BIASED).rules()
    needs = "needs --disable-bias-linear, or --no-bias-dropout-fusion"
    assert MOE_GROUPED_GEMM.fault(True, contexts(biased)) == needs
    on = space_of(search={}, command={NAME: True}, features=BIASED).rules()
    assert MOE_GROUPED_GEMM.fault(True, contexts(on)) is None
    # Of a command that nothing launches its flags alone say it.
    assert MOE_GROUPED_GEMM.fault(True, contexts(replace(on, is_planned=True))) == needs
    command = {NAME: True, "recompute_modules": "moe_act"}
    recomputed = space_of(search={}, command=command, features=(*EXPERTS, "moe_grouped_gemm")).rules()
    assert MOE_GROUPED_GEMM.fault(False, contexts(recomputed)) == "recompute of moe_act needs it"


def test_recompute_of_its_activation_looks_at_the_plan() -> None:
    rules = space_of(search={}, command={NAME: False}, features=EXPERTS).rules()
    assert RECOMPUTE_MODULES.fault("moe_act", contexts(rules)) == "moe_act: needs --moe-grouped-gemm"
    assert RECOMPUTE_MODULES.fault("moe_act", contexts(rules, **{NAME: True})) is None
