"""ZeRO's bucket sizes among the tuned values: where they matter, as asked, and never elsewhere."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import NodeInfo
from quartet_plugin.space.param_sources import FixedParams, RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout

OWN = make_layout(pipeline_parallel=1, data_parallel=2, distributed_optimizer=True)
NODES = (NodeInfo(host="node-a", node_class="cpu x2", num_slots=2),)


class Noting(RandomParams):
    """Notes what there was to choose from."""

    def __init__(self, seed: int, seen: dict[str, tuple[str, ...]]) -> None:
        super().__init__(random.Random(seed))
        self._seen = seen

    def category(self, name: str, choices: Sequence[str]) -> str:
        assert self._seen.setdefault(name, tuple(choices)) == tuple(choices), "choices never change"
        return super().category(name, choices)


def space_of(search: dict[str, Any], *, layout: Layout = OWN, framework: str = "deepspeed") -> Space:
    asked = {"virtual_stages": 1, "schedule": ["no-pipelining", "1f1b"], "mapping": "stock", **search}
    job = replace(make_job(layout=layout), framework=framework)
    config = parse_config({"search": asked}, where="q.yaml").search
    return build_space(job, nodes=NODES, search=config, run="test", seed=0)


def layouts_of(space: Space, *, num: int = 120) -> set[Layout]:
    seen: dict[str, tuple[str, ...]] = {}
    found = set()
    for seed in range(num):
        chooser = Noting(seed, seen)
        plan = space.decode(chooser, trial=1)
        params = space.params_of(plan)
        assert params is not None
        assert space.decode(FixedParams(params), trial=1).key == plan.key
        found.add(plan.layout)
    return found


def sizes(layouts: set[Layout]) -> set[tuple[int | None, int | None]]:
    return {(layout.reduce_bucket_size, layout.allgather_bucket_size) for layout in layouts}


def test_sizes_below_the_models_are_tried_with_zero_1_and_replicas() -> None:
    found = layouts_of(space_of({}))
    sharded = {one for one in found if one.distributed_optimizer and one.data_parallel > 1}
    small = 5_000_000
    assert sizes(sharded) == {(None, None), (small, None), (None, small), (small, small)}
    assert sizes(found - sharded) == {(None, None)}
    assert {one.data_parallel for one in found} == {1, 2}


def test_a_literal_is_fixed_and_a_list_is_searched() -> None:
    space = space_of({"reduce_bucket_size": 2000, "allgather_bucket_size": [1000, 3000], "data_parallel": 2})
    assert sizes({one for one in layouts_of(space) if one.distributed_optimizer}) == {
        (2000, 1000),
        (2000, 3000),
    }
    for wrong in (1, 3, 0, "many"):
        with pytest.raises(ConfigError, match="allgather_bucket_size"):
            space_of({"allgather_bucket_size": wrong})


def test_megatron_has_none() -> None:
    assert sizes(layouts_of(space_of({}, framework="megatron-core"), num=40)) == {(None, None)}
