"""Tensor parallelism: the sizes of a model that it divides, and what keeps it."""

from dataclasses import replace

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.layout import Setting
from quartet_plugin.space.knob_table import knob_rows
from quartet_plugin.space.knobs.knob import KnobContext
from quartet_plugin.space.knobs.tensor_parallel import TENSOR_PARALLEL
from quartet_plugin.space.plan_space import Space, build_space
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


KEPT = {
    "muon_blockwise": "blockwise Muon orthogonalizes each tensor-parallel rank's part of a matrix",
    "soap_optimizer": "SOAP preconditions each tensor-parallel rank's part of a matrix",
}


def space_of(*features: str, settings: tuple[Setting, ...] = (), **search: object) -> Space:
    """The space of a command with TP 2 on four devices."""
    job = make_job(layout=make_layout(tensor_parallel=2, pipeline_parallel=1, data_parallel=2))
    asked = parse_config({"search": {"schedule": "stock", **search}}, where="q.yaml").search
    job = replace(job, features=features, settings=settings)
    return build_space(job, nodes=make_nodes(4), search=asked, run="r", seed=0)


def sizes(space: Space) -> set[int]:
    return {layout.tensor_parallel for layouts in space.layouts.values() for layout in layouts}


@pytest.mark.parametrize("feature", KEPT)
def test_an_update_of_each_ranks_part_of_a_matrix_keeps_it(feature: str) -> None:
    assert sizes(space_of("emerging_optimizer")) == {1, 2, 4}
    space = space_of("emerging_optimizer", feature)
    assert sizes(space) == {2}
    states = {row.knob.name: row.state for row in knob_rows(space)}
    assert states["tensor_parallel"] == f"kept: {KEPT[feature]}"
    assert states["pipeline_parallel"] == "tuned"
    with pytest.raises(ConfigError, match=r"tensor_parallel: 4; must be the command.s own 2: "):
        space_of(feature, tensor_parallel=4)


def test_its_product_with_cp_divides_the_heads_of_linear_attention() -> None:
    """What Megatron asserts (megatron/core/transformer/transformer_config.py)."""
    heads = (Setting(name="linear_attention_heads", value=2),)
    assert sizes(space_of("attention_variant", settings=heads)) == {1, 2}
    assert sizes(space_of("attention_variant")) == {1, 2, 4}
    odd = space_of("attention_variant", settings=(replace(heads[0], value=3),))
    layout = make_layout(context_parallel=2, pipeline_parallel=1, data_parallel=2)
    context = KnobContext(layout=layout, shape=odd.job.shape, rules=odd.rules())
    assert TENSOR_PARALLEL.fault(1, context) == "times CP 2 must divide the 3 heads of linear attention"
