"""Who makes the choices of a plan: recorded parameters, chance, or a plan that is to be found again."""

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
    """Makes the choices of one plan: a sampler, a recorded point, or chance."""

    def category(self, name: str, choices: Sequence[str]) -> str:
        """One of `choices`, at least two."""

    def unit_float(self, name: str) -> float:
        """A number from -1 to 1."""


class FixedParams:
    """Repeats recorded parameters. A KeyError is a parameter that was not recorded."""

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
    """Chooses by chance, and records."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self.params: dict[str, str | int | float] = {}

    def category(self, name: str, choices: Sequence[str]) -> str:
        """Any choice, each as likely."""
        self.params[name] = choice = self._generator.choice(list(choices))
        return choice

    def unit_float(self, name: str) -> float:
        """Any number from -1 to 1."""
        self.params[name] = weight = self._generator.uniform(-1.0, 1.0)
        return weight


class ParamEncoder:
    """Chooses what leads to a given plan, and records it.

    `orders_of` names the rank orders to choose from, `schedule` is the schedule's name in the space, `ends`
    what the ends weigh where that is known.
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
        """The plan's own choice. A KeyError is one that the space does not have."""
        wanted = self._wanted(name)
        if wanted not in choices:
            raise KeyError(name)
        self.params[name] = wanted
        return wanted

    def unit_float(self, name: str) -> float:
        """The end load that the plan's split implies, over all layers. A KeyError is a split without one."""
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

    def _wanted(self, name: str) -> str:
        plan = self._plan
        kind = name.partition("[")[0].partition(".")[0]
        if kind == "shape":
            return plan.shape.label
        if kind == "layout":
            return degree_label(plan.layout)
        if kind == "micro_batch_size":
            return str(plan.layout.micro_batch_size)
        if kind == "optimizer":
            return optimizer_label(plan.layout)
        if kind in ("reduce_bucket_size", "allgather_bucket_size"):
            return bucket_label(getattr(plan.layout, kind))
        if kind == "split":
            return plan.split.label
        if kind == "schedule":
            return self._schedule
        if kind == "group":
            return str(plan.schedule.group)
        found = self._orders_of(plan.layout)
        return next((order.name for order in found if order.mapping == plan.mapping), "")


def param_encoders(plan: Plan, *, orders_of: OrdersOf) -> Iterator[ParamEncoder]:
    """Recorders of `plan`, likely ones first.

    A schedule of ours may have been found by searching, whatever its name; the ends are guessed.
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
    """Whether the optimizer's state is sharded over the data-parallel processes."""
    return "sharded" if layout.distributed_optimizer else "whole"


def bucket_label(size: int | None) -> str:
    """A bucket's size; the ds_config's own where the plan has none."""
    return "own" if size is None else str(size)
