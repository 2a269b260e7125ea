"""The closed form in compiled code, where all links between domains are equal, against the one by columns."""

from dataclasses import replace

import numpy as np
import pytest

from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.iteration.assigned import AssignedRun
from quartet_plugin.errors import PlanError
from quartet_plugin.mapping.topology import blocks_of
from quartet_plugin.planner.bounds import bounds_of
from quartet_plugin.planner.closed_form import StepTime, step_costs
from quartet_plugin.planner.layout_table import layout_table_of
from tests.model.clusters import make_cluster
from tests.planner.planning import cluster_job, random_cluster_job
from tests.space.jobs import make_layout


@pytest.mark.parametrize("seed", range(10))
def test_a_step_takes_as_long_in_compiled_code(seed: int) -> None:
    job = random_cluster_job(seed)
    topology = job.topology(fitted())
    table = layout_table_of(job, job.shape)
    bounds = bounds_of(job, job.shape, table, constants=fitted())
    rng = np.random.default_rng(seed)
    for row in range(0, len(table), max(1, len(table) // 10)):
        layout = table.layout(row)
        try:
            blocks = blocks_of(topology, size=layout.tensor_parallel)
        except PlanError:
            continue
        split = bounds.split(job, job.shape, table, row)
        schedule, group = table.schedule(row), table.groups(row)[0]
        run = job.run(job.shape, layout, split, schedule=schedule, group=group)
        costs = step_costs(AssignedRun(run, fitted(), topology))
        for inside in (frozenset[str](), frozenset({"context"})):
            step = StepTime(costs, topology, blocks, inside=inside)
            arrangement = rng.permutation(len(blocks)).reshape(layout.pipeline_parallel, -1)
            assert step(arrangement) == pytest.approx(step.by_columns(arrangement), rel=1e-12), layout


@pytest.mark.parametrize(
    ("tp", "ep", "is_whole"), [(1, 4, False), (1, 16, False), (2, 4, False), (2, 8, True)]
)
@pytest.mark.parametrize("inside", [frozenset[str](), frozenset({"expert"})])
def test_a_step_with_experts_takes_as_long_in_compiled_code(
    tp: int, ep: int, is_whole: bool, inside: frozenset[str]
) -> None:
    """Exchanges are those of the iteration model, which the compiled step asks for link by link."""
    cluster = make_cluster(num_nodes=4, per_node=8, slowdown={(1, 3): 1.5})
    job = cluster_job(cluster, model={"num_experts": 16}, batch={"global_batch_size": 64})
    topology = job.topology(fitted())
    layout = make_layout(tensor_parallel=tp, data_parallel=16 // tp, expert_parallel=ep, micro_batch_size=1)
    run = replace(job.run(job.shape, layout, (5, 3)), has_whole_experts=is_whole)
    costs = step_costs(AssignedRun(run, fitted(), topology))
    blocks = blocks_of(topology, size=tp)
    step, rng = StepTime(costs, topology, blocks, inside=inside), np.random.default_rng(0)
    seconds = []
    for _ in range(20):
        arrangement = rng.permutation(len(blocks)).reshape(2, -1)
        seconds.append(step(arrangement))
        assert seconds[-1] == pytest.approx(step.by_columns(arrangement), rel=1e-12)
    assert len(set(seconds)) > 1 or inside
