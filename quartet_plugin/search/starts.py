"""The first points of a study: the cost model's best guess on each axis, taken in turns.

A study may have ten trials, so it begins with what differs most from the user's own configuration and is
estimated to be fast: the balanced split, other layouts and schedules, other mappings, other shapes.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from quartet_plugin.cost.estimate import layer_weights
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.search.space import SPLIT_HEAD, Params, Space, degree_label, optimizer_label, shape_label

MAX_CANDIDATES = 256


class _Guess:
    """Chooses a shape, a layout and an order of ranks as told, and the balanced split for them."""

    def __init__(self, shape: ModelShape, layout: Layout, *, order: str | None = None) -> None:
        self._shape = shape
        self._layout = layout
        self._order = order
        self.params: dict[str, str | int | float] = {}

    def category(self, name: str, choices: Sequence[str]) -> str:
        kind = name.partition("[")[0].partition(".")[0]
        wishes = {
            "shape": shape_label(self._shape),
            "layout": degree_label(self._layout),
            "micro_batch_size": str(self._layout.micro_batch_size),
            "optimizer": optimizer_label(self._layout),
            "mapping": self._order,
        }
        wished = wishes.get(kind)
        choice = wished if wished is not None and wished in choices else choices[0]
        self.params[name] = choice
        return choice

    def weight(self, name: str) -> float:
        weights = layer_weights(self._shape)
        layers = weights.head if name == SPLIT_HEAD else weights.embedding
        self.params[name] = weight = min(1.0, layers / self._shape.num_layers)
        return weight


def starting_points(space: Space, *, num: int) -> list[Params]:
    """At most `num` points, no two with one plan and none the baseline's; deterministic."""
    found: dict[str, Params] = {}
    for shape, layout, order in _in_turns(space):
        guess = _Guess(shape, layout, order=order)
        plan = space.decode(guess, trial=0)
        if plan.key != space.baseline.key:
            found.setdefault(plan.key, guess.params)
        if len(found) >= num:
            break
    return list(found.values())


type _Wish = tuple[ModelShape, Layout, str | None]


def _in_turns(space: Space) -> Iterator[_Wish]:
    shape = space.shapes[0]
    home = _home(space, shape)
    yield shape, home, None
    axes: list[Iterable[_Wish]] = [
        [(shape, layout, None) for layout in _by_cost(space, shape, without=home)],
        [(shape, home, order.name) for order in space.orders_of(home)[1:]],
        [(other, _home(space, other), None) for other in space.shapes[1:]],
        [(shape, layout, None) for layout in _sizes(space, shape, home)],
    ]
    for wishes in zip_longest(*axes):
        yield from (wish for wish in wishes if wish is not None)


def _home(space: Space, shape: ModelShape) -> Layout:
    """The user's own layout, or the cheapest one where that is not in the space."""
    layouts = space.layouts[shape]
    return space.job.layout if space.job.layout in layouts else _by_cost(space, shape)[0]


def _by_cost(space: Space, shape: ModelShape, *, without: Layout | None = None) -> list[Layout]:
    """The cheapest micro-batch of each set of degrees, the cheapest degrees first."""
    best: dict[str, tuple[float, int, Layout]] = {}
    for at, layout in enumerate(space.layouts[shape][:MAX_CANDIDATES]):
        label = degree_label(layout)
        if without is not None and label == degree_label(without):
            continue
        entry = (_cost(space.decode(_Guess(shape, layout), trial=0)), at, layout)
        best[label] = min(best.get(label, entry), entry, key=lambda e: e[:2])
    return [layout for _, _, layout in sorted(best.values(), key=lambda e: e[:2])]


def _sizes(space: Space, shape: ModelShape, home: Layout) -> list[Layout]:
    """The other micro-batches of the user's own degrees."""
    label = degree_label(home)
    return [layout for layout in space.layouts[shape] if degree_label(layout) == label and layout != home]


def _cost(plan: Plan) -> float:
    cost = plan.prediction.relative_cost if plan.prediction is not None else None
    assert cost is not None, "the space predicts every plan"
    return cost
