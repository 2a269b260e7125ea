"""The plans of a space that are worth predicting: every choice of a small space, the best of a large one.

Choices are enumerated by decoding the space, so every choice that it offers is covered. First comes every
layout once, then every other choice for the layouts that are predicted to be fastest. The end loads are those
that balance the pipeline by the predictor's coefficients, and some around them.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from quartet_plugin.calibration.predictor import identity
from quartet_plugin.model.canonical import derived_seed
from quartet_plugin.model.plan import Plan
from quartet_plugin.space.config import SEARCHED, STOCK_NAMES
from quartet_plugin.space.param_sources import SPLIT_EMBEDDING, SPLIT_HEAD, FixedParams, Params
from quartet_plugin.space.plan_space import Space
from quartet_plugin.split.layers import EndLoads, flops_end_loads

# Layouts that are predicted at all, also where none has a stock schedule; layouts whose other choices are
# enumerated, and the number of these choices in all.
MAX_LAYOUTS, MAX_LAYOUTS_CUSTOM = 400, 24
MAX_OPENED = 24
MAX_CHOICES = 2400
# Layouts for which custom schedules are made (each takes some tenths of a second), and choices whose splits
# are varied.
MAX_CUSTOM_LAYOUTS = 3
MAX_VARIED, MAX_VARIED_CUSTOM = 12, 3
# End loads are rounded to this part of a layer, to whole ones where an order is searched for them, so that
# plans are made once.
QUANTUM = 0.25
_STEPS = (-2.0, -1.0, 0.0, 1.0, 2.0)
_AROUND = tuple((more, most) for more in _STEPS for most in _STEPS)
_AROUND_CUSTOM = ((0.0, -1.0), (0.0, 1.0), (-1.0, 0.0), (1.0, 0.0))
_LAYOUT_KINDS = ("shape", "layout", "micro_batch_size", "optimizer")

# Predicted seconds for equal work; a plan's loads; whether a plan can be predicted.
Rate = Callable[[Sequence[Plan]], list[float]]
EndsOf = Callable[[Plan], EndLoads]
Knows = Callable[[Plan], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A legal plan and the choices that lead to it; `path` has the index of each choice, `names` its name."""

    params: Params
    plan: Plan
    path: tuple[int, ...]
    names: tuple[str, ...]


class PlanCandidates:
    """The candidates of a space; those that do not depend on predictions are made once."""

    def __init__(self, space: Space, *, knows: Knows) -> None:
        self._space = space
        self._knows = knows
        self._layouts: tuple[Candidate, ...] | None = None
        self._opened: dict[tuple[int, ...], tuple[Candidate, ...]] = {}

    def best(self, *, rate: Rate, ends_of: EndsOf) -> list[Candidate]:
        """Distinct plans, the baseline among them where the space holds it; the same for the same answers."""
        layouts = _in_order(self.layouts, rate)
        opened = [
            self._balanced(candidate, ends_of)
            for layout in layouts[:MAX_OPENED]
            for candidate in self._open(layout)
        ]
        custom = [
            self._balanced(candidate, ends_of)
            for layout in [layout for layout in layouts if self._custom_names(layout)][:MAX_CUSTOM_LAYOUTS]
            for candidate in self._open_custom(layout)
        ]
        allowed = self._allowed(self._distinct([*layouts, *opened, *custom]))
        ranked = _in_order(allowed, rate)
        stock = [best for best in ranked if best.plan.schedule.custom is None][:MAX_VARIED]
        named = [best for best in ranked if best.plan.schedule.custom is not None and not _is_searched(best)]
        varied = [
            candidate
            for chosen, around in ((stock, _AROUND), (named[:MAX_VARIED_CUSTOM], _AROUND_CUSTOM))
            for best in chosen
            for candidate in self._varied(best, ends_of, around=around)
        ]
        return self._allowed(self._distinct([*allowed, *varied]))

    @property
    def layouts(self) -> tuple[Candidate, ...]:
        """Every layout of every shape once, other choices at their first; of too many, a random sample."""
        if self._layouts is None:
            requested = self._space.search.schedule
            is_stock = requested is None or bool({"stock", *STOCK_NAMES} & set(requested))
            most = MAX_LAYOUTS if is_stock else MAX_LAYOUTS_CUSTOM
            layouts = tuple(self._branches((), kinds=_LAYOUT_KINDS, limit=4 * most))
            if len(layouts) > most:
                generator = random.Random(derived_seed(self._space.seed, 0, "layouts"))  # noqa: S311
                layouts = tuple(generator.sample(layouts, most))
            self._layouts = tuple(self._distinct(layouts))
        return self._layouts

    def _open(self, layout: Candidate) -> tuple[Candidate, ...]:
        """Every other choice for a layout, without custom schedules."""
        path = layout.path[: _num_of_layout(layout)]
        if path not in self._opened:
            limit = MAX_CHOICES // min(len(self.layouts), MAX_OPENED)
            self._opened[path] = tuple(self._branches(path, kinds=None, limit=limit))
        return self._opened[path]

    def _distinct(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """The first candidate of each plan that can be predicted."""
        first: dict[object, Candidate] = {}
        for candidate in candidates:
            first.setdefault(identity(candidate.plan), candidate)
        return [candidate for candidate in first.values() if self._knows(candidate.plan)]

    def _allowed(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return [candidate for candidate in candidates if self._space.refusal_of(candidate.plan) is None]

    def _custom_names(self, layout: Candidate) -> list[str]:
        names = self._space.schedules_of(layout.plan.layout)
        return [name for name in names if name not in STOCK_NAMES]

    def _open_custom(self, layout: Candidate) -> Iterator[Candidate]:
        """Every other choice for a layout with each custom schedule."""
        num = _num_of_layout(layout)
        names = self._space.schedules_of(layout.plan.layout)
        for index, name in enumerate(names):
            if name not in STOCK_NAMES:
                path = (*layout.path[:num], index) if len(names) > 1 else layout.path[:num]
                yield from self._branches(path, kinds=None, limit=MAX_CHOICES // MAX_OPENED)

    def _branches(
        self, path: tuple[int, ...], *, kinds: Sequence[str] | None, limit: int
    ) -> Iterator[Candidate]:
        """All choices that begin with `path`; only those of `kinds` vary, and none to a custom schedule."""
        waiting, num = [path], 0
        while waiting and num < limit:
            begun = waiting.pop()
            source = _PathParams(begun, space=self._space)
            try:
                plan = self._space.decode(source, trial=0)
            except KeyError:
                continue
            num += 1
            yield Candidate(
                params=source.params, plan=plan, path=tuple(source.path), names=tuple(source.names)
            )
            for depth in range(len(begun), len(source.path)):
                if kinds is None or _kind(source.names[depth]) in kinds:
                    before = tuple(source.path[:depth])
                    waiting += [(*before, other) for other in source.others(depth)]

    def _balanced(self, candidate: Candidate, ends_of: EndsOf) -> Candidate:
        """The candidate with the end loads that balance it by the predictor's coefficients."""
        return next(self._varied(candidate, ends_of, around=((0.0, 0.0),)), candidate)

    def _varied(
        self, candidate: Candidate, ends_of: EndsOf, *, around: Sequence[tuple[float, float]]
    ) -> Iterator[Candidate]:
        """The candidate with end loads around the balanced ones; none where its split is fixed."""
        if SPLIT_HEAD not in candidate.params:
            return
        num_layers, quantum = candidate.plan.shape.num_layers, 1.0 if _is_searched(candidate) else QUANTUM
        ends = ends_of(candidate.plan)
        for embedding, head in around:
            params = {
                **candidate.params,
                SPLIT_EMBEDDING: _share(ends.embedding + embedding, num_layers, quantum=quantum),
                SPLIT_HEAD: _share(ends.head + head, num_layers, quantum=quantum),
            }
            plan = self._space.decode(FixedParams(params), trial=0)
            yield replace(candidate, params=params, plan=plan)


class _PathParams:
    """Takes the choices of a path, then the first ones, with the end loads by FLOPs."""

    def __init__(self, path: Sequence[int], *, space: Space) -> None:
        self._begun = tuple(path)
        self._shape = space.shapes[0]
        self._choices: list[list[int]] = []
        self.path: list[int] = []
        self.names: list[str] = []
        self.params: dict[str, str | int | float] = {}

    def category(self, name: str, choices: Sequence[str]) -> str:
        is_schedule = _kind(name) == "schedule"
        allowed = [i for i, choice in enumerate(choices) if not is_schedule or choice in STOCK_NAMES] or [0]
        depth = len(self.path)
        index = self._begun[depth] if depth < len(self._begun) else allowed[0]
        if index >= len(choices):
            raise KeyError(name)
        self.path.append(index)
        self.names.append(name)
        self._choices.append(allowed)
        self.params[name] = choices[index]
        return choices[index]

    def unit_float(self, name: str) -> float:
        ends = flops_end_loads(self._shape)
        load = ends.head if name == SPLIT_HEAD else ends.embedding
        self.params[name] = share = _share(load, self._shape.num_layers)
        return share

    def others(self, depth: int) -> list[int]:
        """The indices of the other choices at `depth`, the last first: it is tried last."""
        return [index for index in reversed(self._choices[depth]) if index != self.path[depth]]


def _kind(name: str) -> str:
    return name.partition("[")[0].partition(".")[0]


def _num_of_layout(candidate: Candidate) -> int:
    """The number of choices of shape and layout: they come first."""
    return sum(_kind(name) in _LAYOUT_KINDS for name in candidate.names)


def _is_searched(candidate: Candidate) -> bool:
    return any(_kind(name) == "schedule" and candidate.params[name] == SEARCHED for name in candidate.names)


def _share(load: float, num_layers: int, *, quantum: float = QUANTUM) -> float:
    """An end load as a parameter of the space: a share of all layers, from -1 to 1."""
    rounded = round(load / quantum) * quantum
    return min(1.0, max(-1.0, rounded / num_layers))


def _in_order(candidates: Sequence[Candidate], rate: Rate) -> list[Candidate]:
    """The fastest first."""
    rates = rate([candidate.plan for candidate in candidates])
    return [candidates[index] for index in sorted(range(len(candidates)), key=lambda i: (rates[i], i))]
