"""What a user leaves of the family's parameters: searched orders keep it, and plans say what was chosen."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quartet_plugin.errors import ConfigError, InfeasibleError
from quartet_plugin.model.costs import Costs
from quartet_plugin.planner.job import parse_job
from quartet_plugin.planner.order_search import planned_ranking
from quartet_plugin.schedule import placement as places
from quartet_plugin.schedule.choice import choice_of, family_of, origin_words
from quartet_plugin.schedule.placement import Placement, PlacementKind, kind_of
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.search.engine import search
from quartet_plugin.schedule.search.limits import FREE, FamilyLimits
from quartet_plugin.schedule.search.problem import ScheduleProblem
from quartet_plugin.schedule.simulate import simulate_costs
from quartet_plugin.space.schedules import cost_table
from quartet_plugin.split.layers import EndLoads
from quartet_plugin.tuner.config import parse_config
from tests.planner.planning import job_data
from tests.space.jobs import make_shape

DEVICES, MICROBATCHES = 4, 6
V = places.v_shape(DEVICES)


def costs_on(placement: Placement) -> Costs:
    return cost_table(
        make_shape(num_layers=8),
        end_loads=EndLoads(embedding=0.0, head=0.5),
        placement=placement,
        num_devices=DEVICES,
        num_microbatches=MICROBATCHES,
    )


def searched(limits: FamilyLimits, placement: Placement = V) -> Schedule:
    costs = costs_on(placement)
    held = np.full(DEVICES, 2.0)
    capped = replace(costs, memory_limit_bytes=limits.capped(None, held))
    split = [2, *[1] * (len(placement) - 2), 2] if len(placement) == 8 else [3, 2, 2, 3]
    return search(capped, placement=placement, split=split, evaluations=150, limits=limits).schedule


def most_waiting(schedule: Schedule) -> int:
    """The most weight gradients that wait on a device."""
    most = 0
    for codes in schedule.orders:
        kinds = codes & 3
        most = max(most, int(np.cumsum((kinds == 1).astype(int) - (kinds == 2)).max()))
    return most


@pytest.mark.parametrize(
    "limits",
    [
        FamilyLimits(slacks=(1.0,)),
        FamilyLimits(w_limits=(0.0,)),
        FamilyLimits(w_limits=(2.0,), slacks=(0.5, math.inf)),
        FamilyLimits(w_limits=(0.0, 1.0), memory_cap=2.5),
    ],
)
def test_a_searched_order_is_a_point_of_what_is_left_of_the_family(limits: FamilyLimits) -> None:
    schedule = searched(limits)
    custom = choice_of(
        schedule, ScheduleProblem.of(costs_on(V)).stage_costs(V, schedule.layers_per_stage or ())
    )
    family = family_of(custom)
    assert family is not None
    assert custom.orders is None
    assert family.slack in (limits.slacks or (family.slack,))
    assert family.w_limit in (limits.w_limits or (family.w_limit,))
    if limits.w_limits is not None and math.isfinite(max(limits.w_limits)):
        assert most_waiting(schedule) <= max(limits.w_limits) + 1
    slack = "unlimited" if math.isinf(family.slack) else f"{family.slack:.4g}"
    assert f"placement v, slack {slack}, " in (origin_words(custom) or "")


def test_a_written_order_is_said_whatever_stands_beside_it() -> None:
    schedule = searched(FREE)
    of_stages = ScheduleProblem.of(costs_on(V)).stage_costs(V, schedule.layers_per_stage or ())
    custom = replace(choice_of(schedule, of_stages, with_orders=True), named=None, family={"slack": 1.0})
    assert origin_words(custom) == "placement v, written out"


def test_a_cap_holds_for_every_order() -> None:
    limits = FamilyLimits(memory_cap=2.5)
    peak = simulate_costs(searched(limits), costs_on(V)).peak_activation_bytes
    assert peak.max() <= 2.5 * 2.0 + 1e-6
    free = simulate_costs(searched(FREE), costs_on(V)).peak_activation_bytes
    assert free.max() > peak.max()


def test_placements_are_those_that_are_left() -> None:
    loop = FamilyLimits(placements=(PlacementKind.LOOP,))
    assert loop.placement_of(4, 1) is None
    assert kind_of(loop.placement_of(4, 2) or (), num_devices=4) is PlacementKind.LOOP
    assert kind_of(FREE.placement_of(4, 2) or (), num_devices=4) is PlacementKind.V
    assert not loop.allows(V)
    assert FamilyLimits(placements=(PlacementKind.SNAKE,)).allows(V)


def plans(family: dict[str, Any]) -> list[Any]:
    search_section = {
        "pipeline_parallel": 4,
        "tensor_parallel": 1,
        "micro_batch_size": 1,
        "recompute": "none",
        "distributed_optimizer": False,
        "schedule": ["zb-h1", "zb-v", "searched"],
        "schedule_family": family,
    }
    job = parse_job(job_data(search=search_section), where="job")
    return [ranked.order for ranked in planned_ranking(job, top=4).best if ranked.order is not None]


def test_the_planner_keeps_them_too() -> None:
    orders = plans({"placement": "linear", "weight_gradients": [2, 4]})
    assert all(order.placement == places.linear(4) for order in orders)
    families = [family for order in orders if (family := family_of(order)) is not None]
    assert {family.w_limit for family in families} <= {2.0, 4.0}
    section = {"schedule": "searched", "pipeline_parallel": 4, "virtual_stages": 1}
    job = parse_job(job_data(search={**section, "schedule_family": {"placement": "snake"}}), where="job")
    with pytest.raises(InfeasibleError):
        planned_ranking(job, top=1)


def test_the_section_is_read_as_every_other() -> None:
    section = {
        "slack": [0, "unlimited"],
        "weight_gradients": 0,
        "memory_cap": 4.5,
        "placement": ["v", "loop"],
    }
    config = parse_config({"search": {"schedule_family": section}}, where="q.yaml").search
    assert config.family_limits == FamilyLimits(
        slacks=(0.0, math.inf),
        w_limits=(0.0,),
        memory_cap=4.5,
        placements=(PlacementKind.V, PlacementKind.LOOP),
    )
    again = parse_config({"search": config.stated()}, where="q.yaml").search
    assert again.family_limits == config.family_limits
    with pytest.raises(ConfigError, match="memory_cap"):
        parse_config({"search": {"schedule_family": {"memory_cap": 0.5}}}, where="q.yaml")
