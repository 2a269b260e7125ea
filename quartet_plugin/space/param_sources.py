"""Sources of the parameters of a plan: recorded ones, chance, or a plan that is encoded."""

import random
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Mapping as MappingABC
from functools import lru_cache

from quartet_plugin.mapping.orders import RankOrder
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.space.config import SEARCHED
from quartet_plugin.space.knobs.knob import LayoutKnob
from quartet_plugin.space.knobs.mtp_stage import BEFORE_LAST, LAST
from quartet_plugin.space.knobs.registry import BEFORE_SCHEDULE, OPTIONS
from quartet_plugin.space.knobs.zero_stage import ZERO_STAGE
from quartet_plugin.space.order_exchanges import EXCHANGES, NO_RUN, RUN, EncodedOrder, encoded_order
from quartet_plugin.space.schedules import end_load_candidates
from quartet_plugin.space.searched_orders import ORDER, order_text
from quartet_plugin.space.split_shifts import (
    SHIFT,
    SPLIT_OF_TWO,
    Shifts,
    encoded_custom_split,
    encoded_shifts,
    encoded_split,
    shift_limit,
)
from quartet_plugin.split.layers import EndLoads

type Params = MappingABC[str, str | int | float]
type OrdersOf = Callable[[Layout], Sequence[RankOrder]]
type LengthsOf = Callable[[Layout], Sequence[int]]

SPLIT_EMBEDDING = "split.embedding"
SPLIT_HEAD = "split.head"
# The load of multi-token prediction on the stage before the last one, in place of the head's.
SPLIT_MTP = "split.mtp"


class FixedParams:
    """Recorded parameters. KeyError is raised for a parameter that was not recorded."""

    def __init__(self, params: Params) -> None:
        self._params = params

    def category(self, name: str, choices: Sequence[str]) -> str:
        """The recorded choice."""
        choice = str(self._params[name])
        if choice not in choices:
            raise KeyError(name)
        return choice

    def integer(self, name: str, low: int, high: int) -> int:
        """The recorded number."""
        number = int(self._params[name])
        if not low <= number <= high:
            raise KeyError(name)
        return number

    def unit_float(self, name: str) -> float:
        """The recorded number."""
        return float(self._params[name])

    def attribute(self, name: str) -> str | None:
        """The recorded text."""
        text = self._params.get(name)
        return None if text is None else str(text)


class RandomParams:
    """Random parameters, which are recorded."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self.params: dict[str, str | int | float] = {}

    def category(self, name: str, choices: Sequence[str]) -> str:
        """A choice, each equally likely."""
        self.params[name] = choice = self._generator.choice(list(choices))
        return choice

    def integer(self, name: str, low: int, high: int) -> int:
        """Any number of the range."""
        self.params[name] = number = self._generator.randint(low, high)
        return number

    def unit_float(self, name: str) -> float:
        """A number from -1 to 1, drawn uniformly."""
        self.params[name] = number = self._generator.uniform(-1.0, 1.0)
        return number

    def attribute(self, name: str) -> None:
        """None: chance writes no order."""


class ParamEncoder:
    """The parameters that lead to `plan`, recorded as they are requested.

    `order` is how the space makes the plan's mapping, None where it does not. `schedule` is the schedule's
    name in the space, `end_loads` is None where they are not known, `shifts` are those of the stage
    boundaries, None where none is shifted. `says_split`: a text says the split of two stages.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        order: EncodedOrder | None,
        schedule: str,
        end_loads: EndLoads | None = None,
        shifts: Shifts | None = None,
        says_split: bool = False,
    ) -> None:
        self._plan = plan
        self._order = order
        self._schedule = schedule
        self._end_loads = end_loads
        self._shifts = shifts
        self._says_split = says_split
        self.params: dict[str, str | int | float] = {}

    def category(self, name: str, choices: Sequence[str]) -> str:
        """The plan's choice. KeyError is raised for one that the space does not have."""
        choice = self._choice(name, choices)
        if choice not in choices:
            raise KeyError(name)
        self.params[name] = choice
        return choice

    def integer(self, name: str, low: int, high: int) -> int:
        """A shift of a stage boundary, or the position of a run that is exchanged."""
        number = self._number(name)
        if not low <= number <= high:
            raise KeyError(name)
        self.params[name] = number
        return number

    def unit_float(self, name: str) -> float:
        """The end load that the split implies, over all layers. KeyError is raised where it implies none."""
        if self._end_loads is None:
            raise KeyError(name)
        load = load_of(self._end_loads, name)
        value = load / self._plan.shape.num_layers
        if not -1.0 <= value <= 1.0:
            raise KeyError(name)
        self.params[name] = value
        return value

    def attribute(self, name: str) -> str | None:
        """The split of two stages, or the plan's order; None where the parameters alone lead to it."""
        custom, text = self._plan.schedule.custom, None
        if name == SPLIT_OF_TWO and self._says_split:
            text = self._plan.split.label
        elif name == ORDER and self._schedule == SEARCHED and custom is not None:
            text = order_text(custom)
        if text is not None:
            self.params[name] = text
        return text

    def _number(self, name: str) -> int:
        axis, index, *which = name.partition("[")[0].split(".")
        if axis == "split":
            assert self._shifts is not None
            return self._shifts[int(index) - 1]
        assert self._order is not None
        pairs = self._order.pairs
        # More exchanges than there are: of the first run with itself.
        return pairs[int(index)][which == ["second"]] if int(index) < len(pairs) else 0

    def _choice(self, name: str, choices: Sequence[str]) -> str:
        plan = self._plan
        stem = name.partition("[")[0]
        if stem == SHIFT:
            return shift_limit(self._shifts, choices)
        kind = stem.partition(".")[0]
        match kind:
            case "shape":
                return plan.shape_label
            case "layout":
                return degree_label(plan.layout)
            case "mtp_stage":
                return BEFORE_LAST if plan.split.mtp_before_last else LAST
            case "split":
                return plan.split.label
            case "schedule":
                return self._schedule
            case "group":
                return str(plan.schedule.group)
            case "mapping":
                return self._order_choice(stem, choices)
        knob = next(knob for knob in (*BEFORE_SCHEDULE, *OPTIONS) if param_prefix(knob) == kind)
        return param_text(knob, plan.layout)

    def _order_choice(self, stem: str, choices: Sequence[str]) -> str:
        order = self._order
        if order is None:
            return ""
        if stem == RUN:
            return NO_RUN if order.length is None else str(order.length)
        if stem == EXCHANGES:
            return next(choice for choice in choices if int(choice) >= len(order.pairs))
        return order.name


def load_of(end_loads: EndLoads, name: str) -> float:
    """The end load of a parameter. KeyError is raised for one that these loads do not have."""
    loads = {SPLIT_EMBEDDING: end_loads.embedding, SPLIT_HEAD: end_loads.head, SPLIT_MTP: end_loads.mtp}
    load = loads[name]
    if load is None:
        raise KeyError(name)
    return load


def param_encoders(
    plan: Plan, *, orders_of: OrdersOf, lengths_of: LengthsOf, written: Sequence[str] = ()
) -> Iterator[ParamEncoder]:
    """Encoders of `plan`, likely ones first.

    `orders_of` returns the rank orders to choose from, `lengths_of` the lengths of the runs to exchange. The
    end loads of a named custom schedule are guessed. Whatever its name, a custom schedule may come from one
    of the files named in `written`, or from a search: then its order is kept whole.
    """
    layout, custom = plan.layout, plan.schedule.custom
    order = encoded_order(plan.mapping, orders=orders_of(layout), lengths=lengths_of(layout))
    if custom is None:
        end_loads, shifts = encoded_split(plan)
        yield ParamEncoder(plan, order=order, schedule=plan.schedule.name, end_loads=end_loads, shifts=shifts)
        return
    is_of_two = layout.num_stages == 2
    if custom.named is not None:
        guesses = end_load_candidates(plan)
        for guess in (*guesses, None):
            yield ParamEncoder(plan, order=order, schedule=custom.named, end_loads=guess)
        for guess in guesses:
            yield ParamEncoder(
                plan,
                order=order,
                schedule=custom.named,
                end_loads=guess,
                shifts=None if is_of_two else encoded_shifts(plan, schedule=custom.named, end_loads=guess),
                says_split=is_of_two,
            )
    for name in written:
        yield ParamEncoder(plan, order=order, schedule=name)
    balanced, shifts = encoded_custom_split(plan, schedule=SEARCHED)
    yield ParamEncoder(
        plan,
        order=order,
        schedule=SEARCHED,
        end_loads=balanced,
        shifts=shifts,
        says_split=is_of_two,
    )


@lru_cache(maxsize=65_536)
def degree_label(layout: Layout) -> str:
    """The layout without its micro-batch."""
    label = layout.label.rpartition("mb")[0].strip()
    return label or "one"


def param_prefix(knob: LayoutKnob) -> str:
    """The part of the parameter's name before its choices."""
    return "optimizer" if knob is ZERO_STAGE else knob.name


def param_name(knob: LayoutKnob, texts: Sequence[str]) -> str:
    """The study's parameter of a knob; where the choices depend on earlier ones they are part of the name."""
    return "optimizer" if knob is ZERO_STAGE else f"{knob.name}[{','.join(texts)}]"


def param_text(knob: LayoutKnob, layout: Layout) -> str:
    """A layout's choice of a knob: for the optimizer `sharded` or `whole`, else the value's text."""
    if knob is ZERO_STAGE:
        return "sharded" if layout.distributed_optimizer else "whole"
    return knob.text(knob.in_layout(layout))


def layout_texts(shape: ModelShape, layout: Layout, *, base: ModelShape) -> dict[str, str]:
    """The choices of a shape beside `base` and of a layout, by the kind in a parameter's name.

    Options that the layout does not have are left out.
    """
    options = (knob for knob in OPTIONS if knob.in_layout(layout) is not None)
    texts = {param_prefix(knob): param_text(knob, layout) for knob in (*BEFORE_SCHEDULE, *options)}
    return {"shape": shape.label_beside(base), **texts, "layout": degree_label(layout)}
