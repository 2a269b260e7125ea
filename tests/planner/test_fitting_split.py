"""A layout whose balanced split does not fit in memory has the split near it that does, in both commands."""

from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.memory import capacity_bytes_of, memory_by_device
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.errors import InfeasibleError
from quartet_plugin.planner.fitting_split import fitting_split
from quartet_plugin.planner.job import PlanRequest, parse_job
from quartet_plugin.planner.ranking import best_plans, rank
from quartet_plugin.planner.stage_layouts import best_and_even
from quartet_plugin.split.layers import EndLoads
from tests.planner.planning import job_data

# 1F1B on eight pipeline ranks: the first holds the activations of eight microbatches, the last of one.
SEARCH = {
    "tensor_parallel": 1,
    "pipeline_parallel": 8,
    "virtual_stages": 1,
    "micro_batch_size": 1,
    "recompute": "none",
    "distributed_optimizer": False,
    "schedule": "1f1b",
}
EVEN = (8,) * 8


def pipeline_job(**cluster: Any) -> PlanRequest:
    model = {"num_layers": 64, "vocab_size": 1000}
    return parse_job(job_data(model=model, search=SEARCH, cluster=cluster), where="job")


def rank_bytes(job: PlanRequest, split: tuple[int, ...] = EVEN) -> list[float]:
    """The bytes of each pipeline rank."""
    run = job.run(job.shape, rank(pipeline_job()).best[0].layout, split)
    return [memory.total_bytes for memory in memory_by_device(run)]


def tight_job(num_layers_over: float) -> PlanRequest:
    """The job on devices whose memory lacks a number of the first rank's layers."""
    full, fewer = rank_bytes(pipeline_job())[0], rank_bytes(pipeline_job(), (7, 8, 8, 8, 8, 8, 8, 9))[0]
    limit = full - num_layers_over * (full - fewer)
    return pipeline_job(memory_bytes=int(capacity_bytes_of(limit)))


@pytest.mark.parametrize("num_layers_over", [0.01, 1.5])
def test_a_split_that_fits_is_planned_before_a_layout_is_unfit(num_layers_over: float) -> None:
    assert rank(pipeline_job()).best[0].split == EVEN
    job = tight_job(num_layers_over)
    with pytest.raises(InfeasibleError):
        rank(job, moves_layers=False)
    ranking = best_plans(job)
    best = ranking.best[0]
    assert best.memory.fits
    assert sum(best.split) == 64
    # The first rank gives no more than it has to, and the last ones take it.
    assert best.split[0] == 8 - int(num_layers_over + 1)
    assert (ranking.num_predicted, ranking.num_too_large) == (1, 0)
    every = best_plans(job, exhaustive=True).best[0]
    assert (every.split, every.iteration_s) == (best.split, best.iteration_s)
    fastest, even = best_and_even(job, best.layout, constants=fitted())
    assert fastest.fits
    assert not even.fits
    assert fastest.iteration_s <= best.iteration_s


def test_a_layout_that_no_split_fits_stays_unfit() -> None:
    job = pipeline_job(memory_bytes=int(capacity_bytes_of(0.5 * rank_bytes(pipeline_job())[-1])))
    with pytest.raises(InfeasibleError, match="none of 1 layouts fits"):
        rank(job)
    with pytest.raises(InfeasibleError, match="none of 1 layouts fits"):
        rank(job, exhaustive=True)


def test_layers_go_to_the_ranks_with_the_least_to_do() -> None:
    """The head counts: the last rank has room, but is as busy as the others."""
    job = tight_job(1.5)
    layout = rank(pipeline_job()).best[0].layout

    def run_of(split: tuple[int, ...]) -> TrainingRun:
        return job.run(replace(job.shape, num_layers=sum(split)), layout, split)

    free = fitting_split(EVEN, run_of=run_of, end_loads=EndLoads())
    loaded = fitting_split(EVEN, run_of=run_of, end_loads=EndLoads(head=3.0))
    assert free is not None
    assert loaded is not None
    assert free[-1] == 9
    assert loaded[-1] == 8
    for split in (free, loaded):
        assert sum(split) == 64
        assert max(rank_bytes(job, split)) <= memory_by_device(run_of(split))[0].available_bytes
