"""A plan with a schedule of our own in its file: the golden one for ever, the digest of others untouched."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.errors import PlanError
from quartet_plugin.model.canonical import digest
from quartet_plugin.model.custom_schedule import CustomSchedule, StageProfile
from quartet_plugin.model.plan import Plan, ScheduleChoice, Split, read_plan, write_plan
from quartet_plugin.model.schema import dump
from tests.model.plans import PLAN

GOLDEN = Path(__file__).parents[1] / "golden" / "plan_custom.json"
PROFILE = StageProfile(
    forward_s=(0.01, 0.02, 0.02, 0.03),
    input_grad_s=(0.01, 0.02, 0.02, 0.03),
    weight_grad_s=(0.01, 0.02, 0.02, 0.02),
    backward_s=(0.02, 0.04, 0.04, 0.05),
    activation_bytes=(1e6, 2e6, 2e6, 3e6),
    forward_transfer_s=(0.001, 0.0, 0.001, 0.0),
    backward_transfer_s=(0.0, 0.001, 0.0, 0.001),
    held_fraction=0.5,
    memory_limit_bytes=(1e9, 1e9),
)
CUSTOM = CustomSchedule(
    placement=(0, 1, 1, 0),
    profile=PROFILE,
    family={"stretch_forward": [1.0, 1.0], "slack": None, "whole": [False, True]},
    orders=(("0F0", "3F0", "3I0", "0B0", "3W0"), ("1F0", "2F0", "2B0", "1B0")),
)


def plan_with(custom: CustomSchedule | None, *, name: str = "custom", **layout: Any) -> Plan:
    return replace(
        PLAN,
        layout=replace(PLAN.layout, pipeline_parallel=2, virtual_stages=2, **layout),
        split=Split(transformer_layers_per_stage=(2, 3, 2, 1)),
        schedule=ScheduleChoice(name=name, custom=custom),  # type: ignore[arg-type]
    )


def test_the_golden_plan_reads_and_writes_for_ever(tmp_path: Path) -> None:
    plan = plan_with(CUSTOM)
    assert read_plan(GOLDEN) == plan
    write_plan(plan, path=tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_bytes() == GOLDEN.read_bytes()
    assert plan.schedule.label == "searched"
    assert plan.schedule.placement == (0, 1, 1, 0)
    assert hash(plan.schedule) == hash(read_plan(GOLDEN).schedule)


def test_plans_that_execute_the_same_actions_have_one_execution() -> None:
    dearer = replace(CUSTOM, profile=replace(PROFILE, forward_s=(0.02, 0.02, 0.02, 0.02)))
    one, other = plan_with(CUSTOM), plan_with(dearer)
    assert one.key != other.key
    assert one.execution == other.execution
    swapped = (CUSTOM.orders[0], ("2F0", "1F0", "2B0", "1B0")) if CUSTOM.orders else ()
    assert plan_with(replace(CUSTOM, orders=swapped)).execution != one.execution
    by_cost = replace(CUSTOM, orders=None)
    assert plan_with(by_cost).execution != plan_with(replace(dearer, orders=None)).execution
    assert PLAN.execution == PLAN.key


def test_a_plan_without_one_has_no_word_of_it() -> None:
    assert "custom" not in dump(PLAN)["schedule"]
    assert PLAN.schedule.placement is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: plan_with(None), "without a custom part"),
        (lambda: plan_with(CUSTOM, name="interleaved"), "with a custom part"),
        (lambda: plan_with(replace(CUSTOM, placement=(0, 1, 2, 3), orders=None,
                                   profile=replace(PROFILE, memory_limit_bytes=None))), "on 4 ranks"),
    ],
)  # fmt: skip
def test_a_contradiction_is_refused(make: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        make()


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("placement",), [0, 1, 1], "placement"),
        (("placement",), [0, "1", 1, 0], "placement"),
        (("orders",), [["0F0; rm"], []], "orders"),
        (("orders",), [["(0F1;0B0)OVERLAP_F_B"], []], "overlapped pairs can only be simulated"),
        (("orders",), [["(0F1;0F0)OVERLAP_F_B"], []], "expected {stage}"),
        (("named",), "zb-v", "named"),
        (("code",), "import os", "code"),
        (("profile", "forward_s"), [1, 2, 3, "x"], "forward_s"),
        (("profile", "held_fraction"), "nan", "held_fraction"),
        (("profile", "argv"), [], "argv"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(
    keys: tuple[str, ...], value: Any, words: str, tmp_path: Path
) -> None:
    data = json.loads(GOLDEN.read_text())
    inner = data["schedule"]["custom"]
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    data.pop("digest")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**data, "digest": digest(data)}))
    with pytest.raises(PlanError, match=words) as caught:
        read_plan(path)
    assert "\n" not in str(caught.value)
