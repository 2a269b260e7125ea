"""The plans of a space that are worth predicting: every choice of a small space, the best of a large one.

Choices are enumerated as the space makes them, so that whatever it can choose is here too. First every layout
once, then, of the layouts that are predicted to be fastest, every other choice; the numbers that trade the
ends of a pipeline against its middle are those that the ranker's constants make optimal, and some around.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from quartet_plugin.calibration.predictor import identity
from quartet_plugin.cost.iteration import StageLoads
from quartet_plugin.model.canonical import derived_seed
from quartet_plugin.model.plan import Plan
from quartet_plugin.space.config import SEARCHED, STOCK_NAMES
from quartet_plugin.space.param_sources import SPLIT_EMBEDDING, SPLIT_HEAD, FixedParams, Params
from quartet_plugin.space.plan_space import Space
from quartet_plugin.split.layers import EndLoads, end_loads_with_slowdowns, flops_end_loads

# Layouts that are predicted at all, and where none has a schedule of the framework's own; layouts whose other
# choices are enumerated, and how many choices in all.
MAX_LAYOUTS, MAX_LAYOUTS_CUSTOM = 400, 24
MAX_OPENED = 24
MAX_CHOICES = 2400
# Layouts for which schedules of ours are made (each takes some tenths of a second), and choices whose splits
# are varied.
MAX_CUSTOM_LAYOUTS = 3
MAX_VARIED, MAX_VARIED_CUSTOM = 12, 3
# End weights are rounded to this part of a layer, to whole ones where an order is searched for them: what was
# made once is not made again.
QUANTUM = 0.25
_STEPS = (-2.0, -1.0, 0.0, 1.0, 2.0)
_AROUND = tuple((more, most) for more in _STEPS for most in _STEPS)
_AROUND_CUSTOM = ((0.0, -1.0), (0.0, 1.0), (-1.0, 0.0), (1.0, 0.0))
_LAYOUT_KINDS = ("shape", "layout", "micro_batch_size", "optimizer")

# Predicted seconds for equal work, for ordering; what a plan's ends weigh; whether it can be predicted.
Rate = Callable[[Sequence[Plan]], list[float]]
EndsOf = Callable[[Plan], StageLoads]
Knows = Callable[[Plan], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A legal plan and the choices that lead to it; `path` are the choices' places, for going on from it."""

    params: Params
    plan: Plan
    path: tuple[int, ...]
    names: tuple[str, ...]


class PlanCandidates:
    """The candidates of a space; what does not depend on predictions is made once."""

    def __init__(self, space: Space, *, knows: Knows) -> None:
        self._space = space
        self._knows = knows
        self._layouts: tuple[Candidate, ...] | None = None
        self._opened: dict[tuple[int, ...], tuple[Candidate, ...]] = {}

    def best(self, *, rate: Rate, ends_of: EndsOf) -> list[Candidate]:
        """Distinct plans, the baseline among them where the space holds it; the same for the same answers."""
        layouts = _in_order(self.layouts, rate)
        opened = [
            self._balanced(one, ends_of) for layout in layouts[:MAX_OPENED] for one in self._open(layout)
        ]
        own = [
            self._balanced(one, ends_of)
            for layout in self._with_custom(layouts)[:MAX_CUSTOM_LAYOUTS]
            for one in self._open_custom(layout)
        ]
        found = self._allowed(self._distinct([*layouts, *opened, *own]))
        ranked = _in_order(found, rate)
        stock = [one for one in ranked if one.plan.schedule.custom is None][:MAX_VARIED]
        ours = [one for one in ranked if one.plan.schedule.custom is not None and not _is_searched(one)]
        varied = [
            other
            for chosen, around in ((stock, _AROUND), (ours[:MAX_VARIED_CUSTOM], _AROUND_CUSTOM))
            for one in chosen
            for other in self._varied(one, ends_of, around=around)
        ]
        return self._allowed(self._distinct([*found, *varied]))

    @property
    def layouts(self) -> tuple[Candidate, ...]:
        """Every layout of every shape once, else as the space has it by default; of many, some by chance."""
        if self._layouts is None:
            asked = self._space.search.schedule
            is_stock = asked is None or bool({"stock", *STOCK_NAMES} & set(asked))
            most = MAX_LAYOUTS if is_stock else MAX_LAYOUTS_CUSTOM
            found = tuple(self._branches((), kinds=_LAYOUT_KINDS, limit=4 * most))
            if len(found) > most:
                generator = random.Random(derived_seed(self._space.seed, 0, "layouts"))  # noqa: S311
                found = tuple(generator.sample(found, most))
            self._layouts = tuple(self._distinct(found))
        return self._layouts

    def _open(self, layout: Candidate) -> tuple[Candidate, ...]:
        """Every other choice for a layout, schedules of ours left out."""
        path = layout.path[: _num_of_layout(layout)]
        if path not in self._opened:
            limit = MAX_CHOICES // min(len(self.layouts), MAX_OPENED)
            self._opened[path] = tuple(self._branches(path, kinds=None, limit=limit))
        return self._opened[path]

    def _distinct(self, found: Iterable[Candidate]) -> list[Candidate]:
        """Each plan once, as it was first found; those that cannot be predicted left out."""
        kept: dict[object, Candidate] = {}
        for one in found:
            kept.setdefault(identity(one.plan), one)
        return [one for one in kept.values() if self._knows(one.plan)]

    def _allowed(self, found: Sequence[Candidate]) -> list[Candidate]:
        return [one for one in found if self._space.refusal_of(one.plan) is None]

    def _with_custom(self, layouts: Sequence[Candidate]) -> list[Candidate]:
        return [one for one in layouts if self._custom_names(one)]

    def _custom_names(self, layout: Candidate) -> list[str]:
        names = self._space.schedules_of(layout.plan.layout)
        return [name for name in names if name not in STOCK_NAMES]

    def _open_custom(self, layout: Candidate) -> Iterator[Candidate]:
        """Every other choice for a layout with each schedule of ours."""
        num = _num_of_layout(layout)
        names = self._space.schedules_of(layout.plan.layout)
        for at, name in enumerate(names):
            if name not in STOCK_NAMES:
                path = (*layout.path[:num], at) if len(names) > 1 else layout.path[:num]
                yield from self._branches(path, kinds=None, limit=MAX_CHOICES // MAX_OPENED)

    def _branches(
        self, path: tuple[int, ...], *, kinds: Sequence[str] | None, limit: int
    ) -> Iterator[Candidate]:
        """All choices that begin with `path`, those of `kinds` alone varied, schedules of ours only where
        they are the path's."""
        waiting, num = [path], 0
        while waiting and num < limit:
            begun = waiting.pop()
            chooser = _PathParams(begun, space=self._space)
            try:
                plan = self._space.decode(chooser, trial=0)
            except KeyError:
                continue
            num += 1
            yield Candidate(
                params=chooser.params, plan=plan, path=tuple(chooser.path), names=tuple(chooser.names)
            )
            for at in range(len(begun), len(chooser.path)):
                if kinds is None or _kind(chooser.names[at]) in kinds:
                    before = tuple(chooser.path[:at])
                    waiting += [(*before, other) for other in chooser.others(at)]

    def _balanced(self, one: Candidate, ends_of: EndsOf) -> Candidate:
        """The choice with the ends that the ranker's constants balance."""
        if SPLIT_HEAD not in one.params:
            return one
        ends = _balancing(one.plan, ends_of)
        return self._with_ends(one, ends.embedding, ends.head)

    def _varied(
        self, one: Candidate, ends_of: EndsOf, *, around: Sequence[tuple[float, float]]
    ) -> Iterator[Candidate]:
        """The choice with ends around the balanced ones."""
        if SPLIT_HEAD not in one.params:
            return
        ends = _balancing(one.plan, ends_of)
        for embedding, head in around:
            yield self._with_ends(one, ends.embedding + embedding, ends.head + head)

    def _with_ends(self, one: Candidate, first: float, last: float) -> Candidate:
        layers, quantum = one.plan.shape.num_layers, 1.0 if _is_searched(one) else QUANTUM
        params = {
            **one.params,
            SPLIT_EMBEDDING: _share(first, layers, quantum=quantum),
            SPLIT_HEAD: _share(last, layers, quantum=quantum),
        }
        plan = self._space.decode(FixedParams(params), trial=0)
        return Candidate(params=params, plan=plan, path=one.path, names=one.names)


class _PathParams:
    """Takes the choices of a path, then the first ones; ends weigh what their FLOPs say."""

    def __init__(self, path: Sequence[int], *, space: Space) -> None:
        self._begun = tuple(path)
        self._shape = space.shapes[0]
        self._choices: list[list[int]] = []
        self.path: list[int] = []
        self.names: list[str] = []
        self.params: dict[str, str | int | float] = {}

    def category(self, name: str, choices: Sequence[str]) -> str:
        allowed = [
            at for at, choice in enumerate(choices) if _kind(name) != "schedule" or choice in STOCK_NAMES
        ]
        allowed = allowed or [0]
        depth = len(self.path)
        at = self._begun[depth] if depth < len(self._begun) else allowed[0]
        if at >= len(choices):
            raise KeyError(name)
        self.path.append(at)
        self.names.append(name)
        self._choices.append(allowed)
        self.params[name] = choices[at]
        return choices[at]

    def unit_float(self, name: str) -> float:
        weights = flops_end_loads(self._shape)
        layers = weights.head if name == SPLIT_HEAD else weights.embedding
        self.params[name] = weight = _share(layers, self._shape.num_layers)
        return weight

    def others(self, at: int) -> list[int]:
        """What else could have been chosen there, the last first: it is tried last."""
        return [one for one in reversed(self._choices[at]) if one != self.path[at]]


def _kind(name: str) -> str:
    return name.partition("[")[0].partition(".")[0]


def _num_of_layout(one: Candidate) -> int:
    """How many of its choices make the shape and the layout: they come first."""
    return sum(_kind(name) in _LAYOUT_KINDS for name in one.names)


def _balancing(plan: Plan, ends_of: EndsOf) -> EndLoads:
    """The end loads that balance the plan's stages by the predictor's coefficients."""
    loads = ends_of(plan)
    ends = EndLoads(embedding=loads.embedding, head=loads.head)
    return end_loads_with_slowdowns(ends, slowdowns=loads.paces, num_layers=plan.shape.num_layers)


def _is_searched(one: Candidate) -> bool:
    return any(_kind(name) == "schedule" and one.params[name] == SEARCHED for name in one.names)


def _share(layers: float, num_layers: int, *, quantum: float = QUANTUM) -> float:
    rounded = round(layers / quantum) * quantum
    return min(1.0, max(-1.0, rounded / num_layers))


def _in_order(found: Iterable[Candidate], rate: Rate) -> list[Candidate]:
    """The fastest first."""
    every = list(found)
    rates = rate([one.plan for one in every])
    return [every[at] for at in sorted(range(len(every)), key=lambda at: (rates[at], at))]
