"""Tensor parallelism: the sizes of a model that it divides."""

import pytest

from quartet_plugin.space.knobs.knob import KnobContext
from quartet_plugin.space.knobs.tensor_parallel import TENSOR_PARALLEL
from quartet_plugin.space.plan_space import build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape


@pytest.mark.parametrize(
    ("groups", "size", "fault"),
    [
        (4, 2, None),
        # Megatron gives ranks copies of a group's keys and values.
        (2, 8, None),
        (1, 4, None),
        (6, 4, "must divide the 6 query groups, or be a multiple of them"),
    ],
)
def test_query_groups_are_divided_or_copied(groups: int, size: int, fault: str | None) -> None:
    job = make_job(
        layout=make_layout(pipeline_parallel=1, data_parallel=8),
        shape=make_shape(
            num_attention_heads=24, num_query_groups=groups, hidden_size=768, ffn_hidden_size=3072
        ),
    )
    search = parse_config({"search": {}}, where="q.yaml").search
    space = build_space(job, nodes=make_nodes(8), search=search, run="r", seed=0)
    context = KnobContext(layout=job.layout, shape=job.shape, rules=space.rules())
    assert TENSOR_PARALLEL.fault(size, context) == fault
