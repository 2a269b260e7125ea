"""The pipeline's degree beside layers of an FP8 model that stay in bf16."""

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext
from quartet_plugin.space.knobs.pipeline_parallel import PIPELINE_PARALLEL
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes


def space_of(*features: str, **search: object) -> Space:
    """The space of a command with PP 2 on four devices."""
    asked = parse_config({"search": {"schedule": ["no-pipelining", "1f1b"], **search}}, where="q.yaml")
    job = make_job(layout=make_layout(data_parallel=2), features=("fp8", *features))
    return build_space(job, nodes=make_nodes(4), search=asked.search, run="r", seed=0)


def sizes(space: Space) -> set[int]:
    return {layout.pipeline_parallel for layouts in space.layouts.values() for layout in layouts}


def test_several_layers_at_an_end_keep_it_and_the_number_of_layers() -> None:
    """Megatron compares their number with num_layers // PP (transformer_config.py)."""
    assert sizes(space_of()) == {1, 2, 4}
    space = space_of("bf16_end_layers")
    assert sizes(space) == {2}
    assert space.locked == {Axis.SCALING: "bf16_end_layers"}
    context = KnobContext(layout=space.job.layout, shape=space.job.shape, rules=space.rules())
    reason = "the first and the last stage hold the command's bf16 layers"
    assert PIPELINE_PARALLEL.fault(4, context) == f"must be the command's own 2: {reason}"
    with pytest.raises(ConfigError, match="nearest: pipeline_parallel 2"):
        space_of("bf16_end_layers", pipeline_parallel=4)


@pytest.mark.parametrize(("features", "is_legal"), [((), True), (("bf16_end_layer",), False)])
def test_a_layer_at_an_end_needs_a_layer_a_rank(features: tuple[str, ...], is_legal: bool) -> None:
    """Of eight layers on ten ranks the embedding and the head could have ranks of their own."""
    layout = make_layout(pipeline_parallel=1, data_parallel=10)
    job = make_job(layout=layout, features=("fp8", *features), global_batch_size=40)
    search = parse_config({"search": {"schedule": "stock"}}, where="q.yaml").search
    space = build_space(job, nodes=make_nodes(10), search=search, run="r", seed=0)
    context = KnobContext(layout=layout, shape=job.shape, rules=space.rules())
    fault = PIPELINE_PARALLEL.fault(10, context)
    assert fault == (None if is_legal else "must be at most the 8 layers with a bf16 layer at an end")
