"""Iteration models are made once, and a split model's steps are theirs."""

import random

import numpy as np
import pytest

from quartet_plugin.space.config import SearchConfig
from quartet_plugin.space.param_sources import RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from tests.calibration.truth import Truth
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape

NODES = make_nodes(2, 2)


def space_of_four() -> Space:
    """All plans of four processes on two nodes."""
    job = make_job(layout=make_layout(pipeline_parallel=4), shape=make_shape(num_layers=12))
    return build_space(job, nodes=NODES, search=SearchConfig(), run="r", seed=0)


def test_equal_plans_have_one_iteration_model() -> None:
    space, models = space_of_four(), Truth(NODES)._iteration_models
    first, second = (space.decode(RandomParams(random.Random(3)), trial=trial) for trial in (0, 1))
    assert first != second
    assert models.of(first) is models.of(second)


@pytest.mark.parametrize("seed", range(12))
def test_a_step_alone_is_that_of_the_iteration_model(seed: int) -> None:
    plan = space_of_four().decode(RandomParams(random.Random(seed)), trial=0)
    alone = Truth(NODES)._iteration_models._step_seconds_of(plan)
    assert np.array_equal(alone, Truth(NODES)._iteration_models.of(plan).step_seconds)
