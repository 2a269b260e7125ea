"""Axis 1: shapes of an equal budget around the user's own.

Depth is traded against width at an equal number of parameters or of FLOPs a sequence. The ratio of FFN to
hidden size, the ratio of query heads to groups and the head's size are kept unless others are named. The
result is another model (class D), so it is tried only on request.

The band of hidden_size / num_layers limits how far depth is traded. Kaplan et al. (2020, arXiv 2001.08361,
section 3.1) found loss at a fixed number of parameters nearly flat in that ratio: 6 layers of 4288 come
within 3 % of 48 layers of 1600, a factor of 21 in the ratio. Levine et al. (2020, arXiv 2006.12467) found a
best depth that grows with the logarithm of the width. The default band, a factor of 4 to either side of the
user's own ratio, stays well inside what the first measured as flat.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.shape import ModelShape

Budget = Literal["parameters", "flops"]

MAX_LAYERS = 1024
_MIN_FFN_RATIO, _MAX_FFN_RATIO = 0.5, 16.0
# Sizes of matrix products are kept multiples of this where the user's own are.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRule:
    """The rule by which a shape counts as equal to the base.

    `tolerance` is the largest relative difference of the budget; `depth_width_band` the largest factor by
    which hidden_size / num_layers may differ from the user's; `max_shapes` includes the user's own.
    `head_sizes` are tried beside the user's own head size: more, smaller heads or fewer, larger ones.
    `ffn_ratios` are tried beside the user's own ratio of FFN to hidden size, `query_groups` beside the user's
    own ratio of heads to groups; each of them is a number of groups that every width has.
    `shapes` are the requested labels (`24x2048`), None: shapes spread over the band.
    """

    budget: Budget = "parameters"
    tolerance: float = 0.02
    depth_width_band: float = 4.0
    max_shapes: int = 8
    head_sizes: tuple[int, ...] = ()
    ffn_ratios: tuple[float, ...] = ()
    query_groups: tuple[int, ...] = ()
    shapes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.budget not in ("parameters", "flops"):
            raise ConfigError(f"scaling.budget: {self.budget!r}; must be parameters or flops")
        if not 0 < self.tolerance <= 0.5:
            raise ConfigError(f"scaling.tolerance: {self.tolerance}; must be over 0 and at most 0.5")
        if not 1 <= self.depth_width_band <= 64:
            raise ConfigError(f"scaling.depth_width_band: {self.depth_width_band}; must be from 1 to 64")
        if self.max_shapes < 1:
            raise ConfigError(f"scaling.max_shapes: {self.max_shapes}; must be at least 1")
        for size in self.head_sizes:
            if not 8 <= size <= 1024 or size % 8:
                raise ConfigError(f"scaling.head_sizes: {size}; must be a multiple of 8 from 8 to 1024")
        for ratio in self.ffn_ratios:
            if not _MIN_FFN_RATIO <= ratio <= _MAX_FFN_RATIO:
                raise ConfigError(
                    f"scaling.ffn_ratios: {ratio:g}; must be from {_MIN_FFN_RATIO:g} to {_MAX_FFN_RATIO:g}"
                )

    def check_proportions(self, base: ModelShape) -> None:
        """Raises ConfigError for a head size or a number of groups that does not divide the model's."""
        heads, width = base.num_attention_heads, base.attention_size
        for size in self.head_sizes:
            if width % size:
                raise ConfigError(
                    f"search.scaling.head_sizes: {size}; must divide the width of all heads ({width})"
                    f"{_nearest(size, [8 * n for n in range(1, 129) if width % (8 * n) == 0])}"
                )
        for groups in self.query_groups:
            if heads % groups:
                raise ConfigError(
                    f"search.scaling.query_groups: {groups}; must divide the {heads} attention heads"
                    f"{_nearest(groups, [n for n in range(1, heads + 1) if heads % n == 0])}"
                )


def _nearest(value: int, legal: Sequence[int]) -> str:
    """`; take 4 or 8`: the legal values next to one."""
    below, above = [n for n in legal if n < value][-1:], [n for n in legal if n > value][:1]
    return f"; take {' or '.join(map(str, [*below, *above]))}" if below or above else ""


def budget_of(shape: ModelShape, *, budget: Budget) -> int:
    """The budgeted quantity: weights, or FLOPs of forward and backward over one sequence."""
    return shape.num_parameters if budget == "parameters" else shape.model_flops_per_sequence


def depth_width_ratio(shape: ModelShape) -> float:
    """hidden_size / num_layers."""
    return shape.hidden_size / shape.num_layers


def equal_shapes(base: ModelShape, *, rule: BudgetRule) -> tuple[ModelShape, ...]:
    """`base` first, then the other shapes that `rule` allows, in the order of their distance in proportions.

    Requested shapes replace these, in their order; raises ConfigError for one that is not equal. Of shapes
    with one width and the same proportions only the layer count nearest to the budget is kept, and of two
    shapes equally far the shallower comes first. Where the granularity of layers and heads leaves nothing
    inside the tolerance, `base` is alone.
    """
    ranked: list[tuple[float, int, int, ModelShape]] = []
    limit = math.log(rule.depth_width_band) + 1e-9
    known = {base}
    variants = [
        (ffn, groups)
        for headed in (base, *_other_heads(base, rule=rule))
        for ffn in (headed, *_other_ffns(headed, rule=rule))
        for groups in (None, *rule.query_groups)
    ]
    for index, (variant, groups) in enumerate(variants):
        for hidden_size in _widths(variant, rule=rule):
            shape = _of_width(variant, hidden_size=hidden_size, groups=groups, target=base, rule=rule)
            if shape is None or shape in known:
                continue
            known.add(shape)
            distance = abs(math.log(depth_width_ratio(shape) / depth_width_ratio(base)))
            if distance <= limit:
                ranked.append((distance, shape.num_layers, index, shape))
    ranked.sort(key=lambda entry: entry[:3])
    others = [entry[3] for entry in ranked]
    if rule.shapes is not None:
        return _labelled((base, *others), rule=rule, labels=rule.shapes)
    return (base, *_spread(others, num=rule.max_shapes - 1))


def _labelled(
    known: Sequence[ModelShape], *, rule: BudgetRule, labels: Sequence[str]
) -> tuple[ModelShape, ...]:
    for label in labels:
        if not any(shape.label == label for shape in known):
            listed = ", ".join(dict.fromkeys(shape.label for shape in known))
            raise ConfigError(
                f"scaling.shapes: {label}; no shape of as many {rule.budget} within {rule.tolerance:g} and "
                f"the band of {rule.depth_width_band:g}; there are {listed}"
            )
    return tuple(shape for label in labels for shape in known if shape.label == label)


def _other_heads(base: ModelShape, *, rule: BudgetRule) -> list[ModelShape]:
    """`base` with its heads cut to the rule's other sizes, all of them together as wide as before."""
    shapes = []
    for size in rule.head_sizes:
        heads, rest = divmod(base.attention_size, size)
        if size == base.kv_channels or rest:
            continue
        groups = Fraction(base.num_query_groups * heads, base.num_attention_heads)
        if base.num_query_groups == 1:
            groups = Fraction(1)
        if groups >= 1 and groups.denominator == 1 and heads % int(groups) == 0:
            shapes.append(
                replace(base, num_attention_heads=heads, num_query_groups=int(groups), kv_channels=size)
            )
    return shapes


def _other_ffns(base: ModelShape, *, rule: BudgetRule) -> list[ModelShape]:
    """`base` with FFNs in the rule's other ratios, rounded as coarsely as its own."""
    multiple = math.gcd(base.ffn_hidden_size, 2 * _ALIGNMENT)
    sizes = (max(1, round(ratio * base.hidden_size / multiple)) * multiple for ratio in rule.ffn_ratios)
    return [replace(base, ffn_hidden_size=size) for size in sizes if size != base.ffn_hidden_size]


def _spread(shapes: list[ModelShape], *, num: int) -> list[ModelShape]:
    """`num` of `shapes`, evenly over their order: the band's edges matter as much as its middle."""
    if len(shapes) <= num:
        return shapes
    if num <= 1:
        return shapes[:num]
    return [shapes[round(index * (len(shapes) - 1) / (num - 1))] for index in range(num)]


def _widths(base: ModelShape, *, rule: BudgetRule) -> range:
    """Hidden sizes to try: whole groups of heads of the user's size, and as even a count as the user's.

    A model with many heads keeps a count that tensor parallelism can divide: a multiple of 2, 4 or 8.
    """
    per_head = Fraction(base.hidden_size, base.num_attention_heads)
    if per_head.denominator != 1:
        step = base.hidden_size
    else:
        even = next(
            (m for m in (8, 4, 2) if base.num_attention_heads >= 4 * m and base.num_attention_heads % m == 0),
            1,
        )
        per_group = base.num_attention_heads // base.num_query_groups
        step = int(per_head) * math.lcm(even, 1 if base.num_query_groups == 1 else per_group)
    # Of a narrow model the alignment would leave next to no widths.
    aligned = math.gcd(base.hidden_size, _ALIGNMENT) if base.hidden_size >= 16 * _ALIGNMENT else 1
    step = math.lcm(step, aligned, 8)
    # width^2 x depth is about constant, so width / depth over a band needs its cube root in width;
    # the embedding's share makes it more, up to the square root.
    reach = math.sqrt(rule.depth_width_band)
    low = max(step, math.floor(base.hidden_size / reach / step) * step)
    high = min(math.ceil(base.hidden_size * reach / step) * step, low + 4096 * step)
    return range(low, high + 1, step)


def _of_width(
    base: ModelShape, *, hidden_size: int, groups: int | None, target: ModelShape, rule: BudgetRule
) -> ModelShape | None:
    """`base` at that width, of the depth nearest to the budget of `target`; None where none is near."""
    scaled = _scaled(base, hidden_size=hidden_size, groups=groups)
    if scaled is None:
        return None
    budget = budget_of(target, budget=rule.budget)
    one_layer = budget_of(replace(scaled, num_layers=1), budget=rule.budget)
    per_layer = budget_of(replace(scaled, num_layers=2), budget=rule.budget) - one_layer
    layers = (budget - (one_layer - per_layer)) / per_layer
    best: tuple[float, ModelShape] | None = None
    for num_layers in (math.floor(layers), math.ceil(layers)):
        if not 1 <= num_layers <= MAX_LAYERS:
            continue
        shape = replace(scaled, num_layers=num_layers)
        error = abs(budget_of(shape, budget=rule.budget) - budget) / budget
        if error <= rule.tolerance and (best is None or error < best[0]):
            best = (error, shape)
    return None if best is None else best[1]


def _scaled(base: ModelShape, *, hidden_size: int, groups: int | None) -> ModelShape | None:
    """`base` at another width: more heads of the same size, the FFN in the same ratio.

    Query groups are in the same ratio to heads, or `groups`.
    """
    heads = Fraction(base.num_attention_heads * hidden_size, base.hidden_size)
    if heads.denominator != 1 or heads < 1:
        return None
    num_groups = base.num_groups_of(int(heads)) if groups is None else Fraction(groups)
    if num_groups.denominator != 1 or heads % num_groups:
        return None
    return replace(
        base,
        hidden_size=hidden_size,
        ffn_hidden_size=base.ffn_size_at(hidden_size),
        num_attention_heads=int(heads),
        num_query_groups=int(num_groups),
    )
