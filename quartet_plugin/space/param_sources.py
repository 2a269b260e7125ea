"""Sources of the parameters of a plan: recorded ones, chance, or a plan that is encoded."""

import random
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Mapping as MappingABC
from functools import lru_cache
from typing import Protocol

from quartet_plugin.mapping.orders import RankOrder
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan
from quartet_plugin.space.config import SEARCHED
from quartet_plugin.space.schedules import end_load_candidates
from quartet_plugin.split.layers import EndLoads, end_loads_for_split

type Params = MappingABC[str, str | int | float]
type OrdersOf = Callable[[Layout], Sequence[RankOrder]]

SPLIT_EMBEDDING = "split.embedding"
SPLIT_HEAD = "split.head"


class ParamSource(Protocol):
    """The source of one plan's parameters: a sampler, a recorded point, or chance."""

    def category(self, name: str, choices: Sequence[str]) -> str:
        """One of `choices`, of which there are at least two."""

    def unit_float(self, name: str) -> float:
        """A number from -1 to 1."""


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

    def unit_float(self, name: str) -> float:
        """The recorded number."""
        return float(self._params[name])


class RandomParams:
    """Random parameters, which are recorded."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self.params: dict[str, str | int | float] = {}

    def category(self, name: str, choices: Sequence[str]) -> str:
        """A choice, each equally likely."""
        self.params[name] = choice = self._generator.choice(list(choices))
        return choice

    def unit_float(self, name: str) -> float:
        """Any number from -1 to 1."""
        self.params[name] = number = self._generator.uniform(-1.0, 1.0)
        return number


class ParamEncoder:
    """The parameters that lead to `plan`, recorded as they are requested.

    `orders_of` returns the rank orders to choose from, `schedule` is the schedule's name in the space, `ends`
    the end loads where they are known.
    """

    def __init__(
        self, plan: Plan, *, orders_of: OrdersOf, schedule: str, ends: EndLoads | None = None
    ) -> None:
        self._plan = plan
        self._orders_of = orders_of
        self._schedule = schedule
        self._ends = ends
        self.params: dict[str, str | int | float] = {}

    def category(self, name: str, choices: Sequence[str]) -> str:
        """The plan's choice. KeyError is raised for one that the space does not have."""
        choice = self._choice(name)
        if choice not in choices:
            raise KeyError(name)
        self.params[name] = choice
        return choice

    def unit_float(self, name: str) -> float:
        """The end load that the split implies, over all layers. KeyError is raised where it implies none."""
        plan = self._plan
        if self._ends is None and plan.schedule.custom is None:
            self._ends = end_loads_for_split(
                plan.split.transformer_layers_per_stage,
                num_devices=plan.layout.pipeline_parallel,
                chunks=plan.layout.virtual_stages,
            )
        if self._ends is None:
            raise KeyError(name)
        load = self._ends.head if name == SPLIT_HEAD else self._ends.embedding
        value = load / plan.shape.num_layers
        if not -1.0 <= value <= 1.0:
            raise KeyError(name)
        self.params[name] = value
        return value

    def _choice(self, name: str) -> str:
        plan = self._plan
        kind = name.partition("[")[0].partition(".")[0]
        match kind:
            case "shape":
                return plan.shape.label
            case "layout":
                return degree_label(plan.layout)
            case "optimizer":
                return optimizer_label(plan.layout)
            case "reduce_bucket_size" | "allgather_bucket_size":
                return bucket_label(getattr(plan.layout, kind))
            case "micro_batch_size":
                return str(plan.layout.micro_batch_size)
            case "split":
                return plan.split.label
            case "schedule":
                return self._schedule
            case "group":
                return str(plan.schedule.group)
        orders = self._orders_of(plan.layout)
        return next((order.name for order in orders if order.mapping == plan.mapping), "")


def param_encoders(plan: Plan, *, orders_of: OrdersOf) -> Iterator[ParamEncoder]:
    """Encoders of `plan`, likely ones first.

    A custom schedule may come from a search, whatever its name; its end loads are guessed.
    """
    custom = plan.schedule.custom
    if custom is None:
        yield ParamEncoder(plan, orders_of=orders_of, schedule=plan.schedule.name)
        return
    for name in dict.fromkeys((custom.named or SEARCHED, SEARCHED)):
        for ends in (*end_load_candidates(plan), None):
            yield ParamEncoder(plan, orders_of=orders_of, schedule=name, ends=ends)


@lru_cache(maxsize=65_536)
def degree_label(layout: Layout) -> str:
    """The layout without its micro-batch."""
    label = layout.label.rpartition("mb")[0].strip()
    return label or "one"


def optimizer_label(layout: Layout) -> str:
    """`sharded` where the optimizer's state is sharded over the data-parallel processes, else `whole`."""
    return "sharded" if layout.distributed_optimizer else "whole"


def bucket_label(size: int | None) -> str:
    """A bucket's size; `own` where the plan keeps the size of the ds_config."""
    return "own" if size is None else str(size)
