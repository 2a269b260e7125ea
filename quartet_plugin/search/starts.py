"""The first points of a study: the cost model's best guess on each axis, taken in turns.

A study may have ten trials, so it begins with what differs most from the user's own configuration and is
estimated to be fast: the balanced split, other layouts and schedules, other mappings, other shapes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from quartet_plugin.cost.estimate import layer_weights
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.search.schedules import STOCK_NAMES
from quartet_plugin.search.space import SPLIT_HEAD, Params, Space, degree_label, optimizer_label, shape_label

MAX_CANDIDATES = 256
MAX_OWN_LAYOUTS = 3


class _Guess:
    """Chooses shape, layout, schedule and order of ranks as told, and the balanced split for them."""

    def __init__(
        self, shape: ModelShape, layout: Layout, *, schedule: str | None = None, order: str | None = None
    ) -> None:
        self._shape = shape
        self._layout = layout
        self._schedule = schedule
        self._order = order
        self.params: dict[str, str | int | float] = {}

    def category(self, name: str, choices: Sequence[str]) -> str:
        kind = name.partition("[")[0].partition(".")[0]
        wishes = {
            "shape": shape_label(self._shape),
            "layout": degree_label(self._layout),
            "micro_batch_size": str(self._layout.micro_batch_size),
            "optimizer": optimizer_label(self._layout),
            "schedule": self._schedule,
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
    if num < 1:
        return []
    found: dict[str, Params] = {}
    for wish in _in_turns(space):
        guess = wish.guess()
        plan = space.decode(guess, trial=0)
        if plan.key != space.baseline.key:
            found.setdefault(plan.key, guess.params)
        if len(found) >= num:
            break
    return list(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """A point to start from; None takes the framework's own schedule, or the launcher's order of ranks."""

    shape: ModelShape
    layout: Layout
    schedule: str | None = None
    order: str | None = None

    def guess(self) -> _Guess:
        return _Guess(self.shape, self.layout, schedule=self.schedule, order=self.order)


def _in_turns(space: Space) -> Iterator[_Wish]:
    shape = space.shapes[0]
    home = _home(space, shape)
    yield _Wish(shape=shape, layout=home)
    by_cost = _by_cost(space, shape, without=home)
    axes: list[Iterable[_Wish]] = [
        [_Wish(shape=shape, layout=layout) for layout in by_cost],
        _own_by_cost(space, shape, layouts=[home, *by_cost]),
        [_Wish(shape=shape, layout=home, order=order.name) for order in space.orders_of(home)[1:]],
        [_Wish(shape=other, layout=_home(space, other)) for other in space.shapes[1:]],
        [_Wish(shape=shape, layout=layout) for layout in _sizes(space, shape, home)],
    ]
    for wishes in zip_longest(*axes):
        yield from (wish for wish in wishes if wish is not None)


def _own_by_cost(space: Space, shape: ModelShape, *, layouts: Sequence[Layout]) -> list[_Wish]:
    """The schedules of ours on the first few layouts that have some, the cheapest plan first."""
    having = [layout for layout in layouts if set(space.schedules_of(layout)) - set(STOCK_NAMES)]
    wishes = [
        _Wish(shape=shape, layout=layout, schedule=name)
        for layout in having[:MAX_OWN_LAYOUTS]
        for name in space.schedules_of(layout)
        if name not in STOCK_NAMES
    ]
    costs = [(_cost(space.decode(wish.guess(), trial=0)), at) for at, wish in enumerate(wishes)]
    return [wishes[at] for _, at in sorted(costs)]


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
