"""The groups of ranks that share experts, and the legal sizes of these, against Megatron's own generator."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator

from quartet_plugin.mapping.order_rules import expert_groups
from quartet_plugin.model.layout import Layout
from quartet_plugin.space.knobs.expert_parallel import EXPERT_PARALLEL
from quartet_plugin.space.knobs.expert_tensor_parallel import EXPERT_TENSOR_PARALLEL, WHOLE
from quartet_plugin.space.knobs.knob import KnobContext
from tests.cost.runs import EXPERTS, run
from tests.space.jobs import make_layout
from tests.space.knobs.test_experts import EXPERTS as EIGHT
from tests.space.knobs.test_experts import space_of

type Ranks = set[tuple[int, ...]]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any sizes, with EP that Megatron may refuse."""
    tensor, context, data, pipeline = (draw(st.sampled_from((1, 2, 3, 4))) for _ in range(4))
    return make_layout(
        tensor_parallel=tensor,
        context_parallel=context,
        data_parallel=data,
        pipeline_parallel=pipeline,
        expert_parallel=draw(st.sampled_from((1, 2, 3, 4, 6, 8, 12, 16))),
    )


def groups_of_megatron(layout: Layout, *, expert_tensor: int) -> tuple[Ranks, Ranks] | None:
    """The groups that share the experts and those that have the same ones; None where Megatron refuses."""
    size = expert_tensor * layout.expert_parallel * layout.pipeline_parallel
    if layout.world_size % size:
        return None
    ranks = RankGenerator(
        tp=expert_tensor,
        ep=layout.expert_parallel,
        dp=layout.world_size // size,
        pp=layout.pipeline_parallel,
        cp=1,
        order="tp-cp-ep-dp-pp",
    )
    sharing, same = ({tuple(group) for group in ranks.get_ranks(kind)} for kind in ("ep", "dp"))
    return sharing, same


@settings(max_examples=200, deadline=None)
@given(layouts(), st.booleans())
def test_groups_are_those_of_megatron_where_it_accepts_the_sizes(layout: Layout, is_whole: bool) -> None:
    made = groups_of_megatron(layout, expert_tensor=1 if is_whole else layout.tensor_parallel)
    is_legal = is_whole or not layout.needs_whole_experts
    stage = layout.world_size // layout.pipeline_parallel
    assert (made is not None) == (is_legal and stage % layout.expert_parallel == 0)
    if made is None:
        return
    sharing, same = made
    whole, *shared = expert_groups(layout)
    groups = whole if is_whole or not shared else shared[0]
    assert {tuple(group) for group in groups.tolist()} == sharing
    found = replace(run(EXPERTS), layout=layout, has_whole_experts=is_whole)
    assert {len(group) for group in same} == {found.expert_copies}


@settings(max_examples=60, deadline=None)
@given(layouts(), st.sampled_from((0, WHOLE)))
def test_the_rules_are_those_of_megatron(layout: Layout, shards: int) -> None:
    """For a command with whole experts and one whose tensor-parallel ranks share them."""
    experts = replace(EIGHT, num_experts=48)
    space = space_of(experts=experts, shards=shards, search={"expert_tensor_parallel": "stock"})
    context = KnobContext(layout=layout, shape=space.job.shape, rules=space.rules())
    expert_tensor = WHOLE if shards == WHOLE else layout.tensor_parallel
    made = groups_of_megatron(layout, expert_tensor=expert_tensor)
    assert (EXPERT_PARALLEL.fault(layout.expert_parallel, context) is None) == (made is not None)
    if shards != WHOLE and layout.tensor_parallel > 1:
        assert (EXPERT_TENSOR_PARALLEL.fault(shards, context) is None) == (made is not None)
