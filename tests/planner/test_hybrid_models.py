"""Plans of hybrid models: their stages by the letters that they hold."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quartet_plugin.calibration.machine_prior import KnownMachine
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.predict import predict
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.planner.assignment_search import balanced_split
from quartet_plugin.planner.described_space import first_plans
from quartet_plugin.planner.job import PlanRequest, parse_job
from quartet_plugin.planner.order_search import planned_ranking
from quartet_plugin.planner.ranking import rank
from quartet_plugin.planner.space_request import request_of_space
from quartet_plugin.space.plan_space import build_space
from quartet_plugin.tuner.config import parse_config
from tests.planner.planning import job_data, with_pattern
from tests.planner.test_best_moves import every_split
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape

APART = "MMMMMMMM****"
LONG, SHORT = 65_536, 512


def job_of(pattern: str, *, seq_length: int, **search: Any) -> PlanRequest:
    """A job with two pipeline ranks of one device each and a small vocabulary."""
    model = {"num_layers": len(pattern), "seq_length": seq_length, "vocab_size": 1024}
    cluster = {"num_nodes": 1, "devices_per_node": 2}
    asked = {"pipeline_parallel": 2, "micro_batch_size": 1, "schedule": "1f1b", **search}
    job = parse_job(job_data(model=model, cluster=cluster, search=asked), where="job")
    return with_pattern(job, pattern)


def best_split(job: PlanRequest) -> tuple[int, ...]:
    return planned_ranking(job, top=1).best[0].split


def test_long_sequences_leave_few_layers_to_the_stage_with_attention() -> None:
    long, short = (best_split(job_of(APART, seq_length=length)) for length in (LONG, SHORT))
    assert long[1] <= 3
    assert short[1] > long[1]
    # Turned around it is the first stage.
    turned = best_split(job_of(APART[::-1], seq_length=LONG))
    assert turned[0] <= 3


@pytest.mark.parametrize("pattern", [APART, "M*M*-M**MMMM", "**-*-MMM-M-M"])
@pytest.mark.parametrize("seq_length", [LONG, SHORT])
def test_the_planned_split_is_nearly_the_best_of_all(pattern: str, seq_length: int) -> None:
    job = job_of(pattern, seq_length=seq_length, recompute="none", distributed_optimizer=False)
    best = rank(job).best[0]

    def seconds(split: tuple[int, ...]) -> float:
        return predict(job.run(job.shape, best.layout, split, schedule=best.schedule), fitted()).iter_time_s

    assert best.iteration_s == seconds(best.split)
    assert best.iteration_s <= 1.03 * min(map(seconds, every_split(12, 2)))


def test_slower_devices_get_fewer_of_the_letters_that_take_long() -> None:
    job = job_of(APART, seq_length=LONG)
    layout = rank(job).best[0].layout
    splits = [
        balanced_split(job, job.shape, layout, fitted(), np.array(slowdowns))
        for slowdowns in ([1.0, 1.0], [1.0, 4.0], [4.0, 1.0])
    ]
    assert splits[1][1] < splits[0][1] < splits[2][1]


def first_plan(pattern: str | None, *, seq_length: int) -> Plan:
    """The first plan of a study of a reported hybrid model; without a pattern as older reports are."""
    kinds = LayerKinds(attention=4, mlp=0, experts=0, state_space=8, projected_size=512, pattern=pattern)
    job = make_job(
        layout=make_layout(pipeline_parallel=2),
        shape=make_shape(num_layers=12, layer_kinds=kinds, seq_length=seq_length, vocab_size=1024),
        features=("bare_first_stage", "bare_last_stage", "hybrid"),
    )
    config = parse_config({"search": {"pipeline_parallel": 2, "schedule": "1f1b"}}, where="test").search
    space = build_space(job, nodes=make_nodes(2), search=config, run="r", seed=0)
    request = request_of_space(space, machine=KnownMachine())
    return first_plans(space, request, top=1)[0][1]


def test_a_study_begins_with_the_split_of_the_letters() -> None:
    plan = first_plan(APART, seq_length=8192)
    assert plan.split.transformer_layers_per_stage[1] <= 4
    assert plan.shape.pattern == APART
    without = first_plan(None, seq_length=8192)
    first, last = without.split.transformer_layers_per_stage
    # Of mean layers the head alone makes the last stage shorter.
    assert first - last <= 2


def test_a_hybrid_models_further_tokens_are_planned_with_it() -> None:
    job = job_of("M*M*M*M*", seq_length=1024)
    shape = replace(job.shape, tied_embeddings=False, position_embedding="rope")
    kinds = LayerKinds(attention=1, mlp=1, experts=0, state_space=0)
    plain = rank(replace(job, shape=shape)).best[0]
    for given in (kinds, None):
        further = rank(replace(job, shape=shape, mtp_layers=1, mtp_kinds=given)).best[0]
        assert further.iteration_s > plain.iteration_s
        assert further.split[1] <= plain.split[1]
