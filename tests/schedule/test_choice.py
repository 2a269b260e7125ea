"""A plan's schedule and back: what makes the order survives, and nothing else is taken."""

import json
from dataclasses import replace

import numpy as np
import pytest

from quartet_plugin.errors import PlanError
from quartet_plugin.model.costs import StageCosts
from quartet_plugin.model.custom_schedule import CustomSchedule
from quartet_plugin.model.plan import ScheduleChoice
from quartet_plugin.model.schema import dump, parse
from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.choice import (
    choice_of,
    family_of,
    generated,
    profile_of,
    relative_costs,
    written_of,
)
from quartet_plugin.schedule.family import Family, generate
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.schedule import Schedule
from tests.model.plans import LAYOUT

PLACEMENT = (0, 1, 1, 0)


def costs() -> StageCosts:
    ones = np.ones(4)
    return StageCosts(
        device_of_stage=np.array(PLACEMENT),
        forward_s=ones,
        input_grad_s=2 * ones,
        weight_grad_s=ones,
        backward_s=3 * ones,
        activation_bytes=10 * ones,
        forward_transfer_s=np.array([0.1, 0.0, 0.1, 0.0]),
        backward_transfer_s=np.array([0.0, 0.1, 0.0, 0.1]),
        held_fraction=0.5,
    )


FAMILY = Family(
    stretch_forward=(1.0, 1.5),
    stretch_backward=(1.0, 1.0),
    shift_forward=(0.0, 0.0),
    shift_backward=(0.0, 0.5),
    slack=2.0,
    memory_cap=3.0,
)


def through_file(choice: CustomSchedule) -> CustomSchedule:
    data = json.loads(json.dumps(dump(choice)))
    return parse(CustomSchedule, data, where="test")


def test_a_named_schedule_is_its_name() -> None:
    choice = choice_of(named("zb-v", num_devices=2, num_microbatches=4), costs())
    assert (choice.named, choice.family, choice.orders, choice.label) == ("zb-v", None, None, "zb-v")
    again = through_file(choice)
    assert again == choice
    for name in ("forward_s", "backward_transfer_s", "activation_bytes", "device_of_stage"):
        np.testing.assert_array_equal(getattr(relative_costs(again).ratios, name), getattr(costs(), name))
    assert relative_costs(again).ratios.held_fraction == 0.5


def test_a_point_of_the_family_is_its_parameters() -> None:
    schedule = generate(FAMILY, costs(), 5)
    choice = through_file(choice_of(schedule, costs()))
    assert choice.orders is None
    found = family_of(choice)
    assert found == FAMILY
    again = generate(found, relative_costs(choice).ratios, 5)
    assert all((a == b).all() for a, b in zip(again.orders, schedule.orders, strict=True))


@pytest.mark.parametrize(
    "origin",
    [
        {"name": "zb-v", "inserted": True},
        {"family": FAMILY.to_json(), "inserted": True},
        {"family": {"start": "zb-v", "inserted": True}},
        {"family": {**FAMILY.to_json(), "inserted": True}},
        {},
    ],
)
def test_an_order_that_its_origin_does_not_make_is_written_out(origin: dict[str, object]) -> None:
    schedule = replace(named("zb-v", num_devices=2, num_microbatches=4), origin=origin)
    choice = through_file(choice_of(schedule, costs()))
    written = written_of(choice, num_microbatches=4)
    assert written is not None
    assert [written.actions(d) for d in range(2)] == [schedule.actions(d) for d in range(2)]
    has_parameters = "memory_cap" in json.dumps(origin)
    assert (choice.family is not None) == has_parameters


def test_two_copies_are_refused() -> None:
    schedule = named("chimera", num_devices=2, num_microbatches=4)
    with pytest.raises(PlanError, match="two copies"):
        choice_of(schedule, costs())


BASE = choice_of(named("zb-v", num_devices=2, num_microbatches=4), costs())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"placement": (1, 0, 0, 1)}, "placement"),
        ({"placement": (0, 1, 1, 1)}, "equally many"),
        ({"placement": (0, 10**9, 1, 0)}, "placement"),
        ({"placement": (0, 1)}, "profile"),
        ({"named": "../x"}, "named"),
        ({"named": None}, "the order is missing"),
        ({"named": None, "group": 2, "orders": (("0F0",), ("1F0",))}, "group"),
        ({"family": {}}, "named"),
        ({"orders": (("0F0",),)}, "orders"),
        ({"orders": (("0F0",), ("1X0",))}, r"orders\[1\]"),
        ({"profile": replace(profile_of(costs()), memory_limit_bytes=(1.0,))}, "memory_limit_bytes"),
    ],
)
def test_a_wrong_choice_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        replace(BASE, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [("forward_transfer_s", (1.0,)), ("weight_grad_s", (1.0, 1.0, -1.0, 1.0)), ("held_fraction", 2.0)],
)
def test_a_wrong_profile_is_refused(name: str, value: object) -> None:
    with pytest.raises(PlanError, match=name):
        replace(profile_of(costs()), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "family",
    [{"slack": 1}, {**FAMILY.to_json(), "slack": "x"}, {**FAMILY.to_json(), "stretch_forward": [1.0]}],
)
def test_parameters_that_are_no_point_of_the_family_are_refused(family: dict[str, object]) -> None:
    choice = replace(BASE, named=None, family=family)
    with pytest.raises(PlanError, match="family"):
        family_of(choice)


def test_a_written_order_of_unknown_stages_is_refused() -> None:
    choice = replace(BASE, orders=(("9F0",), ("1F0",)))
    with pytest.raises(PlanError, match="stages"):
        written_of(choice, num_microbatches=4)
    assert isinstance(written_of(replace(BASE, orders=(("0F0",), ("1F0",))), num_microbatches=1), Schedule)


@pytest.mark.parametrize("name", ["zb-v", "dualpipev"])
def test_an_order_alone_or_a_name_without_one_is_plain_for_other_microbatches(name: str) -> None:
    """As the runtime runs it while a batch grows; dualpipev has no order of fewer than two rounds."""
    schedule = replace(named(name, num_devices=2, num_microbatches=4), origin={})
    written = ScheduleChoice(name="custom", custom=through_file(choice_of(schedule, costs())))
    layout = replace(LAYOUT, virtual_stages=2)
    plain = generated(written, layout=layout, num_microbatches=2)
    assert not any((order & 3 == ActionKind.W).any() for order in plain.orders)
    if name == "dualpipev":
        by_name = choice_of(named(name, num_devices=2, num_microbatches=4), costs())
        assert by_name.named == name
        same = generated(ScheduleChoice(name="custom", custom=by_name), layout=layout, num_microbatches=2)
        assert [list(order) for order in same.orders] == [list(order) for order in plain.orders]
