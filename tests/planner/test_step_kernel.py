"""The closed form in compiled code, where all links between domains are equal, against the one by columns."""

import numpy as np
import pytest

from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.iteration.assigned import AssignedRun
from quartet_plugin.errors import PlanError
from quartet_plugin.mapping.topology import blocks_of
from quartet_plugin.planner.bounds import bounds_of
from quartet_plugin.planner.closed_form import StepTime, step_costs
from quartet_plugin.planner.layout_table import layout_table_of
from tests.planner.planning import random_cluster_job


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
