"""The distributed optimizer: what keeps the command's, and what of it is read back."""

from types import SimpleNamespace

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.space.knob_table import knob_rows
from quartet_plugin.space.knobs.distributed_optimizer import DISTRIBUTED_OPTIMIZER
from quartet_plugin.space.knobs.knob import LiveJob
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes

NAME = DISTRIBUTED_OPTIMIZER.name


def space_of(features: tuple[str, ...], *, is_on: bool, asked: object = "auto") -> Space:
    layout = make_layout(pipeline_parallel=1, data_parallel=2, distributed_optimizer=is_on)
    search = parse_config({"search": {"schedule": "stock", NAME: asked}}, where="q.yaml").search
    job = make_job(layout=layout, features=features)
    return build_space(job, nodes=make_nodes(2), search=search, run="r", seed=0)


def values(space: Space) -> set[bool]:
    return {layout.distributed_optimizer for layouts in space.layouts.values() for layout in layouts}


@pytest.mark.parametrize("is_on", [False, True])
def test_another_optimizer_than_adam_and_sgd_keeps_the_commands(is_on: bool) -> None:
    assert values(space_of((), is_on=is_on)) == {False, True}
    space = space_of(("emerging_optimizer",), is_on=is_on)
    assert values(space) == {is_on}
    states = {row.knob.name: row.state for row in knob_rows(space)}
    reason = "emerging_optimizer: Megatron shards its state by whole layers"
    assert states[NAME] == f"kept: {reason}"
    with pytest.raises(ConfigError, match=f"search.{NAME}: .*{reason}"):
        space_of(("emerging_optimizer",), is_on=is_on, asked=not is_on)


@pytest.mark.parametrize(
    ("shards_layers", "is_on", "value"), [(False, False, False), (False, True, True), (True, False, True)]
)
def test_an_optimizer_that_is_sharded_by_layers_is_read_back_as_sharded(
    shards_layers: bool, is_on: bool, value: bool
) -> None:
    """Megatron's older layout of its layers leaves the switch of the gradients' buffers off."""
    buffers = SimpleNamespace(use_distributed_optimizer=is_on)
    live = LiveJob(degrees={}, optimizer=buffers, shards_layers=shards_layers)
    assert DISTRIBUTED_OPTIMIZER.read_back(live) == value
