"""Equal shapes: every one keeps the budget, the band and what a transformer needs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.scaling.shapes import BudgetRule, budget_of, depth_width_ratio, equal_shapes
from tests.search.jobs import make_shape


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    head = draw(st.sampled_from([32, 64, 80, 128]))
    heads = draw(st.sampled_from([1, 2, 4, 6, 8, 12, 16, 32, 96]))
    groups = draw(st.sampled_from([g for g in (1, 2, 4, 8, heads) if heads % g == 0]))
    hidden = head * heads
    return make_shape(
        num_layers=draw(st.integers(1, 96)),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=head,
        ffn_hidden_size=draw(st.sampled_from([4 * hidden, int(8 * hidden / 3 / 64) * 64 or 64])),
        gated_ffn=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
        vocab_size=draw(st.sampled_from([512, 16384, 51200, 128256])),
    )


@settings(max_examples=150, deadline=None)
@given(
    shapes(),
    st.sampled_from(["parameters", "flops"]),
    st.floats(0.005, 0.2),
    st.floats(1.0, 8.0),
    st.integers(1, 12),
)
def test_every_shape_keeps_the_rule(
    base: ModelShape, budget: str, tolerance: float, band: float, num: int
) -> None:
    rule = BudgetRule(
        budget="flops" if budget == "flops" else "parameters",
        tolerance=tolerance,
        depth_width_band=band,
        max_shapes=num,
    )
    found = equal_shapes(base, rule=rule)
    assert found[0] == base
    assert len(found) <= num
    assert len({(shape.num_layers, shape.hidden_size) for shape in found}) == len(found)
    assert found == equal_shapes(base, rule=rule)
    target = budget_of(base, budget=rule.budget)
    for shape in found:
        assert abs(budget_of(shape, budget=rule.budget) - target) <= tolerance * target
        ratio = depth_width_ratio(shape) / depth_width_ratio(base)
        assert 1 / band * 0.999 <= ratio <= band * 1.001
        assert shape.kv_channels == base.kv_channels
        assert shape.num_attention_heads % shape.num_query_groups == 0
        assert shape.attention_size * base.hidden_size == base.attention_size * shape.hidden_size
        kept = ("seq_length", "vocab_size", "gated_ffn", "tied_embeddings", "position_embedding")
        assert all(getattr(shape, name) == getattr(base, name) for name in kept)


def test_a_small_model_can_be_made_wider_and_deeper() -> None:
    base = make_shape(num_layers=12, hidden_size=256, ffn_hidden_size=1024)
    found = equal_shapes(base, rule=BudgetRule(tolerance=0.03))
    sizes = {(shape.num_layers, shape.hidden_size) for shape in found}
    assert any(layers < 12 and hidden > 256 for layers, hidden in sizes)
    assert any(layers > 12 and hidden < 256 for layers, hidden in sizes)


def test_many_heads_stay_a_count_that_can_be_divided() -> None:
    base = make_shape(
        num_layers=96,
        hidden_size=12288,
        ffn_hidden_size=49152,
        num_attention_heads=96,
        num_query_groups=96,
        kv_channels=128,
        seq_length=2048,
        vocab_size=51200,
        max_position_embeddings=2048,
    )
    found = equal_shapes(base, rule=BudgetRule())
    assert len(found) == 8
    assert all(shape.num_attention_heads % 8 == 0 for shape in found)


@pytest.mark.parametrize(
    "wrong", [{"tolerance": 0.0}, {"depth_width_band": 0.5}, {"max_shapes": 0}, {"budget": "time"}]
)
def test_a_rule_out_of_range_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"scaling.{next(iter(wrong))}"):
        BudgetRule(**wrong)  # type: ignore[arg-type]
