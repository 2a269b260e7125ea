"""How devices that share sequences exchange them: searched where Transformer Engine has it."""

from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.layout import Setting
from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.space.knobs.cp_comm_type import CP_COMM_TYPE, HIERARCHICAL_SIZES, has_no_type
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


def test_a_hierarchy_needs_sizes() -> None:
    layout = {"context_parallel": 4, "data_parallel": 1}
    with_sizes = space_of(AUTO, sizes="2+2", features=HIERARCHICAL, layout=layout)
    assert {value for _, value in found(with_sizes)} == {None, "all_gather", "a2a", "a2a+p2p"}
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
        ({"features": ("hybrid_context_parallel",)}, "--hybrid-context-parallel makes groups of its own"),
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


SIZES = HIERARCHICAL_SIZES.name
RINGS = {NAME: "a2a+p2p"}


def hierarchies(space: Space) -> set[tuple[int, int, Any, Any]]:
    """The TP, the CP, the type and the sizes of each plan."""
    layouts = (plan.layout for plan in plans(space))
    return {
        (layout.tensor_parallel, layout.context_parallel, layout.setting(NAME), layout.setting(SIZES))
        for layout in layouts
    }


def of_eight(search: dict[str, Any], **kwargs: Any) -> Space:
    """The space of a command with CP 8 of eight heads on eight devices."""
    shape = {"num_attention_heads": 8, "num_query_groups": 8, "kv_channels": 32}
    layout = {"context_parallel": 8, "data_parallel": 1}
    return space_of({"context_parallel": 8, **search}, layout=layout, shape=shape, **kwargs)


def test_sizes_are_searched_where_the_search_asks_for_them() -> None:
    every = hierarchies(of_eight({**AUTO, SIZES: "auto"}))
    assert {(kind, sizes) for _, _, kind, sizes in every} == {
        *((kind, None) for kind in (None, "all_gather", "a2a")),
        *(("a2a+p2p", sizes) for sizes in ("2+4", "4+2")),
    }
    named = hierarchies(of_eight({**RINGS, SIZES: ["8+1", [4, 2], "2+2"]}))
    assert {(kind, sizes) for _, _, kind, sizes in named} == {("a2a+p2p", "8+1"), ("a2a+p2p", "4+2")}
    # Two numbers are one choice, as a JOB.yaml has them.
    assert {sizes for *_, sizes in hierarchies(of_eight({**RINGS, SIZES: [4, 2]}))} == {"4+2"}


def test_the_commands_sizes_are_searched_beside_others() -> None:
    command: dict[str, Any] = {"command": "a2a+p2p", "sizes": "4+2", "features": HIERARCHICAL}
    kept = of_eight({}, **command)
    assert {(kind, sizes) for _, _, kind, sizes in hierarchies(kept)} == {(None, None)}
    assert states(kept)[SIZES] == "kept unless search asks for it"
    searched = of_eight({SIZES: "auto"}, **command)
    assert {(kind, sizes) for _, _, kind, sizes in hierarchies(searched)} == {(None, None), (None, "2+4")}
    assert states(searched)[SIZES] == "tuned"
    listed = of_eight({SIZES: ["2+4", "stock"]}, **command)
    assert hierarchies(listed) == hierarchies(searched)


def test_ranks_that_exchange_heads_decide_which_sizes_are_legal() -> None:
    """Four query groups: eight ranks cannot share them, nor four of two tensor-parallel ranks each."""
    shape = {"num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 32}
    layout = {"context_parallel": 8, "data_parallel": 2}
    space = space_of({**RINGS, SIZES: "auto", "context_parallel": 8}, layout=layout, shape=shape)
    assert hierarchies(space) == {
        *((1, 8, "a2a+p2p", sizes) for sizes in ("2+4", "4+2")),
        (2, 8, "a2a+p2p", "2+4"),
    }
    context = KnobContext(
        layout=space.job.layout.with_setting(NAME, "a2a+p2p"), shape=space.job.shape, rules=space.rules()
    )
    assert HIERARCHICAL_SIZES.fault("2+4", context) is None
    words = "8 x TP (1) ranks that exchange heads must divide 8 heads and 4 query groups"
    assert HIERARCHICAL_SIZES.fault("8+1", context) == words
    needs = "needs two --hierarchical-context-parallel-sizes whose product is CP (8)"
    assert HIERARCHICAL_SIZES.fault("2+2", context) == needs
    ring = replace(context, layout=space.job.layout)
    assert HIERARCHICAL_SIZES.fault("2+4", ring) == "needs cp_comm_type a2a+p2p"
    with pytest.raises(ConfigError, match=r"search\.cp_comm_type: a2a\+p2p; needs two --hierarchical"):
        space_of({**RINGS, SIZES: "2+2", "context_parallel": 8}, layout=layout, shape=shape)


def test_degrees_of_a_command_with_sizes_are_tuned() -> None:
    """Another degree has no hierarchy, or other sizes; a ring has any degree."""
    free: dict[str, Any] = {"context_parallel": "auto", "tensor_parallel": 1, "pipeline_parallel": 1}

    def found_for(search: dict[str, Any], **command: Any) -> set[tuple[int, Any]]:
        layout = {"context_parallel": 4, "data_parallel": 1}
        usual = {"sizes": "2+2", "features": HIERARCHICAL, "shares_sequences": True}
        space = space_of({**free, **search}, layout=layout, **{**usual, **command})
        return {(degree, sizes) for _, degree, _, sizes in hierarchies(space)}

    assert found_for({}) == {(1, None), (2, None), (4, None)}
    rings: dict[str, Any] = {"command": "a2a+p2p"}
    assert found_for({}, **rings) == {(1, None), (4, None)}
    assert found_for({SIZES: ["stock", "1+2"]}, **rings) == {(1, None), (2, "1+2"), (4, None)}
    hybrid = {"sizes": None, "features": ("context_parallel", "hybrid_context_parallel")}
    assert found_for({}, **hybrid) == {(4, None)}


def test_sizes_that_a_plan_may_have_keep_the_nodes_whole() -> None:
    free = of_eight({**AUTO, SIZES: "auto"})
    assert free.order_rules.keeps_nodes
    assert not of_eight(AUTO).order_rules.keeps_nodes
    assert not of_eight({SIZES: "auto"}).order_rules.keeps_nodes
    assert of_eight({SIZES: "auto"}, command="a2a+p2p").order_rules.keeps_nodes
    alone = space_of({**AUTO, SIZES: "auto"}, layout={"context_parallel": 1, "data_parallel": 4}, features=())
    assert not alone.order_rules.keeps_nodes
    rules = replace(free.rules(), is_planned=True)
    layout = free.job.layout
    assert not rules.order_rules_of(layout).keeps_nodes
    assert rules.order_rules_of(layout.with_setting(SIZES, "4+2")).keeps_nodes


@pytest.mark.parametrize("value", ["4", "4+2+1", "0+2", "a+b", [0, 2], [4], [True, 2], [4, 2, 1], 4, []])
def test_a_request_for_other_sizes_than_two_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"search\.{SIZES}"):
        parse_config({"search": {SIZES: value}}, where="q.yaml")


def test_a_rule_forbids_sizes() -> None:
    space = of_eight({**RINGS, SIZES: "auto", "forbid": [{SIZES: "4+2"}]})
    prohibitions = space.rules().prohibitions
    allowed = [plan.layout for plan in plans(space) if prohibitions.of_plan(plan) is None]
    assert {layout.setting(SIZES) for layout in allowed} == {"2+4"}
    assert HIERARCHICAL_SIZES.takes("4+2")
    assert not any(HIERARCHICAL_SIZES.takes(value) for value in ("4", "2+2+2", "a2a", 4, True))
