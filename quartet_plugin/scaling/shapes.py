"""Axis 1: shapes of an equal budget around the user's own.

Depth is traded against width at an equal number of parameters or of FLOPs a sequence. The head's size,
the ratio of FFN to hidden size and the ratio of query heads to groups are kept; what is trained is another
model (class D), which is why nobody gets it without asking. The depth/width trade at a fixed budget is
the one of Kaplan et al. (2020, section 3.1) and Levine et al. (2020): loss depends weakly on it in a band.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.shape import ModelShape

Budget = Literal["parameters", "flops"]

MAX_LAYERS = 1024
_FFN_MULTIPLE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRule:
    """What an equal shape is.

    `tolerance` is the largest relative difference of the budget; `depth_width_band` the largest factor by
    which hidden_size / num_layers may differ from the user's; `max_shapes` includes the user's own.
    """

    budget: Budget = "parameters"
    tolerance: float = 0.02
    depth_width_band: float = 4.0
    max_shapes: int = 8

    def __post_init__(self) -> None:
        if self.budget not in ("parameters", "flops"):
            raise ConfigError(f"scaling.budget: {self.budget!r}; must be parameters or flops")
        if not 0 < self.tolerance <= 0.5:
            raise ConfigError(f"scaling.tolerance: {self.tolerance}; must be over 0 and at most 0.5")
        if not 1 <= self.depth_width_band <= 64:
            raise ConfigError(f"scaling.depth_width_band: {self.depth_width_band}; must be from 1 to 64")
        if self.max_shapes < 1:
            raise ConfigError(f"scaling.max_shapes: {self.max_shapes}; must be at least 1")


def budget_of(shape: ModelShape, *, budget: Budget) -> int:
    """The budgeted quantity: weights, or FLOPs of forward and backward over one sequence."""
    return shape.num_parameters if budget == "parameters" else shape.model_flops_per_sequence


def depth_width_ratio(shape: ModelShape) -> float:
    """hidden_size / num_layers."""
    return shape.hidden_size / shape.num_layers


def equal_shapes(base: ModelShape, *, rule: BudgetRule) -> tuple[ModelShape, ...]:
    """`base` first, then the other shapes `rule` allows, by how little their proportions differ.

    Deterministic. Of shapes with one width only the layer count nearest to the budget is kept, and of two
    shapes equally far the shallower one comes first. Where the granularity of layers and heads leaves
    nothing inside the tolerance, `base` is alone.
    """
    found: list[tuple[float, int, ModelShape]] = []
    limit = math.log(rule.depth_width_band) + 1e-9
    for hidden_size in _widths(base, rule=rule):
        shape = _of_width(base, hidden_size=hidden_size, rule=rule)
        if shape is None or shape == base:
            continue
        distance = abs(math.log(depth_width_ratio(shape) / depth_width_ratio(base)))
        if distance <= limit:
            found.append((distance, shape.num_layers, shape))
    found.sort(key=lambda entry: entry[:2])
    return (base, *_spread([shape for _, _, shape in found], num=rule.max_shapes - 1))


def _spread(shapes: list[ModelShape], *, num: int) -> list[ModelShape]:
    """`num` of `shapes`, evenly over their order: the band's edges matter as much as its middle."""
    if len(shapes) <= num:
        return shapes
    if num <= 1:
        return shapes[:num]
    return [shapes[round(at * (len(shapes) - 1) / (num - 1))] for at in range(num)]


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
    step = math.lcm(step, 8)
    # width^2 x depth is about constant, so width / depth over a band needs its cube root in width;
    # the embedding's share makes it more, up to the square root.
    reach = math.sqrt(rule.depth_width_band)
    low = max(step, math.floor(base.hidden_size / reach / step) * step)
    high = min(math.ceil(base.hidden_size * reach / step) * step, low + 4096 * step)
    return range(low, high + 1, step)


def _of_width(base: ModelShape, *, hidden_size: int, rule: BudgetRule) -> ModelShape | None:
    """The shape of that width whose budget is nearest to the base's; None where none is near enough."""
    scaled = _scaled(base, hidden_size=hidden_size)
    if scaled is None:
        return None
    target = budget_of(base, budget=rule.budget)
    one = budget_of(replace(scaled, num_layers=1), budget=rule.budget)
    per_layer = budget_of(replace(scaled, num_layers=2), budget=rule.budget) - one
    layers = (target - (one - per_layer)) / per_layer
    best: tuple[float, ModelShape] | None = None
    for num_layers in (math.floor(layers), math.ceil(layers)):
        if not 1 <= num_layers <= MAX_LAYERS:
            continue
        shape = replace(scaled, num_layers=num_layers)
        error = abs(budget_of(shape, budget=rule.budget) - target) / target
        if error <= rule.tolerance and (best is None or error < best[0]):
            best = (error, shape)
    return None if best is None else best[1]


def _scaled(base: ModelShape, *, hidden_size: int) -> ModelShape | None:
    """`base` at another width: more heads of the same size, the FFN in the same ratio."""
    heads = Fraction(base.num_attention_heads * hidden_size, base.hidden_size)
    ffn_hidden_size = _scaled_ffn(base, hidden_size=hidden_size)
    if heads.denominator != 1 or heads < 1:
        return None
    num_heads = int(heads)
    if base.num_query_groups in (1, base.num_attention_heads):
        groups = Fraction(1 if base.num_query_groups == 1 else num_heads)
    else:
        groups = Fraction(base.num_query_groups * num_heads, base.num_attention_heads)
    if base.num_attention_heads == 1:
        groups = Fraction(num_heads)
    if groups.denominator != 1 or num_heads % int(groups):
        return None
    return replace(
        base,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        num_attention_heads=num_heads,
        num_query_groups=int(groups),
    )


def _scaled_ffn(base: ModelShape, *, hidden_size: int) -> int:
    """The FFN's size in the same ratio; a broken ratio (8/3) is rounded as coarsely as the base's own was."""
    exact = Fraction(base.ffn_hidden_size * hidden_size, base.hidden_size)
    if exact.denominator == 1:
        return int(exact)
    multiple = math.gcd(base.ffn_hidden_size, _FFN_MULTIPLE * 8)
    return max(multiple, round(exact / multiple) * multiple)
