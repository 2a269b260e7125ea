"""Plans of one job side by side: numbers of devices, and time against memory."""

import pytest

from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.memory import peak_memory
from quartet_plugin.cost.predict import predict
from quartet_plugin.errors import ConfigError
from quartet_plugin.planner.bounds import bounds_of
from quartet_plugin.planner.frontier import devices_frontier, memory_frontier, with_devices
from quartet_plugin.planner.job import parse_job
from quartet_plugin.planner.layout_table import layout_table_of
from quartet_plugin.planner.ranking import best_plans
from tests.model.clusters import make_cluster
from tests.planner.planning import cluster_job, job_data, runs_of


def test_each_number_of_devices_has_its_best_plan() -> None:
    job = parse_job(job_data(search={"micro_batch_size": [1, 2]}), where="job")
    points = devices_frontier(job, [32, 8, 16])
    assert [point.job.machines.num_devices for point in points] == [8, 16, 32]
    assert points[0].efficiency == 1.0
    for point in points:
        data = job_data(
            search={"micro_batch_size": [1, 2]},
            cluster={
                "num_nodes": point.job.machines.num_devices // 8,
                "devices_per_node": 8,
            },
        )
        best = best_plans(parse_job(data, where="job")).best[0]
        assert point.best is not None
        assert (point.best.layout, point.best.iteration_s) == (best.layout, best.iteration_s)


def test_a_number_without_a_plan_has_a_reason() -> None:
    job = parse_job(job_data(cluster={"memory_bytes": 3_000_000_000}), where="job")
    points = devices_frontier(job, [1, 64])
    assert points[0].best is None
    assert "memory" in points[0].reason
    assert points[1].efficiency == 1.0


def test_wrong_numbers_are_refused_with_the_nearest() -> None:
    job = parse_job(job_data(), where="job")
    with pytest.raises(ConfigError, match="nearest: 16 or 24"):
        with_devices(job, 20)
    with pytest.raises(ConfigError, match="from 1 to"):
        with_devices(job, 0)
    with pytest.raises(ConfigError, match="node by node"):
        with_devices(cluster_job(make_cluster()), 8)


def test_the_memory_frontier_is_what_no_layout_beats() -> None:
    """Against the prediction of every layout, one by one."""
    search = {"micro_batch_size": [1, 2], "mapping": "stock"}
    job = parse_job(job_data(search=search, cluster={"devices_per_node": 4}), where="job")
    table, constants = layout_table_of(job, job.shape), fitted()
    bounds = bounds_of(job, job.shape, table, constants=constants)
    pairs = []
    for row in range(len(table)):
        split = bounds.split(job, job.shape, table, row)
        pairs += [
            (predict(run, constants).iter_time_s, peak_memory(run).total_bytes)
            for run in runs_of(job, table, row, split)
        ]
    best, least = [], float("inf")
    for time_s, num_bytes in sorted(pairs):
        if num_bytes < least:
            best.append((time_s, num_bytes))
            least = num_bytes
    points = [(point.iteration_s, point.memory.total_bytes) for point in memory_frontier(job)]
    assert len(points) > 3
    assert points == [pytest.approx(pair) for pair in best][: len(points)]
    assert len(points) in (len(best), 32)


def test_a_number_that_cannot_have_a_requested_setting_has_a_reason() -> None:
    job = parse_job(
        job_data(search={"overlap_param_gather": True, "distributed_optimizer": True}), where="job"
    )
    alone, eight = devices_frontier(job, [1, 8])
    assert alone.best is None
    assert "overlap_param_gather" in alone.reason
    assert eight.best is not None
