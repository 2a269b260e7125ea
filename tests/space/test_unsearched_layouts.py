"""The layouts without a searched order: those whose steps have too many actions for one."""

import pytest

from quartet_plugin.space.config import SEARCHED
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.space.schedules import MAX_SEARCHED_ACTIONS, num_actions_of
from quartet_plugin.space.unsearched_layouts import num_unsearched_layouts
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes


def space_of(batch: int, **search: object) -> Space:
    wanted = {"pipeline_parallel": 4, "micro_batch_size": [1, 8], "recompute": ["none", "full"], **search}
    job = make_job(layout=make_layout(pipeline_parallel=4, micro_batch_size=8), global_batch_size=batch)
    config = parse_config({"search": wanted}, where="test").search
    return build_space(job, nodes=make_nodes(4), search=config, run="r", seed=0)


@pytest.mark.parametrize("schedule", ["auto", "searched", ["1f1b", "searched"]])
def test_layouts_of_too_many_actions_count_where_an_order_could_be_searched(schedule: object) -> None:
    space = space_of(256, schedule=schedule)
    # 3 x 4 stages x 256 microbatches are too many, and 3 x 4 x 32 are not.
    held = [
        layout
        for shape, layouts in space.layouts.items()
        for layout in layouts
        if SEARCHED in space.schedules_of(layout, shape=shape)
    ]
    assert held
    for layout in held:
        assert num_actions_of(layout, num_microbatches=256 // layout.micro_batch_size) <= MAX_SEARCHED_ACTIONS
    short = space_of(64, schedule=schedule)
    assert num_unsearched_layouts(short) == 0
    num_all = sum(
        SEARCHED in short.schedules_of(layout, shape=shape)
        for shape, layouts in short.layouts.items()
        for layout in layouts
    )
    assert num_unsearched_layouts(space) == num_all - len(held) > 0


def test_nothing_counts_where_no_order_is_searched() -> None:
    assert num_unsearched_layouts(space_of(256, schedule=["1f1b", "zb-h1"])) == 0
