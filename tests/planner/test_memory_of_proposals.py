"""Proposals under a memory limit that the faster command of the user exceeds: they fit."""

from dataclasses import replace
from itertools import islice

from quartet_plugin.calibration.machine_prior import KnownMachine, machine_model_of
from quartet_plugin.calibration.predictor import PlanPredictor
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord
from quartet_plugin.planner.plan_scorer import PlanScorer
from quartet_plugin.planner.space_request import request_of_space
from quartet_plugin.space.plan_space import build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape

PROCESS = 2**30
SEARCH = {
    "tensor_parallel": 1,
    "data_parallel": 1,
    "schedule": ["1f1b"],
    "micro_batch_size": "auto",
    "recompute": "auto",
    "mapping": "stock",
}


def test_what_is_proposed_fits_where_the_command_does_not() -> None:
    job = make_job(
        layout=make_layout(micro_batch_size=16), shape=make_shape(hidden_size=512), global_batch_size=64
    )
    search = parse_config({"search": SEARCH}, where="test").search
    space = build_space(job, nodes=make_nodes(2), search=search, run="r", seed=0)
    free = machine_model_of(space.nodes, precision="fp32")

    def peak_bytes(plan: Plan) -> float:
        memory = predictor.feasibility.memory(plan)
        assert memory is not None
        return PROCESS + memory.total_bytes

    predictor = PlanPredictor(free, num_iterations=4)
    limit = PROCESS + 0.7 * (peak_bytes(space.baseline) - PROCESS)
    predictor = PlanPredictor(replace(free, memory_limit_bytes=round(limit)), num_iterations=4)
    scorer = PlanScorer(
        space,
        predictor=predictor,
        objective="tokens_per_s",
        request=request_of_space(space, machine=KnownMachine()),
    )
    record = TrialRecord(
        verdict="measured",
        outcome="OK",
        reason="",
        attempt_id="",
        iteration_s=0.01,  # so fast that no plan is an improvement
        peak_memory_bytes=round(peak_bytes(space.baseline)),
        num_iterations=4,
        spread=0.01,
    )
    predictor.learn([FinishedTrial(number=0, plan=space.baseline, record=record)])
    assert predictor.above_limit == {0}
    first = [point.plan for point in islice(scorer.plans_to_try(), 5)]
    assert all(peak_bytes(plan) <= limit for plan in first)
    assert len({plan.key for plan in first}) == 5
