"""State-space layers whose heads devices share by tensor and context parallelism."""

from dataclasses import replace

import pytest

from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.space.knobs.context_parallel import CONTEXT_PARALLEL
from quartet_plugin.space.knobs.knob import KnobContext
from quartet_plugin.space.knobs.pipeline_parallel import most_stages
from quartet_plugin.space.knobs.tensor_parallel import TENSOR_PARALLEL
from quartet_plugin.space.plan_space import build_space
from quartet_plugin.space.state_space import fault_of_shared_heads
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape


def kinds(*, heads: int, groups: int = 4) -> LayerKinds:
    empty = LayerKinds(attention=0, mlp=0, experts=0, state_space=0)
    sized = replace(empty, state_space_heads=heads, state_space_groups=groups, projected_size=512)
    return sized.with_pattern("M-M*M-M*")


@pytest.mark.parametrize(
    ("heads", "groups", "tensor", "context", "says"),
    [
        (16, 4, 4, 1, None),
        (16, 4, 2, 2, None),
        (16, 4, 2, 8, None),  # ranks share a group
        (16, 4, 4, 8, "TP 4 x CP 8 must divide the 16 heads"),
        (24, 8, 2, 3, "must divide the 4 groups of a state-space layer that TP 2 leaves"),
    ],
)
def test_devices_have_heads_and_groups(
    heads: int, groups: int, tensor: int, context: int, says: str | None
) -> None:
    shape = make_shape(layer_kinds=kinds(heads=heads, groups=groups))
    fault = fault_of_shared_heads(shape, tensor=tensor, context=context)
    assert (says or "") in (fault or "")
    assert (fault is None) == (says is None)
    attention = make_shape(layer_kinds=LayerKinds(attention=8, mlp=0, experts=0, state_space=0))
    for other in (make_shape(), attention):
        assert fault_of_shared_heads(other, tensor=tensor, context=context) is None


def test_degrees_are_refused_that_leave_a_device_without_a_head() -> None:
    shape = make_shape(layer_kinds=kinds(heads=4, groups=4))
    layout = make_layout(pipeline_parallel=1, context_parallel=2, data_parallel=4)
    job = make_job(layout=layout, shape=shape, features=("hybrid", "bare_first_stage", "bare_last_stage"))
    search = parse_config({"search": {"schedule": "stock"}}, where="q.yaml").search
    space = build_space(job, nodes=make_nodes(8), search=search, run="r", seed=0)
    sizes = {each.tensor_parallel for layouts in space.layouts.values() for each in layouts}
    assert sizes == {1, 2}
    context = KnobContext(layout=layout, shape=shape, rules=space.rules())
    assert TENSOR_PARALLEL.fault(4, context) == "TP 4 x CP 2 must divide the 4 heads of a state-space layer"
    planned = replace(space.rules(), is_planned=True)
    context = KnobContext(layout=layout, shape=shape, rules=planned)
    assert "heads of a state-space layer" in (CONTEXT_PARALLEL.fault(8, context) or "")


def test_every_stage_of_a_hybrid_model_has_a_layer() -> None:
    assert most_stages(make_shape()) == make_shape().num_layers + 2
    assert most_stages(make_shape(layer_kinds=kinds(heads=4))) == make_shape().num_layers
