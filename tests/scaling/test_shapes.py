"""Equal shapes: every one keeps the budget, the band and what a transformer needs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.scaling.shapes import BudgetRule, budget_of, depth_width_ratio, equal_shapes
from tests.space.jobs import make_shape


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


def test_a_narrow_model_has_other_shapes_too() -> None:
    narrow = make_shape(num_layers=8, hidden_size=192, num_attention_heads=4, vocab_size=16384)
    found = equal_shapes(narrow, rule=BudgetRule(tolerance=0.03))
    assert len({(shape.num_layers, shape.hidden_size) for shape in found}) >= 3


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


def test_other_head_sizes_keep_the_attentions_width() -> None:
    base = make_shape(
        num_layers=24,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_attention_heads=16,
        num_query_groups=4,
        kv_channels=128,
    )
    found = equal_shapes(base, rule=BudgetRule(budget="flops", max_shapes=12, head_sizes=(64,)))
    smaller = [shape for shape in found if shape.kv_channels == 64]
    assert smaller
    assert len(smaller) < len(found) - 1
    for shape in smaller:
        assert shape.attention_size * base.hidden_size == base.attention_size * shape.hidden_size
        assert shape.num_attention_heads // shape.num_query_groups == 4
    assert {shape.num_layers for shape in smaller} != {24}


@settings(max_examples=60, deadline=None)
@given(shapes(), st.sampled_from(["parameters", "flops"]), st.sampled_from([(32,), (64, 128), (256,)]))
def test_other_head_sizes_keep_the_rule(base: ModelShape, budget: str, sizes: tuple[int, ...]) -> None:
    rule = BudgetRule(
        budget="flops" if budget == "flops" else "parameters", max_shapes=32, head_sizes=sizes, tolerance=0.05
    )
    target = budget_of(base, budget=rule.budget)
    for shape in equal_shapes(base, rule=rule):
        assert abs(budget_of(shape, budget=rule.budget) - target) <= 0.05 * target
        assert shape.kv_channels in (base.kv_channels, *sizes)
        assert shape.num_attention_heads % shape.num_query_groups == 0


@pytest.mark.parametrize("head", [64, 80])
def test_widths_are_multiples_that_matrix_units_like(head: int) -> None:
    base = make_shape(
        num_layers=32, hidden_size=32 * head, ffn_hidden_size=128 * head, num_attention_heads=32,
        num_query_groups=32, kv_channels=head,
    )  # fmt: skip
    found = equal_shapes(base, rule=BudgetRule(tolerance=0.05, max_shapes=32))
    assert len(found) > 2
    assert all(shape.hidden_size % 64 == 0 and shape.ffn_hidden_size % 64 == 0 for shape in found)


@settings(max_examples=60, deadline=None)
@given(
    shapes(),
    st.sampled_from(["parameters", "flops"]),
    st.sampled_from([(), (3.0,), (2.5, 5.0)]),
    st.sampled_from([(), (2,), (1, 4)]),
    st.sampled_from([(), (64,)]),
)
def test_other_proportions_keep_the_rule_and_have_labels(
    base: ModelShape, budget: str, ratios: tuple[float, ...], groups: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    rule = BudgetRule(
        budget="flops" if budget == "flops" else "parameters",
        max_shapes=64,
        tolerance=0.05,
        ffn_ratios=ratios,
        query_groups=groups,
        head_sizes=sizes,
    )
    found = equal_shapes(base, rule=rule)
    target = budget_of(base, budget=rule.budget)
    for shape in found:
        assert abs(budget_of(shape, budget=rule.budget) - target) <= 0.05 * target
        kept_groups = {base.num_groups_of(shape.num_attention_heads), 1, shape.num_attention_heads}
        assert shape.num_query_groups in {*groups, *kept_groups}
        assert shape.num_attention_heads % shape.num_query_groups == 0
        # Sizes are rounded to at most 256.
        wanted = [*ratios, base.ffn_hidden_size / base.hidden_size]
        errors = [abs(shape.ffn_hidden_size - ratio * shape.hidden_size) for ratio in wanted]
        assert min(errors) <= 128 * (1 + shape.hidden_size / base.hidden_size)
    assert len({shape.label_beside(base) for shape in found}) == len(found)
    assert found[0].label_beside(base) == base.label
    if not (ratios or groups or sizes):
        assert all(shape.label_beside(base) == shape.label for shape in found)


def test_labels_say_what_is_in_other_proportions() -> None:
    base = make_shape(
        num_layers=24,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_attention_heads=16,
        num_query_groups=16,
        kv_channels=128,
    )
    rule = BudgetRule(max_shapes=64, tolerance=0.05, ffn_ratios=(3.5,), query_groups=(4,), head_sizes=(64,))
    labels = {shape.label_beside(base) for shape in equal_shapes(base, rule=rule)}
    of_width = {label.partition(" ")[2] for label in labels if "x2048" in label}
    assert of_width == {
        *("", "ffn 7168", "groups 4", "ffn 7168 groups 4"),
        *("head 64", "ffn 7168 head 64", "groups 4 head 64", "ffn 7168 groups 4 head 64"),
    }


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (
            {"query_groups": (5,)},
            "search.scaling.query_groups: 5; must divide the 16 attention heads; take 4 or 8",
        ),
        (
            {"head_sizes": (48,)},
            r"search.scaling.head_sizes: 48; must divide the width of all heads \(2048\)",
        ),
    ],
)
def test_proportions_that_do_not_divide_are_refused(rule: dict[str, tuple[int, ...]], words: str) -> None:
    base = make_shape(hidden_size=2048, num_attention_heads=16, num_query_groups=16, kv_channels=128)
    with pytest.raises(ConfigError, match=words):
        BudgetRule(**rule).check_proportions(base)  # type: ignore[arg-type]


def test_a_head_size_no_kernel_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scaling.head_sizes: 20"):
        BudgetRule(head_sizes=(20,))


@settings(max_examples=60, deadline=None)
@given(shapes(), st.data())
def test_shapes_that_are_asked_for_are_the_only_ones(base: ModelShape, data: st.DataObject) -> None:
    every = equal_shapes(base, rule=BudgetRule(tolerance=0.1, max_shapes=1000))
    labels = data.draw(st.lists(st.sampled_from([shape.label for shape in every]), min_size=1, unique=True))
    found = equal_shapes(base, rule=BudgetRule(tolerance=0.1, shapes=tuple(labels)))
    assert [shape.label for shape in found] == labels
    assert set(found) <= set(every)


def test_a_shape_of_another_budget_is_refused_with_those_that_are_equal() -> None:
    base = make_shape()
    known = equal_shapes(base, rule=BudgetRule(tolerance=0.1, max_shapes=1000))[1].label
    with pytest.raises(ConfigError, match=f"scaling.shapes: 3x9999; .*8x256.*{known}"):
        equal_shapes(base, rule=BudgetRule(tolerance=0.1, shapes=("3x9999",)))
