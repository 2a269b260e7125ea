"""The size of gradients' buckets, which a number of them in the command keeps."""

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.space.knobs.ddp_bucket_size import DDP_BUCKET_SIZE
from quartet_plugin.space.plan_space import Space
from tests.space.knobs.test_expert_overlap import plans, space_of, states

NAME = DDP_BUCKET_SIZE.name


def space(*features: str, asked: object) -> Space:
    return space_of(
        search={NAME: asked},
        command={NAME: 0, "overlap_grad_reduce": True},
        features=features,
        layout={"expert_parallel": 1},
    )


def test_a_number_of_buckets_keeps_their_size() -> None:
    """Megatron refuses both together (megatron/core/distributed/distributed_data_parallel_config.py)."""
    assert {plan.layout.setting(NAME) for plan in plans(space(asked=[1000, 2000]))} == {None, 1000, 2000}
    kept = space("ddp_num_buckets", asked="auto")
    assert {plan.layout.setting(NAME) for plan in plans(kept)} == {None}
    assert states(kept)[NAME] == "kept: the command has --ddp-num-buckets"
    with pytest.raises(ConfigError, match=f"search.{NAME}: 1000; must be the command's own 0: the command"):
        space("ddp_num_buckets", asked=[1000])
