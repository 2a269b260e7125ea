"""Orders for calibrated costs: no slower than those by FLOPs, and searched anew when costs move."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from quartet_plugin.calibration.machine_prior import KnownMachine
from quartet_plugin.cost.iteration.plan_terms import run_of_plan
from quartet_plugin.cost.iteration.split_model import CalibratedSplits
from quartet_plugin.cost.memory import memory_by_device
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.plan import Plan
from quartet_plugin.planner import calibrated_orders
from quartet_plugin.planner.calibrated_orders import CalibratedOrders
from quartet_plugin.planner.candidate_plans import Candidate, PlanCandidates
from quartet_plugin.planner.order_search import best_order
from quartet_plugin.planner.space_request import request_of_space
from quartet_plugin.runtime.programs import make_schedule, schedule_spec_of
from quartet_plugin.schedule.choice import relative_costs
from quartet_plugin.schedule.simulate import simulate
from quartet_plugin.space.moved_plans import with_order
from quartet_plugin.space.param_sources import FixedParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.space.searched_orders import ORDER
from quartet_plugin.tuner.config import parse_config
from tests.calibration.truth import Truth
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape

SEARCH: dict[str, Any] = {"pipeline_parallel": 4, "micro_batch_size": 2, "mapping": "stock"}


def space_of(**search: Any) -> Space:
    return build_space(
        make_job(
            layout=make_layout(pipeline_parallel=4, micro_batch_size=2),
            shape=make_shape(num_layers=16),
            global_batch_size=32,
        ),
        nodes=make_nodes(4),
        search=parse_config({"search": {**SEARCH, **search}}, where="test").search,
        run="r",
        seed=0,
    )


@dataclass
class Machine:
    """The calibrated model of a machine, and the bytes of activations that each device has room for."""

    space: Space
    truth: Truth
    limits: FloatArray | None = None

    def splits_of(self, plan: Plan) -> CalibratedSplits | None:
        if plan.layout.pipeline_parallel == 1:
            return None
        model = self.truth._iteration_models.split_model(plan)
        return CalibratedSplits(model=model, point=self.truth.theta)

    def orders(self) -> CalibratedOrders:
        return CalibratedOrders(
            self.space,
            splits_of=self.splits_of,
            run_of=lambda plan: run_of_plan(plan, self.truth.machine_model),
            limits_of=lambda plan: self.limits,
        )

    def candidates(self) -> list[Candidate]:
        request = request_of_space(self.space, machine=KnownMachine())

        def costs_of(plans: Sequence[Plan]) -> list[float]:
            return [self.truth(plan) for plan in plans]

        return PlanCandidates(self.space, is_predictable=lambda plan: True, request=request).best(
            costs_of=costs_of, splits_of=self.splits_of, order_of=self.orders().of
        )


def machine_of(space: Space, seed: int) -> Machine:
    draw = np.random.default_rng(seed)
    truth = Truth(
        space.nodes,
        slowdowns=draw.uniform(0.8, 1.8, 4).tolist(),
        head=float(draw.uniform(0.3, 2.0)),
        transfer=float(draw.uniform(1.0, 20.0)),
        input_grad=float(draw.uniform(0.7, 1.4)),
        weight_grad=float(draw.uniform(0.7, 1.4)),
    )
    return Machine(space, truth)


def is_ordered(candidate: Candidate) -> bool:
    return ORDER in candidate.params


@pytest.mark.parametrize("schedule", [["zb-v", "searched"], ["1f1b", "zb-h1", "searched"], ["searched"]])
def test_no_order_that_is_proposed_is_slower_than_the_one_for_costs_by_flops(schedule: list[str]) -> None:
    space = space_of(schedule=schedule)
    num_faster = 0
    for seed in range(3):
        machine = machine_of(space, seed)
        for candidate in filter(is_ordered, machine.candidates()):
            plan = candidate.plan
            by_flops = with_order(space, candidate.params, plan, custom=None)
            assert by_flops is not None
            assert (by_flops[1].split, by_flops[1].mapping) == (plan.split, plan.mapping)
            assert machine.truth(plan) <= machine.truth(by_flops[1])
            num_faster += machine.truth(plan) < 0.995 * machine.truth(by_flops[1])
            for params in (candidate.params, space.params_of(plan)):
                assert params is not None
                assert space.decode(FixedParams(params), trial=0).key == plan.key
    assert num_faster or "zb-v" not in schedule


def test_an_order_is_searched_anew_only_where_a_cost_leaves_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    space = space_of(schedule=["zb-v", "searched"], virtual_stages=2)
    (plan, *_) = [x.plan for x in machine_of(space, 0).candidates() if x.plan.schedule.label == "zb-v"]
    searched: list[object] = []

    def counted(*args: Any, **options: Any) -> Any:
        searched.append(args)
        return best_order(*args, **options)

    monkeypatch.setattr(calibrated_orders, "best_order", counted)
    machine = Machine(space, Truth(space.nodes, head=1.0))
    orders = machine.orders()
    orders.of(plan)
    for head, num_searched in ((1.0, 1), (1.0001, 1), (1.5, 2), (1.0, 2)):
        machine.truth = Truth(space.nodes, head=head)
        orders.of(plan)
        assert len(searched) == num_searched


def test_an_order_holds_no_more_than_its_devices_have_room_for() -> None:
    space = space_of(schedule=["zb-v", "searched"], virtual_stages=2)
    machine = machine_of(space, 0)
    plan = next(x.plan for x in machine.candidates() if x.plan.schedule.label == "zb-v")
    held = [
        rank.activations_bytes for rank in memory_by_device(run_of_plan(plan, machine.truth.machine_model))
    ]
    machine.limits = np.full(4, 0.7 * max(held))
    custom = machine.orders().of(plan)
    assert custom is not None
    assert custom.profile.memory_limit_bytes is not None
    spec = schedule_spec_of(custom, num_microbatches=plan.num_microbatches)
    simulation = simulate(make_schedule(spec, plan.num_microbatches), relative_costs(custom).ratios)
    assert simulation.peak_activation_bytes.max() <= max(custom.profile.memory_limit_bytes) + 1e-9
    machine.limits = np.zeros(4)
    assert machine.orders().of(plan) is None
