"""What the runtime refuses when Megatron calls it: nothing has been communicated yet."""

from types import SimpleNamespace
from typing import Any

import pytest

from quartet_plugin.errors import PlanError
from quartet_plugin.megatron.placement.state import StagePlacement
from quartet_plugin.megatron.runtime.binding import Runtime
from quartet_plugin.megatron.runtime.reduction import GradReductions
from quartet_plugin.megatron.split_backward import WeightGradients
from quartet_plugin.runtime.programs import ProgramCache
from tests.runtime.pipelines import spec_of


def call(*, config: dict[str, Any], **more: Any) -> Any:
    made = spec_of("zb-v", 2)
    runtime = Runtime(
        ProgramCache(made),
        placement=StagePlacement(made.placement),
        gradients=WeightGradients(),
        reductions=GradReductions(),
    )
    return runtime.forward_backward(
        forward_step_func=None,
        data_iterator=[None, None],
        model=[SimpleNamespace(config=SimpleNamespace(**config))] * 2,
        num_microbatches=4,
        seq_length=8,
        micro_batch_size=1,
        **more,
    )


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        ({"variable_seq_lengths": True}, "--variable-seq-lengths"),
        ({"defer_embedding_wgrad_compute": True}, "--defer-embedding-wgrad-compute"),
        ({"cuda_graph_impl": "full_iteration"}, "--cuda-graph-impl"),
        ({"gtp_weight_remat_size": 2}, "--tensor-parallel-num-weight-shards"),
    ],
)
def test_a_feature_that_no_flag_turned_on_is_refused(config: dict[str, Any], flag: str) -> None:
    with pytest.raises(PlanError, match=rf"{flag}: .*; the script's configuration turns it on"):
        call(config=config)


@pytest.mark.parametrize("name", ["adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection"])
def test_other_groups_and_shapes_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match=rf"{name}: the plan's schedule runs only with Megatron's own"):
        call(config={}, **{name: object()})
