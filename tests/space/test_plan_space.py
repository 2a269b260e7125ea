"""The search space: whatever is chosen is a legal plan, and nothing legal is out of reach."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.space import plan_space
from quartet_plugin.space.config import ScalingConfig, SearchConfig
from quartet_plugin.space.features import Axis
from quartet_plugin.space.layouts import is_legal_group, legal_groups, legal_layouts
from quartet_plugin.space.param_sources import FixedParams, RandomParams, degree_label
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.space.rules import LayoutRules
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape


def space_of(search: object = None, **job: object) -> Space:
    config = parse_config({"search": search or {}}, where="test").search
    layout = job.get("layout") or make_layout()
    nodes = make_nodes(layout.world_size)  # type: ignore[attr-defined]
    return build_space(make_job(**job), nodes=nodes, search=config, run="r", seed=0)  # type: ignore[arg-type]


def sample(space: Space, *, num: int) -> list[Plan]:
    generator = random.Random(0)
    return [space.decode(RandomParams(generator), trial=at) for at in range(num)]


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    tensor = draw(st.sampled_from([1, 2]))
    pipeline = draw(st.sampled_from([1, 2, 3, 4]))
    data = draw(st.sampled_from([1, 2]))
    layout = make_layout(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        data_parallel=data,
        micro_batch_size=draw(st.sampled_from([1, 2, 4])),
    )
    shape = make_shape(num_layers=draw(st.integers(pipeline, 16)))
    batch = layout.micro_batch_size * data * draw(st.integers(1, 12))
    scaling = draw(st.sampled_from([None, ScalingConfig(tolerance=0.1)]))
    nodes = draw(
        st.sampled_from(
            [
                make_nodes(layout.world_size),
                *([make_nodes(layout.world_size // 2, layout.world_size // 2)] * (layout.world_size > 1)),
            ]
        )
        if layout.world_size % 2 == 0 and (layout.world_size // 2) % tensor == 0
        else st.just(make_nodes(layout.world_size))
    )
    return build_space(
        make_job(layout=layout, shape=shape, global_batch_size=batch),
        nodes=nodes,
        search=SearchConfig(scaling=scaling),
        run="r",
        seed=0,
    )


@settings(max_examples=60, deadline=None)
@given(spaces(), st.integers(0, 2**31))
def test_every_choice_is_a_legal_plan_and_can_be_repeated(space: Space, seed: int) -> None:
    chooser = RandomParams(random.Random(seed))
    plan = space.decode(chooser, trial=7)
    assert plan.layout.world_size == space.job.layout.world_size
    assert plan.made_for == space.baseline.made_for
    again = space.decode(FixedParams(chooser.params), trial=7)
    assert again == plan
    if plan.schedule.group is not None:
        assert is_legal_group(plan.schedule.group, plan.layout, num_microbatches=plan.num_microbatches)


@settings(max_examples=60, deadline=None)
@given(spaces())
def test_the_users_own_configuration_is_in_the_default_space(space: Space) -> None:
    params = space.params_of(space.baseline)
    assert params is not None
    assert space.decode(FixedParams(params), trial=0).key == space.baseline.key


@settings(max_examples=15, deadline=None)
@given(spaces(), st.integers(0, 2**31))
def test_choices_of_one_name_never_change(space: Space, seed: int) -> None:
    generator = random.Random(seed)
    seen: dict[str, tuple[str, ...]] = {}

    class Checking(RandomParams):
        def category(self, name: str, choices: Sequence[str]) -> str:
            assert len(choices) > 1
            assert seen.setdefault(name, tuple(choices)) == tuple(choices)
            return super().category(name, choices)

    for at in range(20):
        space.decode(Checking(generator), trial=at)


def test_two_processes_vary_every_axis() -> None:
    plans = sample(space_of({"scaling": {"tolerance": 0.05}}), num=300)
    assert len({plan.shape for plan in plans}) > 1
    assert len({plan.split for plan in plans if plan.shape == plans[0].shape}) > 4
    assert {plan.schedule.name for plan in plans} == {"no-pipelining", "1f1b", "interleaved", "custom"}
    assert {plan.mapping.label for plan in plans} == {"stock", "1,0"}
    assert {degree_label(plan.layout) for plan in plans} == {"pp2", "pp2 v2", "pp2 v4", "dp2", "tp2"}


def test_four_processes_have_more_mappings_than_the_swap() -> None:
    plans = sample(space_of(layout=make_layout(pipeline_parallel=4)), num=400)
    assert len({plan.mapping for plan in plans if plan.layout.pipeline_parallel == 4}) > 10


def test_a_literal_fixes_an_axis() -> None:
    space = space_of(
        {
            "pipeline_parallel": 2,
            "virtual_stages": 1,
            "micro_batch_size": 4,
            "mapping": "stock",
            "split": "6+2",
            "schedule": "1f1b",
        }
    )
    assert {plan.key for plan in sample(space, num=20)} == {sample(space, num=1)[0].key}
    assert sample(space, num=1)[0].split == Split(transformer_layers_per_stage=(6, 2))


def test_a_literal_shape_is_the_only_one() -> None:
    others = [shape.label for shape in space_of({"scaling": {"tolerance": 0.05}}).shapes[1:]]
    space = space_of({"scaling": {"tolerance": 0.05, "shapes": others[0]}})
    assert {plan.shape.label for plan in sample(space, num=20)} == {others[0]}
    assert space.params_of(space.baseline) is None  # measured as trial 0, and not a choice


def test_named_proportions_are_searched_and_decode_again() -> None:
    shape = make_shape(
        num_layers=16, hidden_size=512, ffn_hidden_size=2048, num_attention_heads=8, num_query_groups=8,
        kv_channels=64,
    )  # fmt: skip
    scaling = {"tolerance": 0.05, "max_shapes": 64, "ffn_ratios": 3, "query_groups": [2], "head_sizes": 32}
    space = space_of({"scaling": scaling, "schedule": ["no-pipelining", "1f1b"]}, shape=shape)
    plans = sample(space, num=200)
    assert {plan.shape.num_query_groups for plan in plans} > {2}
    assert {plan.shape.kv_channels for plan in plans} == {32, 64}
    assert len({plan.shape.ffn_hidden_size / plan.shape.hidden_size for plan in plans}) > 1
    for plan in plans[:50]:
        params = space.params_of(plan)
        assert params is not None
        assert params["shape"] == plan.shape.label_beside(shape)
        assert space.decode(FixedParams(params), trial=plan.provenance.trial).key == plan.key


def test_proportions_that_do_not_divide_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"query_groups: 3; must divide the \d+ attention heads; take 2 or 4"
    ):
        space_of({"scaling": {"query_groups": 3}})


def test_a_list_is_searched() -> None:
    space = space_of({"split": ["6+2", "7+1", "even"], "virtual_stages": 1, "schedule": "1f1b"})
    assert {plan.split.label for plan in sample(space, num=60)} == {"6+2", "7+1", "4+4"}


@pytest.mark.parametrize(
    "search",
    [
        {"micro_batch_size": 5},
        {"schedule": "interleaved", "pipeline_parallel": 1},
        {"group": 3, "virtual_stages": 2, "pipeline_parallel": 2, "micro_batch_size": 16},
    ],
)
def test_a_wish_that_leaves_nothing_is_refused(search: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="fits what is asked"):
        space_of(search)


@pytest.mark.parametrize(
    ("search", "words"),
    [
        (
            {"tensor_parallel": 3},
            r"search\.tensor_parallel: 3; must divide the 2 devices; nearest: tensor_parallel 2; choose",
        ),
        ({"micro_batch_size": 5}, r"fits what is asked; nearest: micro_batch_size 4 or 8; set more"),
        ({"virtual_stages": 9, "pipeline_parallel": 2}, r"nearest: virtual_stages 4; set more"),
        ({"data_parallel": [4, 8]}, r"search\.data_parallel: \[4, 8\]; must divide the 2 devices"),
        (
            {"split": "9+9", "pipeline_parallel": 2},
            r"search\.split: 9\+9; must sum to the layers \(8\), not 18",
        ),
        ({"split": ["4+4", "4+3"]}, r"search\.split: 4\+3; must sum to the layers \(8\), not 7"),
        ({"split": ["even", "4+0+4"]}, r"search\.split: 4\+0\+4; every stage between the first and the last"),
        ({"split": "2+2+2+2", "virtual_stages": 1}, r"search\.split: 2\+2\+2\+2; no layout .* 4 stages"),
        ({"split": "4+4", "pipeline_parallel": 1}, r"search\.split: 4\+4; no layout .* has 2 stages"),
        ({"group": 999}, r"search\.group: 999; no layout of the search has this group; nearest: 32"),
        ({"group": 2, "pipeline_parallel": 1}, r"search\.group: 2; .* has this group: none is interleaved"),
        ({"mapping": "1,0,2"}, r"search\.mapping: '1,0,2'; each of the slots 0 to 1 once is needed"),
        ({"mapping": ["stock", "1,2"]}, r"search\.mapping: '1,2'; each of the slots 0 to 1 once is needed"),
    ],
)
def test_a_request_that_cannot_be_had_is_named(search: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        space_of(search)


@pytest.mark.parametrize(
    "search",
    [
        {"split": ["4+4", "2+2+2+2"], "virtual_stages": 1},
        {"split": ["2+2+2+2", "stock"], "pipeline_parallel": 1},
        {"group": [2, 999], "pipeline_parallel": 2},
        {"mapping": ["1,0", "stock", "tp-pp-dp"]},
        {"mapping": "pipeline-reversed", "pipeline_parallel": 1},
    ],
)
def test_a_request_that_some_layout_has_is_taken(search: dict[str, object]) -> None:
    assert space_of(search).layouts


def test_an_order_that_its_job_rules_out_is_named() -> None:
    """Two stages on two nodes: the first stays on the first; beside another name the order is left out."""
    job, nodes = make_job(layout=make_layout(pipeline_parallel=2)), make_nodes(1, 1)
    alone = SearchConfig.model_validate({"mapping": "pipeline-reversed", "pipeline_parallel": 2})
    with pytest.raises(ConfigError, match=r"mapping: 'pipeline-reversed'; RANK 0 must stay on node 0"):
        build_space(job, nodes=nodes, search=alone, run="r", seed=0)
    beside = alone.model_copy(update={"mapping": ("tp-pp-dp", "pipeline-reversed")})
    space = build_space(job, nodes=nodes, search=beside, run="r", seed=0)
    assert {order.name for layout in space.layouts[job.shape] for order in space.orders_of(layout)} == {
        "stock"
    }


def test_a_tensor_parallel_size_that_the_model_rules_out_is_named() -> None:
    job = make_job(
        layout=make_layout(pipeline_parallel=4), shape=make_shape(num_attention_heads=2, num_query_groups=2)
    )
    search = SearchConfig.model_validate({"tensor_parallel": 4})
    with pytest.raises(ConfigError, match=r"search\.tensor_parallel: 4; must divide the 2 heads"):
        build_space(job, nodes=make_nodes(4), search=search, run="r", seed=0)


def test_an_unknown_feature_keeps_every_axis() -> None:
    space = space_of({"scaling": {"tolerance": 0.05}}, features=("something-new",))
    assert set(space.locked) == set(Axis)
    assert {plan.key for plan in sample(space, num=20)} == {space.baseline.key}


def test_tensor_parallel_groups_stay_on_a_node() -> None:
    job = make_job(layout=make_layout(pipeline_parallel=3))
    rules = LayoutRules(job=job, nodes=make_nodes(1, 2), search=SearchConfig(), locked={})
    assert {layout.tensor_parallel for layout in legal_layouts(job.shape, rules=rules)} == {1}


def test_groups_follow_the_frameworks_rule() -> None:
    layout = make_layout(pipeline_parallel=4, virtual_stages=2)
    assert legal_groups(layout, num_microbatches=8) == (4, 8)
    assert legal_groups(layout, num_microbatches=9) == (9,)
    assert legal_groups(layout, num_microbatches=3) == ()


@pytest.mark.parametrize(("group", "kept"), [(8, 8), (3, 2)])
def test_a_kept_schedule_keeps_the_commands_group_where_it_is_legal(group: int, kept: int) -> None:
    """Of 16 microbatches groups of 3 leave one alone, which does not fill the pipeline."""
    job = make_job(layout=make_layout(pipeline_parallel=2, virtual_stages=2), features=("fsdp",))
    job = replace(job, schedule=replace(job.schedule, group=group))
    search = parse_config({"search": {"micro_batch_size": 2}}, where="q.yaml").search
    plans = sample(build_space(job, nodes=make_nodes(2), search=search, run="r", seed=0), num=20)
    assert {plan.schedule.group for plan in plans} == {kept}


def test_a_command_with_chunks_has_layouts_without_a_pipeline() -> None:
    """The degrees are chosen before the chunks, which a layout without a pipeline cannot have."""
    layout = make_layout(pipeline_parallel=2, data_parallel=1, virtual_stages=2)
    space = space_of(layout=layout)
    assert {layout.pipeline_parallel for layout in space.layouts[space.job.shape]} == {1, 2}


@pytest.mark.parametrize(("impl", "is_on"), [("transformer_engine", True), ("local", False), (None, False)])
def test_tensor_parallelism_that_a_plan_adds_comes_with_sequence_parallelism(
    impl: str | None, is_on: bool
) -> None:
    layout = make_layout(pipeline_parallel=1, data_parallel=2)
    rules = space_of(layout=layout).rules()
    rules = replace(rules, job=replace(rules.job, layer_impl=impl))
    split = [one for one in legal_layouts(rules.job.shape, rules=rules) if one.tensor_parallel == 2]
    assert split
    assert {one.sequence_parallel for one in split} == {is_on}


def test_sequence_parallelism_divides_the_part_of_a_context_parallel_rank() -> None:
    layout = make_layout(
        pipeline_parallel=1, tensor_parallel=2, data_parallel=2, context_parallel=2, sequence_parallel=True
    )
    # 36 tokens over two ranks are 18 each: two devices share them evenly, four do not.
    space = space_of(layout=layout, shape=make_shape(seq_length=36))
    assert {one.tensor_parallel for one in space.layouts[space.job.shape] if one.sequence_parallel} == {2}


def test_overlap_of_tensor_parallel_transfers_keeps_what_it_needs() -> None:
    layout = make_layout(pipeline_parallel=1, tensor_parallel=2, data_parallel=2, sequence_parallel=True)
    search = {"sequence_parallel": "auto"}
    space = space_of(search, layout=layout, features=("tp_comm_overlap",))
    offered = space.layouts[space.job.shape]
    assert {one.tensor_parallel for one in offered} == {2, 4}
    assert all(one.sequence_parallel for one in offered)


def test_a_layout_is_looked_up_by_its_degrees_and_not_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """With some ten thousand layouts a look at all of them would take most of the time of a proposal."""
    nodes = make_nodes(8, 8)
    layout = make_layout(data_parallel=8)
    space = build_space(make_job(layout=layout), nodes=nodes, search=SearchConfig(), run="r", seed=0)
    asked: list[Layout] = []

    def counted(layout: Layout) -> str:
        asked.append(layout)
        return degree_label(layout)

    monkeypatch.setattr(plan_space, "degree_label", counted)
    plans = [space.decode(RandomParams(random.Random(seed)), trial=0) for seed in range(10)]
    num_layouts = sum(len(layouts) for layouts in space.layouts.values())
    # Each layout once for the choices, once for the look-up, and each plan's own for its order of ranks.
    assert len(asked) <= 2 * num_layouts + len(plans)
    assert all(
        plan.layout.degrees in {known.degrees for known in space.layouts[plan.shape]} for plan in plans
    )
