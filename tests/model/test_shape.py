"""Parameters and FLOPs of a shape, against sums written out."""

from dataclasses import replace
from typing import Any, cast

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.schema import dump, parse
from quartet_plugin.model.shape import LayerKinds, ModelShape
from tests.model.plans import SHAPE


def test_parameters_of_a_small_gpt() -> None:
    per_layer = 256 * 256 * 4 + 2 * 256 * 1024
    assert SHAPE.num_parameters == 8 * per_layer + 16384 * 256 + 256 * 256
    untied = replace(SHAPE, tied_embeddings=False, position_embedding="rope")
    assert untied.num_parameters == 8 * per_layer + 2 * 16384 * 256


def test_grouped_queries_and_gated_ffn_change_the_layer() -> None:
    grouped = replace(SHAPE, num_query_groups=2, gated_ffn=True)
    assert grouped.matrix_parameters_per_layer == 256 * (256 * 2 + 128 * 2) + 3 * 256 * 1024


def test_gpt3_has_175_billion_parameters() -> None:
    gpt3 = replace(
        SHAPE,
        num_layers=96,
        hidden_size=12288,
        ffn_hidden_size=4 * 12288,
        num_attention_heads=96,
        num_query_groups=96,
        kv_channels=128,
        seq_length=2048,
        vocab_size=51200,
        max_position_embeddings=2048,
    )
    assert gpt3.num_parameters == pytest.approx(174.6e9, rel=1e-3)
    # 6 FLOPs a parameter and token, and attention on top
    assert gpt3.model_flops_per_sequence / 2048 / (6 * gpt3.num_parameters) == pytest.approx(1.01, abs=0.01)


@pytest.mark.parametrize("field", ["num_layers", "hidden_size", "vocab_size", "seq_length"])
def test_sizes_below_one_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(SHAPE, **cast(dict[str, Any], {field: 0}))


def test_hybrid_layers_weigh_what_their_kinds_do() -> None:
    """Nemotron-H 56B: the mean layer loses none of attention, MLPs and projections of state spaces."""
    projected = 3 * 256 * 64 + 2 * 8 * 256 + 256
    shape = ModelShape(
        num_layers=118,
        hidden_size=8192,
        ffn_hidden_size=32_768,
        num_attention_heads=64,
        num_query_groups=8,
        kv_channels=128,
        seq_length=8192,
        vocab_size=131_072,
        max_position_embeddings=8192,
        gated_ffn=False,
        tied_embeddings=False,
        position_embedding="none",
        layer_kinds=LayerKinds(attention=10, mlp=54, experts=0, state_space=54, projected_size=projected),
    )
    assert shape.num_parameters == pytest.approx(56.4e9, rel=0.005)
    weights = 8192 * (10 * 2 * (64 + 8) * 128 + 54 * 2 * 32_768 + 54 * projected)
    assert shape.num_layers * shape.matrix_parameters_per_layer == pytest.approx(weights, rel=0.005)
    assert shape.mean.mean == shape.mean
    without = replace(shape, layer_kinds=LayerKinds(attention=0, mlp=59, experts=0, state_space=59))
    assert without.mean.attention_size == 1


def test_a_pattern_has_the_counted_layers() -> None:
    kinds = LayerKinds(attention=1, mlp=2, experts=0, state_space=1, pattern="M-*-")
    assert kinds.with_pattern("EEM") == replace(
        kinds, attention=0, mlp=0, experts=2, state_space=1, pattern="EEM"
    )
    for pattern in ("M-*", "M-*M", "M-*X", "M|-*-"):
        with pytest.raises(ConfigError, match=r"layer_kinds\.pattern"):
            replace(kinds, pattern=pattern)


def test_a_pattern_in_the_frameworks_letters_has_as_many_layers() -> None:
    kinds = LayerKinds(attention=1, mlp=2, experts=0, state_space=1, pattern="M-*-")
    written = replace(kinds, framework_pattern="M-+-/+-/+-")
    assert parse(LayerKinds, dump(written), where="test") == written
    assert "framework_pattern" not in dump(kinds)
    assert written.without_pattern == kinds.without_pattern
    assert written.without_pattern.pattern is None
    assert written.with_pattern("M*").framework_pattern is None
    for text in ("M-+", "M-+/-", "M|-+-", "M-+\n", "M-+é"):
        with pytest.raises(ConfigError, match=r"layer_kinds\.framework_pattern"):
            replace(kinds, framework_pattern=text)


def test_layers_without_an_order_are_read_and_written_as_before() -> None:
    kinds = LayerKinds(attention=1, mlp=2, experts=0, state_space=1)
    assert "pattern" not in dump(kinds)
    assert parse(LayerKinds, dump(kinds), where="test") == kinds
    ordered = replace(kinds, pattern="-M*-")
    assert parse(LayerKinds, dump(ordered), where="test") == ordered
    shape = replace(SHAPE, num_layers=4, layer_kinds=ordered)
    assert shape.without_pattern == replace(SHAPE, num_layers=4, layer_kinds=kinds)
    assert SHAPE.without_pattern == SHAPE
    assert shape.mean == shape.without_pattern.mean
    assert shape.pattern == "-M*-"
    assert replace(shape, num_layers=8).pattern is SHAPE.pattern is None
