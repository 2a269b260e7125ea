"""The bounds on all splits that fit, and what is planned by them."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.memory import available_bytes, capacity_bytes_of, peak_memory
from quartet_plugin.cost.predict import predict
from quartet_plugin.errors import InfeasibleError
from quartet_plugin.planner.bounds import bounds_of
from quartet_plugin.planner.fitting_bounds import fitting_bounds, mean_rank_seconds
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.layout_table import BALANCED, PP, SPLIT, layout_table_of
from quartet_plugin.planner.ranking import Ranked, Ranking, rank
from tests.planner.planning import hybrid_job, random_cluster_job, runs_of
from tests.planner.test_bounds import HYBRIDS, job_before_last, job_of_two_kinds
from tests.planner.test_ranking import random_job


def nearby(
    split: tuple[int, ...], draw: random.Random, *, is_mtp_before_last: bool = False
) -> tuple[int, ...]:
    """The split after a few random moves of a layer."""
    if is_mtp_before_last:
        return (*nearby(split[:-1], draw), 0)
    counts, last = list(split), len(split) - 1
    for _ in range(draw.randint(0, 6)):
        givers = [stage for stage, count in enumerate(counts) if count > (0 if stage in (0, last) else 1)]
        if givers:
            counts[draw.choice(givers)] -= 1
            counts[draw.randrange(len(counts))] += 1
    return tuple(counts)


BEFORE_LAST = range(500, 504)


@pytest.mark.parametrize("seed", [400, 401, 402, 403, 404, 407, 408, 409, *HYBRIDS, *BEFORE_LAST])
def test_no_split_that_fits_is_under_the_bounds(seed: int) -> None:
    job = job_of_two_kinds(seed) if seed % 2 else random_job(seed)
    if seed in HYBRIDS:
        job = hybrid_job(seed)
    if seed in BEFORE_LAST:
        job = job_before_last(seed)
        if job.search.split is not None:
            job = replace(job, search=job.search.model_copy(update={"split": None}))
    draw = random.Random(seed)
    table = layout_table_of(job, job.shape)
    limit_bytes = available_bytes(float(job.machines.memory_bytes))
    bounds = bounds_of(job, job.shape, table, constants=fitted())
    free = np.flatnonzero((table.columns[:, SPLIT] == BALANCED) & (table.columns[:, PP] > 1))
    rows = free[:: max(1, len(free) // 60)]
    least_s = mean_rank_seconds(bounds, table)[rows]
    time_s, memory_bytes = fitting_bounds(bounds, job.shape, table, rows, limit_bytes=limit_bytes)
    assert (least_s <= time_s).all()
    num_fitting = 0
    for row, seconds, num_bytes in zip(rows.tolist(), time_s.tolist(), memory_bytes.tolist(), strict=True):
        first = bounds.split(job, job.shape, table, row)
        split = nearby(first, draw, is_mtp_before_last=job.has_mtp_before_last)
        for run in runs_of(job, table, row, split):
            memory, words = peak_memory(run), (run.layout, run.schedule, run.group, split)
            assert num_bytes <= memory.total_bytes, words
            if memory.fits:
                num_fitting += 1
                assert seconds <= predict(run, fitted()).iter_time_s, words
    assert num_fitting > 0


def test_the_bound_counts_the_layers_that_ranks_hold() -> None:
    """Without memory for its share the first rank leaves more to the others."""
    job = random_job(402)
    table = layout_table_of(job, job.shape)
    bounds = bounds_of(job, job.shape, table, constants=fitted())
    rows = np.flatnonzero((table.columns[:, SPLIT] == BALANCED) & (table.columns[:, PP] > 1))
    free, _ = fitting_bounds(bounds, job.shape, table, rows, limit_bytes=1e15)
    least_bytes = bounds.memory_bytes[rows]
    tight, _ = fitting_bounds(bounds, job.shape, table, rows, limit_bytes=float(np.median(least_bytes)))
    assert np.isfinite(free).all()
    assert (tight >= free).all()
    assert (np.isfinite(tight) & (tight > free)).any()
    assert np.isinf(tight).any()


def tight_jobs(job: PlanRequest, num: int) -> Iterator[PlanRequest]:
    """The job on devices with less memory: each time a byte less than the fastest plan needs."""
    for _ in range(num):
        try:
            best = rank(job).best[0]
        except InfeasibleError:
            return
        limit = int(capacity_bytes_of(best.memory.total_bytes - 1))
        job = replace(job, machines=replace(job.machines, memory_bytes=limit))
        yield job


def ranked_or_none(job: PlanRequest, **options: Any) -> Ranking | None:
    """The three best plans; None where nothing fits."""
    try:
        return rank(job, top=3, **options)
    except InfeasibleError:
        return None


def chosen(ranked: Ranked) -> tuple[object, ...]:
    return ranked.layout, ranked.schedule, ranked.group, ranked.split, ranked.slots, ranked.iteration_s


def hybrid_pipeline_job(seed: int) -> PlanRequest:
    """A random pattern on several pipeline ranks."""
    return hybrid_job(seed, pipeline_parallel=[2, 4], tensor_parallel=1, recompute="none")


@pytest.mark.parametrize(
    ("first", "job_of"), [(500, random_job), (512, random_job), (100, hybrid_pipeline_job)]
)
def test_pruning_keeps_the_optimum_where_memory_is_short(
    first: int, job_of: Callable[[int], PlanRequest]
) -> None:
    num_moved = 0
    for job in (job for seed in range(first, first + 4) for job in tight_jobs(job_of(seed), 3)):
        every = ranked_or_none(job, exhaustive=True)
        quick = ranked_or_none(job)
        assert (quick is None) == (every is None)
        if quick is None or every is None:
            continue
        assert list(map(chosen, quick.best)) == list(map(chosen, every.best))
        assert every.num_considered == every.num_predicted + every.num_too_large
        balanced = ranked_or_none(job, moves_layers=False)
        splits = set() if balanced is None else {ranked.split for ranked in balanced.best}
        num_moved += sum(ranked.split not in splits for ranked in quick.best)
    assert num_moved > 0


@pytest.mark.parametrize("seed", range(6, 10))
def test_pruning_keeps_the_optimum_of_clusters_where_memory_is_short(seed: int) -> None:
    for job in tight_jobs(random_cluster_job(seed), 2):
        quick, every = ranked_or_none(job), ranked_or_none(job, exhaustive=True)
        assert (quick is None) == (every is None)
        if quick is None or every is None:
            continue
        assert list(map(chosen, quick.best)) == list(map(chosen, every.best))
