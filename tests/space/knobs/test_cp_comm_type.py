"""How devices that share sequences exchange them: searched where Transformer Engine has it."""

from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.layout import Setting
from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.space.knobs.cp_comm_type import CP_COMM_TYPE, has_no_type
from quartet_plugin.space.knobs.knob import KnobContext
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape
from tests.space.knobs.test_expert_overlap import SCHEDULES, plans, states

NAME = CP_COMM_TYPE.name
AUTO = {NAME: "auto"}
HIERARCHICAL = ("context_parallel", "hierarchical_context_parallel")


def space_of(
    search: dict[str, Any],
    *,
    command: str | None = "p2p",
    sizes: str | None = None,
    features: tuple[str, ...] = ("context_parallel",),
    layout: dict[str, Any] | None = None,
    shape: dict[str, Any] | None = None,
    **job: Any,
) -> Space:
    """The space of a command with CP 2 on four devices, or with another layout."""
    degrees = {"pipeline_parallel": 1, "data_parallel": 2, "context_parallel": 2, **(layout or {})}
    made = make_job(layout=make_layout(**degrees), shape=make_shape(**(shape or {})), features=features)
    values = {NAME: command, "hierarchical_context_parallel_sizes": sizes}
    settings = tuple(Setting(name=name, value=value) for name, value in values.items() if value is not None)
    made = replace(made, **{"layer_impl": "transformer_engine", "settings": settings, **job})
    config = parse_config({"search": {"schedule": [*SCHEDULES], **search}}, where="q.yaml")
    return build_space(made, nodes=make_nodes(made.layout.world_size), search=config.search, run="r", seed=0)


def found(space: Space) -> set[tuple[int, Any]]:
    """The TP and the setting of each plan."""
    return {(plan.layout.tensor_parallel, plan.layout.setting(NAME)) for plan in plans(space)}


def fault_of(value: str, space: Space, **degrees: Any) -> str | None:
    layout = replace(space.job.layout, **degrees)
    return CP_COMM_TYPE.fault(value, KnobContext(layout=layout, shape=space.job.shape, rules=space.rules()))


def test_nothing_changes_unless_the_search_asks() -> None:
    space = space_of({})
    assert {value for _, value in found(space)} == {None}
    assert states(space)[NAME] == "kept unless search asks for it"


def test_it_is_searched_where_devices_share_sequences() -> None:
    assert found(space_of(AUTO)) == {(tp, value) for tp in (1, 2) for value in (None, "all_gather", "a2a")}
    alone = space_of(AUTO, layout={"context_parallel": 1, "data_parallel": 4}, features=())
    assert {value for _, value in found(alone)} == {None}


def test_devices_that_exchange_heads_have_equal_numbers_of_them() -> None:
    """Of two query groups two tensor-parallel ranks have one each, which no two ranks can share."""
    groups = {"num_query_groups": 2}
    assert found(space_of(AUTO, shape=groups)) == {
        *((1, value) for value in (None, "all_gather", "a2a")),
        *((2, value) for value in (None, "all_gather")),
    }
    space = space_of(AUTO, shape=groups)
    assert fault_of("a2a", space) is None
    assert fault_of("a2a", space, tensor_parallel=2) == (
        "2 x TP (2) ranks that exchange heads must divide 4 heads and 2 query groups"
    )
    assert fault_of("all_gather", space, tensor_parallel=2) is None


def test_a_command_that_exchanges_heads_has_only_degrees_that_divide_them() -> None:
    groups = {"num_query_groups": 2}
    assert found(space_of({}, command="a2a", shape=groups)) == {(1, None)}
    searched = found(space_of(AUTO, command="a2a", shape=groups))
    assert searched == {
        *((1, value) for value in (None, "p2p", "all_gather")),
        *((2, value) for value in ("p2p", "all_gather")),
    }


def test_a_command_that_exchanges_heads_has_only_shapes_that_have_equal_numbers_of_them() -> None:
    space = space_of({}, command="a2a")
    own = KnobContext(layout=space.job.layout, shape=space.job.shape, rules=space.rules())
    assert not has_no_type(own)
    assert has_no_type(replace(own, shape=replace(own.shape, num_attention_heads=3, num_query_groups=3)))


def test_other_degrees_than_the_commands_need_a_type_that_the_attention_has() -> None:
    """A ring has no sliding window, and the command may be one that shares no sequences."""
    features = ("context_parallel", "sliding_window")
    assert found(space_of({}, features=features)) == {(1, None)}
    assert found(space_of(AUTO, features=features)) == {
        (tp, value) for tp in (1, 2) for value in ("all_gather", "a2a")
    }


def test_a_hierarchy_needs_the_commands_sizes() -> None:
    layout = {"context_parallel": 4, "data_parallel": 1}
    with_sizes = space_of(AUTO, sizes="2+2", features=HIERARCHICAL, layout=layout)
    # Degrees are kept beside the sizes, which divide the command's own.
    assert found(with_sizes) == {(1, value) for value in (None, "all_gather", "a2a", "a2a+p2p")}
    assert fault_of("a2a+p2p", with_sizes) is None
    needs = "needs two --hierarchical-context-parallel-sizes whose product is CP (4)"
    for sizes in (None, "4", "2+4", "2+2+1"):
        assert fault_of("a2a+p2p", space_of({}, sizes=sizes, layout=layout)) == needs
    few = space_of({}, sizes="2+2", layout=layout, shape={"num_query_groups": 1})
    assert fault_of("a2a+p2p", few) == (
        "2 x TP (1) ranks that exchange heads must divide 4 heads and 1 query groups"
    )
    with pytest.raises(ConfigError, match=r"search\.cp_comm_type: a2a\+p2p; needs two --hierarchical"):
        space_of({NAME: "a2a+p2p"}, layout=layout)


@pytest.mark.parametrize(
    ("feature", "legal"),
    [
        ("sliding_window", {"all_gather", "a2a"}),
        ("attention_sink", {"a2a"}),
        ("multi_latent_attention", {"p2p", "a2a+p2p"}),
        ("mtp", {"p2p", "all_gather", "a2a", "a2a+p2p"}),
    ],
)
def test_transformer_engine_has_some_attention_with_some_types(feature: str, legal: set[str]) -> None:
    space = space_of({}, sizes="2+1", features=(*HIERARCHICAL, feature))
    assert {value for value in CP_COMM_TYPE.words if fault_of(str(value), space) is None} == legal


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"features": ("cp_comm_by_layer",), "command": None}, "the command has a type for each layer"),
        ({"features": ("packing",)}, "some releases of Transformer Engine have p2p alone for packed"),
        ({"features": ("attention_variant",)}, "its attention is none of Transformer Engine's"),
        ({"features": ("heterogeneous",)}, "its layers have query groups of their own"),
        ({"features": HIERARCHICAL}, "--hybrid-context-parallel makes groups of its own"),
        (
            {
                "features": ("hybrid",),
                "shape": {
                    "layer_kinds": LayerKinds(
                        attention=0,
                        mlp=4,
                        experts=0,
                        state_space=4,
                        state_space_heads=4,
                        state_space_groups=2,
                        projected_size=1024,
                    )
                },
            },
            "the model has no attention",
        ),
    ],
)
def test_what_keeps_it(job: dict[str, Any], reason: str) -> None:
    space = space_of(AUTO, **job)
    assert states(space)[NAME].startswith(f"kept: {reason}")
    assert {value for _, value in found(space)} == {None}
    with pytest.raises(ConfigError, match=r"search\.cp_comm_type: a2a"):
        space_of({NAME: "a2a"}, **job)
