"""The knobs of experts: a dense model never sees them, and Megatron's rules bind ETP and the dispatcher."""

import random
from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.job_description import Experts
from quartet_plugin.model.layout import Layout, Setting
from quartet_plugin.space.knob_table import knob_rows
from quartet_plugin.space.knobs.expert_parallel import EXPERT_PARALLEL
from quartet_plugin.space.knobs.knob import KnobContext
from quartet_plugin.space.knobs.pipeline_parallel import PIPELINE_PARALLEL
from quartet_plugin.space.param_sources import RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes

KNOBS = {"moe_token_dispatcher": "auto", "expert_tensor_parallel": "auto"}
EXPERTS = Experts(num_experts=8, experts_per_token=2, ffn_hidden_size=96)


def space_of(
    *,
    experts: Experts | None = EXPERTS,
    shards: int = 0,
    features: tuple[str, ...] = (),
    search: dict[str, Any] | None = None,
    **layout: Any,
) -> Space:
    job = make_job(
        layout=make_layout(**{"data_parallel": 4, "pipeline_parallel": 1, **layout}),
        features=("moe", *features) if experts else features,
        experts=experts,
    )
    settings = (
        Setting(name="expert_tensor_parallel", value=shards),
        Setting(name="moe_token_dispatcher", value="alltoall"),
    )
    asked = {**KNOBS, "schedule": ["no-pipelining", "1f1b"], **(search or {})}
    config = parse_config({"search": asked}, where="q.yaml").search
    job = replace(job, settings=settings, layer_impl="transformer_engine")
    return build_space(job, nodes=make_nodes(4), search=config, run="r", seed=0)


def layouts(space: Space) -> list[Layout]:
    generator = random.Random(0)
    return [space.decode(RandomParams(generator), trial=1).layout for _ in range(300)]


def test_a_dense_model_has_none_of_them() -> None:
    space = space_of(experts=None)
    assert {layout.settings for layout in layouts(space)} == {None}
    states = {row.knob.name: row.state for row in knob_rows(space)}
    assert states["expert_parallel"] == "kept: the model has no experts"


def test_both_are_searched_where_they_do_something() -> None:
    found = {
        (
            layout.expert_parallel * layout.tensor_parallel > 1,
            layout.tensor_parallel > 1,
            layout.setting("moe_token_dispatcher"),
            layout.setting("expert_tensor_parallel"),
        )
        for layout in layouts(space_of())
    }
    assert {dispatcher for exchanges, _, dispatcher, _ in found if exchanges} == {None, "allgather"}
    assert {shards for _, is_tensor, _, shards in found if is_tensor} == {None, 1}
    assert not any(shards for _, is_tensor, _, shards in found if not is_tensor)
    assert not any(dispatcher for exchanges, _, dispatcher, _ in found if not exchanges)


def test_a_command_with_whole_experts_may_share_them_as_layers() -> None:
    found = {
        (layout.tensor_parallel > 1, layout.setting("expert_tensor_parallel"))
        for layout in layouts(space_of(shards=1))
    }
    assert found == {(False, None), (True, None), (True, 0)}


@pytest.mark.parametrize(
    "feature", ["overlap_moe", "moe_flex_dispatcher", "moe_capacity", "moe_router_padding"]
)
def test_what_has_a_dispatcher_of_its_own_keeps_it(feature: str) -> None:
    space = space_of(features=(feature,), expert_parallel=2)
    assert {layout.setting("moe_token_dispatcher") for layout in layouts(space)} == {None}


BIASED = ("moe_linear_bias",)


@pytest.mark.parametrize(
    ("shards", "search", "found"),
    [
        (0, {}, {(False, None), (True, 1)}),
        (0, {"expert_tensor_parallel": [0, 1]}, {(False, None), (True, 1)}),
        (0, {"expert_tensor_parallel": "stock"}, {(False, None)}),
        (0, {"expert_tensor_parallel": [0]}, {(False, None)}),
        (1, {}, {(False, None), (True, None)}),
        (1, {"expert_tensor_parallel": "stock"}, {(False, None), (True, None)}),
    ],
)
def test_tensor_parallel_devices_share_no_experts_with_biases(
    shards: int, search: dict[str, Any], found: set[tuple[bool, int | None]]
) -> None:
    """Megatron asserts it (megatron/core/transformer/transformer_config.py)."""
    space = space_of(shards=shards, features=BIASED, search=search)
    made = {
        (layout.tensor_parallel > 1, layout.setting("expert_tensor_parallel")) for layout in layouts(space)
    }
    assert made == found
    rows = {row.knob.name: row for row in knob_rows(space)}
    assert (rows["tensor_parallel"].choices == ("1",)) == (len(found) == 1)


def test_a_request_to_share_experts_with_biases_is_refused_with_the_rule() -> None:
    reason = r"search\.tensor_parallel: 2; must be 1 without --expert-tensor-parallel-size 1: experts with"
    with pytest.raises(ConfigError, match=reason):
        space_of(features=BIASED, search={"expert_tensor_parallel": "stock", "tensor_parallel": [2]})
    with pytest.raises(ConfigError, match=r"search\.expert_tensor_parallel: 0; must be 1: experts with"):
        space_of(shards=1, features=BIASED, search={"expert_tensor_parallel": [0]})


def test_experts_without_biases_are_shared_as_layers() -> None:
    space = space_of(search={"expert_tensor_parallel": "stock"})
    assert {layout.tensor_parallel for layout in layouts(space)} > {1}


def test_an_optimizer_that_updates_each_ranks_part_of_a_matrix_keeps_the_shares_of_experts() -> None:
    features = ("emerging_optimizer", "muon_blockwise")
    space = space_of(features=features, tensor_parallel=2, data_parallel=2, sequence_parallel=True)
    assert {layout.tensor_parallel for layout in layouts(space)} == {2}
    assert {layout.setting("expert_tensor_parallel") for layout in layouts(space)} == {None}
    states = {row.knob.name: row.state for row in knob_rows(space)}
    reason = "kept: blockwise Muon orthogonalizes each tensor-parallel rank's part of a matrix"
    assert states["expert_tensor_parallel"] == reason
    # It keeps neither the dispatcher nor the devices of the experts.
    assert {layout.setting("moe_token_dispatcher") for layout in layouts(space)} == {None, "allgather"}
    assert len({layout.expert_parallel for layout in layouts(space)}) > 1
    with pytest.raises(ConfigError, match=r"expert_tensor_parallel: 1; must be the command.s own 0: "):
        space_of(
            features=features,
            tensor_parallel=2,
            data_parallel=2,
            sequence_parallel=True,
            search={"expert_tensor_parallel": [1]},
        )


@pytest.mark.parametrize(
    ("shards", "search"),
    [(1, {"expert_tensor_parallel": "stock"}), (1, {}), (0, {}), (0, {"expert_tensor_parallel": [1]})],
)
def test_whole_experts_are_spread_over_tensor_parallel_devices(shards: int, search: dict[str, Any]) -> None:
    """Of every layout EP may be as large as TP x DP x CP (megatron/core/parallel_state.py)."""
    made = layouts(space_of(shards=shards, search=search))
    degrees = {
        (layout.tensor_parallel, layout.data_parallel, layout.expert_parallel)
        for layout in made
        if layout.pipeline_parallel == 1
    }
    # Four query groups and a node of four devices: TP 1, 2 or 4.
    assert {(tp, dp) for tp, dp, _ in degrees} == {(1, 4), (2, 2), (4, 1)}
    assert {(2, 2, 4), (4, 1, 2), (4, 1, 4)} <= degrees
    for layout in made:
        devices = layout.tensor_parallel * layout.data_parallel
        assert devices % layout.expert_parallel == 0
        if layout.needs_whole_experts:
            assert layout.setting("expert_tensor_parallel") == (None if shards else 1)


@pytest.mark.parametrize(
    ("shards", "search"),
    [
        (0, {"expert_tensor_parallel": "stock"}),
        (0, {"expert_tensor_parallel": [0]}),
        (1, {"expert_tensor_parallel": [0]}),
        (2, {"expert_tensor_parallel": "stock"}),
    ],
)
def test_experts_that_are_shared_as_layers_are_spread_over_copies(
    shards: int, search: dict[str, Any]
) -> None:
    made = layouts(space_of(shards=shards, search=search))
    assert {layout.tensor_parallel for layout in made} > {1}
    assert not any(layout.needs_whole_experts for layout in made)


def test_what_keeps_the_shares_of_experts_keeps_them_off_tensor_parallel_devices() -> None:
    """Also where the search names whole experts beside the command's own value."""
    space = space_of(
        features=("emerging_optimizer", "muon_blockwise"),
        tensor_parallel=2,
        data_parallel=2,
        sequence_parallel=True,
        search={"expert_tensor_parallel": [0, 1]},
    )
    assert not any(layout.needs_whole_experts for layout in layouts(space))


@pytest.mark.parametrize(("shards", "rule"), [(1, "TP x DP x CP (4)"), (0, "DP x CP (2)")])
def test_the_devices_that_ep_must_divide_are_named(shards: int, rule: str) -> None:
    space = space_of(shards=shards, search={"expert_tensor_parallel": "stock"})
    layout = make_layout(tensor_parallel=2, pipeline_parallel=1, data_parallel=2)
    context = KnobContext(layout=layout, shape=space.job.shape, rules=space.rules())
    assert EXPERT_PARALLEL.fault(8, context) == f"must divide {rule}"
    assert (EXPERT_PARALLEL.fault(4, context) is None) == (shards == 1)


@pytest.mark.parametrize(("shards", "pipelines"), [(1, {1, 2}), (0, {1})])
def test_degrees_that_a_kept_spread_of_experts_does_not_divide_are_left_out(
    shards: int, pipelines: set[int]
) -> None:
    """No plan describes experts between dense layers: their EP and TP are kept, other pipelines tried."""
    space = space_of(
        shards=shards,
        experts=None,
        features=("moe",),
        tensor_parallel=2,
        data_parallel=2,
        expert_parallel=2,
        sequence_parallel=True,
        search={"expert_tensor_parallel": "stock"},
    )
    made = layouts(space)
    assert {(layout.tensor_parallel, layout.expert_parallel) for layout in made} == {(2, 2)}
    assert {layout.pipeline_parallel for layout in made} == pipelines


@pytest.mark.parametrize("search", [{}, {"expert_tensor_parallel": "stock"}, {"expert_tensor_parallel": [1]}])
def test_experts_have_the_pipelines_of_the_layers_in_the_order_tp_pp_dp(search: dict[str, Any]) -> None:
    """Megatron asserts it (megatron/core/parallel_state.py)."""
    made = layouts(space_of(features=("tp_pp_dp_order",), search=search))
    piped = [layout for layout in made if layout.pipeline_parallel > 1]
    assert {layout.tensor_parallel for layout in piped} == {1, 2}
    for layout in piped:
        shares = 1 if layout.setting("expert_tensor_parallel") == 1 else layout.tensor_parallel
        assert layout.expert_parallel * shares == layout.tensor_parallel * layout.context_parallel
    assert {layout.expert_parallel for layout in made if layout.pipeline_parallel == 1} > {1, 2}


def test_experts_with_biases_are_whole_in_the_order_tp_pp_dp() -> None:
    """Each rule alone leaves an ETP to TP 2 with PP 2 and EP 1; both together leave none."""
    made = layouts(space_of(features=("tp_pp_dp_order", "moe_linear_bias")))
    spread = [layout for layout in made if layout.pipeline_parallel > 1 and layout.tensor_parallel > 1]
    assert spread
    for layout in spread:
        assert layout.setting("expert_tensor_parallel") in (1, None)
        assert layout.expert_parallel == layout.tensor_parallel * layout.context_parallel


def test_a_dense_model_that_shares_sequences_has_one_stage_in_the_order_tp_pp_dp() -> None:
    shared: dict[str, Any] = {"experts": None, "data_parallel": 2, "context_parallel": 2}
    assert {layout.pipeline_parallel for layout in layouts(space_of(**shared))} == {1, 2}
    space = space_of(features=("tp_pp_dp_order",), **shared)
    assert {layout.pipeline_parallel for layout in layouts(space)} == {1}
    context = KnobContext(layout=space.job.layout, shape=space.job.shape, rules=space.rules())
    reason = "must be 1: EP x ETP must be TP x CP (2) with --use-tp-pp-dp-mapping and PP above 1"
    assert (PIPELINE_PARALLEL.fault(1, context), PIPELINE_PARALLEL.fault(2, context)) == (None, reason)
