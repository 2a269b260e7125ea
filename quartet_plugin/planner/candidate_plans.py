"""The plans of a space that are worth predicting: every choice of a small space, the best of a large one.

Choices are enumerated by decoding the space, so every choice that it offers is covered. First comes every
layout once, then every other choice for the layouts that are predicted to be fastest. Each is given the split
that balances its pipeline; then splits and mappings are searched together, for everything that is not proven
to be slower than an earlier plan (`best_moves`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.iteration.split_model import CalibratedSplits
from quartet_plugin.cost.run import schedule_kind
from quartet_plugin.mapping.orders import slot_indices
from quartet_plugin.model.custom_schedule import CustomSchedule
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Mapping, Plan, Split
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.best_moves import Moves, best_moves
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.layout_bounds import least_seconds_of
from quartet_plugin.planner.split_search import balanced_split
from quartet_plugin.space.config import SEARCHED, STOCK_NAMES
from quartet_plugin.space.expert_stages import stock_placement
from quartet_plugin.space.knobs.mtp_stage import BEFORE_LAST, LAST
from quartet_plugin.space.knobs.registry import BEFORE_SCHEDULE
from quartet_plugin.space.moved_plans import moved, with_order
from quartet_plugin.space.order_exchanges import RUN
from quartet_plugin.space.param_sources import (
    SPLIT_EMBEDDING,
    SPLIT_MTP,
    Params,
    layout_texts,
    load_of,
    param_prefix,
)
from quartet_plugin.space.plan_space import Space
from quartet_plugin.space.schedules import MAX_SEARCHED_ACTIONS
from quartet_plugin.space.split_shifts import SHIFT
from quartet_plugin.space.unsearched_layouts import num_unsearched_layouts
from quartet_plugin.split.layers import flops_end_loads

# Layouts that are predicted at all, also where none has a stock schedule; layouts whose other choices are
# enumerated, and the number of these choices in all.
MAX_LAYOUTS, MAX_LAYOUTS_CUSTOM = 2000, 24
MAX_OPENED = 48
MAX_CHOICES = 4800
# Layouts for which custom schedules are made: each takes some tenths of a second.
MAX_CUSTOM_LAYOUTS = 3
# Custom candidates for which an order is searched with the calibrated costs.
MAX_ORDERED = 3
# Plans with balanced splits, and custom schedules of layouts with their choices, that are kept from one call
# to the next.
MAX_KEPT, MAX_KEPT_CUSTOM = 20_000, 512
# End loads are rounded to this part of a layer, so that plans are made once.
QUANTUM = 0.25
_LAYOUT_KINDS = ("shape", "layout", *map(param_prefix, BEFORE_SCHEDULE))

# A number that is least for the best plan, such as seconds for equal work; a plan's model for any split and
# mapping; the order searched for its calibrated costs; whether a plan can be predicted; whether it may fit in
# memory.
CostsOf = Callable[[Sequence[Plan]], list[float]]
SplitsOf = Callable[[Plan], CalibratedSplits | None]
OrderOf = Callable[[Plan], CustomSchedule | None]
IsPredictable = Callable[[Plan], bool]
MayFit = Callable[[Plan], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A legal plan and the choices that lead to it; `path` has the index of each choice, `names` its name."""

    params: Params
    plan: Plan
    path: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choices:
    """The candidates whose choices begin with a path; `is_cut`: there are more of them."""

    candidates: tuple[Candidate, ...]
    is_cut: bool

    def noting_cut(self, path: tuple[int, ...], *, cut: set[tuple[int, ...]]) -> tuple[Candidate, ...]:
        """The candidates; their `path` is added to `cut` where there are more."""
        if self.is_cut:
            cut.add(path)
        return self.candidates


class PlanCandidates:
    """The candidates of a space; those that do not depend on predictions are made once."""

    def __init__(
        self,
        space: Space,
        *,
        is_predictable: IsPredictable,
        request: PlanRequest,
        constants: Constants | None = None,
    ) -> None:
        self._space = space
        self._is_predictable = is_predictable
        self._request = request
        self._constants = constants
        self._layouts: tuple[Candidate, ...] | None = None
        # The choices by paths of layouts, and by paths of their custom schedules.
        self._opened: dict[tuple[int, ...], _Choices] = {}
        self._custom: dict[tuple[int, ...], list[str]] = {}
        self._opened_custom: dict[tuple[int, ...], _Choices] = {}
        self._balanced_plans: dict[tuple[tuple[int, ...], tuple[int, ...]], Candidate] = {}
        self._limits: tuple[str, ...] = ()
        self._limits_of_layouts: tuple[str, ...] = ()
        # Those that `best` has opened and that have more choices than the limit.
        self._cut: set[tuple[int, ...]] = set()
        self._cut_custom: set[tuple[int, ...]] = set()
        self._num_unsearched: int | None = None

    def best(
        self, *, costs_of: CostsOf, splits_of: SplitsOf, order_of: OrderOf, may_fit: MayFit = lambda _: True
    ) -> list[Candidate]:
        """Distinct plans, the baseline among them where the space holds it; the same for the same answers."""
        layouts = _in_order(self.layouts, costs_of)
        opened = self._balanced_choices(layouts, splits_of)
        custom = [
            candidate if self._is_searched(candidate) else self._balanced(candidate, splits_of)
            for layout in self._custom_layouts(layouts)
            for candidate in self._open_custom(layout)
        ]
        allowed = self._allowed(self._distinct([*layouts, *opened, *custom]))
        ranked = _in_order(allowed, costs_of)
        named = [best for best in ranked if not self._is_searched(best)]
        moves = self._moves(named, splits_of, may_fit)
        self._limits = (*self._limits_of(layouts), *moves.limits)
        moved_plans = [
            replace(ranked_plan, params=params, plan=plan) for ranked_plan, params, plan in moves.plans
        ]
        every = self._allowed(self._distinct([*allowed, *moved_plans]))
        chosen, num_chosen_from = self._to_order(_in_order(every, costs_of))
        if num_chosen_from > len(chosen):
            self._limits += (f"searched orders: only for the best {len(chosen)} of {num_chosen_from} plans",)
        ordered = [best for plan in chosen for best in self._ordered(plan, costs_of, splits_of, order_of)]
        return self._distinct([*every, *ordered])

    def prepare(self, *, costs_of: CostsOf, splits_of: SplitsOf, may_fit: MayFit) -> None:
        """Make the plans that `best` will need for these answers; this changes no result of `best`.

        No order is searched: for a few layouts that takes long.
        """
        layouts = _in_order(self.layouts, costs_of)
        try:
            opened = self._balanced_choices(layouts, splits_of)
            custom = [
                self._balanced(candidate, splits_of)
                for layout in self._custom_layouts(layouts)
                for path, name in self._custom_paths(layout)
                if name != SEARCHED
                for candidate in self._open_custom_path(path)
            ]
        finally:
            self._cut.clear()
            self._cut_custom.clear()
        allowed = self._allowed(self._distinct([*layouts, *opened, *custom]))
        self._moves(_in_order(allowed, costs_of), splits_of, may_fit)

    def _balanced_choices(self, layouts: Sequence[Candidate], splits_of: SplitsOf) -> list[Candidate]:
        """The choices of the fastest of the layouts, without custom schedules."""
        return [
            self._balanced(candidate, splits_of)
            for layout in layouts[:MAX_OPENED]
            for candidate in self._open(layout)
        ]

    def _moves(self, ranked: Sequence[Candidate], splits_of: SplitsOf, may_fit: MayFit) -> Moves[Candidate]:
        """The best splits and mappings of the candidates, the fastest of which come first."""
        # What hardly fits comes last, and only for the splits that fit.
        fitting_first = sorted(ranked, key=lambda best: not may_fit(best.plan))
        return best_moves(self._space, fitting_first, splits_of=splits_of, may_fit=may_fit)

    def _to_order(self, ranked: Sequence[Candidate]) -> tuple[list[Candidate], int]:
        """The best custom candidates for which an order may be searched, and of how many they are the best.

        Of each placement on a layout's degrees, micro-batch and recompute there is one.
        """
        first: dict[object, Candidate] = {}
        for candidate in ranked:
            plan, custom = candidate.plan, candidate.plan.schedule.custom
            if custom is None or not schedule_kind(plan.schedule).splits_backward:
                continue
            layout = plan.layout
            names = self._space.schedules_of(layout, shape=plan.shape)
            if SEARCHED in names and self._schedule_of(candidate) not in self._space.written:
                key = (
                    plan.shape,
                    layout.degrees,
                    layout.micro_batch_size,
                    layout.recompute,
                    custom.placement,
                )
                first.setdefault(key, candidate)
        return list(first.values())[:MAX_ORDERED], len(first)

    def _ordered(
        self, candidate: Candidate, costs_of: CostsOf, splits_of: SplitsOf, order_of: OrderOf
    ) -> Iterator[Candidate]:
        """The candidate with the order for the calibrated costs, or that for costs by FLOPs if it is faster.

        Split and mapping stay, but for a split that was searched with its order: that is balanced. Nothing
        where the candidate itself has the order, by its name.
        """
        plan, custom = candidate.plan, candidate.plan.schedule.custom
        if self._is_searched(candidate):
            split = self._split_of(candidate, splits_of)
            plan = replace(plan, split=Split(transformer_layers_per_stage=split))
        made = [
            replace(candidate, params=ordered[0], plan=ordered[1])
            for order in (order_of(plan), None)
            if (ordered := with_order(self._space, candidate.params, plan, custom=order)) is not None
        ]
        for best in _in_order(made, costs_of)[:1]:
            order = best.plan.schedule.custom
            if custom is None or order is None or order.named is None or order.named != custom.named:
                yield best

    def _schedule_of(self, candidate: Candidate) -> str:
        return self._space.schedule_name(candidate.params, candidate.plan)

    def _is_searched(self, candidate: Candidate) -> bool:
        return candidate.plan.schedule.custom is not None and self._schedule_of(candidate) == SEARCHED

    @property
    def limits(self) -> tuple[str, ...]:
        """What limits cut off when the candidates were last made, one line each."""
        return self._limits

    @property
    def limits_of_layouts(self) -> tuple[str, ...]:
        """Which layouts are left out of a large space, in a line: the same ones in every proposal."""
        return self._limits_of_layouts

    def _limits_of(self, layouts: Sequence[Candidate]) -> Iterator[str]:
        yield from self._limits_of_layouts
        if len(layouts) > MAX_OPENED:
            yield (
                f"other axes and knobs: searched only in the {MAX_OPENED} layouts with the shortest "
                f"predicted time (of {len(layouts)})"
            )
        num_custom = sum(bool(self._custom_names(layout)) for layout in layouts)
        if num_custom > MAX_CUSTOM_LAYOUTS:
            yield (
                f"custom schedules: tried only in the {MAX_CUSTOM_LAYOUTS} layouts with the shortest "
                f"predicted time (of {num_custom})"
            )
        if self._cut:
            yield (
                f"combinations: {len(self._cut)} layouts have more than the limit of {self._limit} each; "
                "the rest is not predicted"
            )
        if self._cut_custom:
            yield (
                f"combinations: {len(self._cut_custom)} custom schedules of layouts have more than the limit "
                f"of {self._custom_limit} each; the rest is not predicted"
            )
        if self._num_unsearched is None:
            self._num_unsearched = num_unsearched_layouts(self._space)
        if self._num_unsearched:
            yield (
                f"searched orders: none for {self._num_unsearched} layouts, whose steps have more than "
                f"{MAX_SEARCHED_ACTIONS:,} actions"
            )

    @property
    def layouts(self) -> tuple[Candidate, ...]:
        """Every layout of every shape once, other choices at their first; of too many, those of least bounds.

        Layouts that a searched order alone can run are there only where nothing else is left.
        """
        if self._layouts is None:
            every = [(shape, layout) for shape, kept in self._space.layouts.items() for layout in kept]
            names = [set(self._space.schedules_of(layout, shape=shape)) for shape, layout in every]
            named = [pair for pair, offered in zip(every, names, strict=True) if offered != {SEARCHED}]
            is_stock = any(offered & set(STOCK_NAMES) for offered in names)
            kept = self._of_least_bounds(named or every, most=MAX_LAYOUTS if is_stock else MAX_LAYOUTS_CUSTOM)
            self._layouts = tuple(self._distinct(self._of_layout(*pair) for pair in kept))
        return self._layouts

    def _of_least_bounds(
        self, layouts: list[tuple[ModelShape, Layout]], *, most: int
    ) -> list[tuple[ModelShape, Layout]]:
        """The `most` layouts that the planner's bounds let be fastest, in their order."""
        if len(layouts) <= most:
            return layouts
        bounds = least_seconds_of(layouts, request=self._request, constants=self._constants)
        order = sorted(range(len(layouts)), key=bounds.__getitem__)
        first, left = bounds[order[0]], bounds[order[most]]
        why = "do not fit in memory" if math.isinf(left) else "have no bound"
        if 0.0 < first < math.inf and left < math.inf:
            why = f"have bounds of at least {left / first:.2f}x the smallest"
        self._limits_of_layouts = (
            f"layouts: {most} of {len(layouts)} are predicted, those with the smallest lower bound on "
            f"iteration time; the others {why}",
        )
        return [layouts[index] for index in sorted(order[:most])]

    def _of_layout(self, shape: ModelShape, layout: Layout) -> Candidate:
        """A layout with every other choice at its first."""
        source = _LayoutParams(shape, layout, space=self._space)
        plan = self._space.decode(source, trial=0)
        return source.candidate(plan)

    def _open(self, layout: Candidate) -> tuple[Candidate, ...]:
        """Every other choice for a layout, without custom schedules."""
        path = layout.path[: _num_of_layout(layout)]
        if path not in self._opened:
            self._opened[path] = self._branches(path, limit=self._limit)
        return self._opened[path].noting_cut(path, cut=self._cut)

    @property
    def _limit(self) -> int:
        """The most choices of one layout that are enumerated."""
        return MAX_CHOICES // min(len(self.layouts), MAX_OPENED)

    @property
    def _custom_limit(self) -> int:
        """The most choices of one custom schedule of a layout that are enumerated."""
        return MAX_CHOICES // MAX_OPENED

    def _distinct(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """The first candidate of each plan that can be predicted."""
        first: dict[object, Candidate] = {}
        for candidate in candidates:
            first.setdefault(candidate.plan.identity, candidate)
        return [candidate for candidate in first.values() if self._is_predictable(candidate.plan)]

    def _allowed(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return [candidate for candidate in candidates if self._space.refusal_of(candidate.plan) is None]

    def _custom_names(self, layout: Candidate) -> list[str]:
        if layout.path not in self._custom:
            names = self._space.schedules_of(layout.plan.layout, shape=layout.plan.shape)
            self._custom[layout.path] = [name for name in names if name not in STOCK_NAMES]
        return self._custom[layout.path]

    def _custom_layouts(self, layouts: Sequence[Candidate]) -> list[Candidate]:
        """The fastest layouts with custom schedules, and the fastest that has each schedule of a file."""
        custom = {layout.path: (layout, self._custom_names(layout)) for layout in layouts}
        able = [layout for layout, names in custom.values() if names]
        chosen = able[:MAX_CUSTOM_LAYOUTS]
        for name in self._space.written:
            chosen += [layout for layout in able if name in custom[layout.path][1]][:1]
        return list({layout.path: layout for layout in chosen}.values())

    def _open_custom(self, layout: Candidate) -> tuple[Candidate, ...]:
        """Every other choice for a layout with each custom schedule."""
        paths = self._custom_paths(layout)
        return tuple(candidate for path, _ in paths for candidate in self._open_custom_path(path))

    def _custom_paths(self, layout: Candidate) -> list[tuple[tuple[int, ...], str]]:
        """The path of each custom schedule of a layout, and its name."""
        path = layout.path[: _num_of_layout(layout)]
        names = self._space.schedules_of(layout.plan.layout, shape=layout.plan.shape)
        return [
            ((*path, index) if len(names) > 1 else path, name)
            for index, name in enumerate(names)
            if name not in STOCK_NAMES
        ]

    def _open_custom_path(self, path: tuple[int, ...]) -> tuple[Candidate, ...]:
        """Every other choice for a custom schedule of a layout."""
        if path not in self._opened_custom:
            if len(self._opened_custom) >= MAX_KEPT_CUSTOM:
                self._opened_custom.clear()
            self._opened_custom[path] = self._branches(path, limit=self._custom_limit)
        return self._opened_custom[path].noting_cut(path, cut=self._cut_custom)

    def _branches(self, path: tuple[int, ...], *, limit: int) -> "_Choices":
        """All choices that begin with `path`, up to a limit."""
        waiting, candidates = [path], list[Candidate]()
        while waiting and len(candidates) < limit:
            begun = waiting.pop()
            source = _PathParams(begun, space=self._space)
            try:
                plan = self._space.decode(source, trial=0)
            except KeyError:
                continue
            candidates.append(source.candidate(plan))
            for depth in range(len(begun), len(source.path)):
                before = tuple(source.path[:depth])
                waiting += [(*before, other) for other in source.others(depth)]
        return _Choices(candidates=tuple(candidates), is_cut=bool(waiting))

    def _balanced(self, candidate: Candidate, splits_of: SplitsOf) -> Candidate:
        """The candidate with the split that balances its devices by the predictor's coefficients."""
        plan, split = candidate.plan, self._split_of(candidate, splits_of)
        key = (candidate.path, split)
        if key not in self._balanced_plans:
            if len(self._balanced_plans) >= MAX_KEPT:
                self._balanced_plans.clear()
            made = moved(self._space, candidate.params, plan, split=split, mapping=plan.mapping)
            self._balanced_plans[key] = (
                candidate if made is None else replace(candidate, params=made[0], plan=made[1])
            )
        return self._balanced_plans[key]

    def _split_of(self, candidate: Candidate, splits_of: SplitsOf) -> tuple[int, ...]:
        """The split that balances the candidate's devices; its own where that is fixed."""
        plan = candidate.plan
        calibrated = splits_of(plan) if SPLIT_EMBEDDING in candidate.params else None
        if calibrated is None:
            return plan.split.transformer_layers_per_stage
        split = balanced_split(
            calibrated.times(slot_indices(self._space.nodes, plan.mapping), plan.mapping),
            plan.shape.num_layers,
            least_of_end_stages=self._space.least_of_end_stages,
        )
        return self._space.with_experts(split, plan.schedule.placement or stock_placement(plan.layout))


class _PathParams:
    """Takes the choices of a path, then the first ones, with the end loads by FLOPs."""

    def __init__(self, path: Sequence[int], *, space: Space) -> None:
        self._begun = tuple(path)
        self._shape, self._mtp_layers = space.shapes[0], space.job.mtp_layers
        self._choices: list[list[int]] = []
        self.path: list[int] = []
        self.names: list[str] = []
        self.params: dict[str, str | int | float] = {}

    def category(self, name: str, choices: Sequence[str]) -> str:
        allowed = list(range(len(choices)))
        if _kind(name) == "schedule":
            # An order is searched for the best layouts alone; a named one takes milliseconds.
            known = [i for i in allowed if choices[i] != SEARCHED] or allowed
            allowed = [i for i in allowed if choices[i] in STOCK_NAMES] or known[:1]
        elif name.partition("[")[0] in (SHIFT, RUN):
            allowed = allowed[:1]  # the planner moves layers and slots itself
        index = self._index(name, choices, default=allowed[0])
        self.path.append(index)
        self.names.append(name)
        self._choices.append(allowed)
        self.params[name] = choices[index]
        return choices[index]

    def _index(self, name: str, choices: Sequence[str], *, default: int) -> int:
        depth = len(self.path)
        index = self._begun[depth] if depth < len(self._begun) else default
        if index >= len(choices):
            raise KeyError(name)
        return index

    def candidate(self, plan: Plan) -> Candidate:
        """The plan that was decoded from these choices, with them."""
        return Candidate(params=self.params, plan=plan, path=tuple(self.path), names=tuple(self.names))

    def integer(self, name: str, low: int, high: int) -> int:
        self.params[name] = number = min(max(0, low), high)
        return number

    def unit_float(self, name: str) -> float:
        end_loads = flops_end_loads(
            self._shape, mtp_layers=self._mtp_layers, is_mtp_before_last=name == SPLIT_MTP
        )
        load = load_of(end_loads, name)
        self.params[name] = share = _share(load, self._shape.num_layers)
        return share

    def attribute(self, name: str) -> None:
        """None: an order is searched by FLOPs until costs are calibrated."""

    def others(self, depth: int) -> list[int]:
        """The indices of the other choices at `depth`, the last first: it is tried last."""
        return [index for index in reversed(self._choices[depth]) if index != self.path[depth]]


class _LayoutParams(_PathParams):
    """Takes the choices of a shape and a layout, and those `chosen` by kind, then the first ones."""

    def __init__(self, shape: ModelShape, layout: Layout, *, space: Space, **chosen: str) -> None:
        super().__init__((), space=space)
        self._texts = {**layout_texts(shape, layout, base=space.job.shape), **chosen}

    def _index(self, name: str, choices: Sequence[str], *, default: int) -> int:
        text = self._texts.get(_kind(name))
        if text is None:
            return default
        if text not in choices:
            raise KeyError(name)
        return list(choices).index(text)


def candidate_of(
    space: Space,
    shape: ModelShape,
    layout: Layout,
    *,
    schedule: str,
    group: int | None,
    split: tuple[int, ...],
    mapping: Mapping,
    is_mtp_before_last: bool = False,
) -> tuple[Params, Plan] | None:
    """The parameters of a plan by its parts, and the plan; None where the space does not hold it."""
    mtp_stage = BEFORE_LAST if is_mtp_before_last else LAST
    source = _LayoutParams(
        shape, layout, space=space, schedule=schedule, group=str(group), mtp_stage=mtp_stage
    )
    try:
        plan = space.decode(source, trial=0)
    except KeyError:
        return None
    if bool(plan.split.mtp_before_last) != is_mtp_before_last:
        return None  # of a single stage there is no choice
    return moved(space, source.params, plan, split=split, mapping=mapping)


def _kind(name: str) -> str:
    return name.partition("[")[0].partition(".")[0]


def _num_of_layout(candidate: Candidate) -> int:
    """The number of choices of shape and layout: they come first."""
    return sum(_kind(name) in _LAYOUT_KINDS for name in candidate.names)


def _share(load: float, num_layers: int) -> float:
    """An end load as a parameter of the space: a share of all layers, from -1 to 1."""
    rounded = round(load / QUANTUM) * QUANTUM
    return min(1.0, max(-1.0, rounded / num_layers))


def _in_order(candidates: Sequence[Candidate], costs_of: CostsOf) -> list[Candidate]:
    """The fastest first."""
    costs = costs_of([candidate.plan for candidate in candidates])
    return [candidates[index] for index in sorted(range(len(candidates)), key=lambda i: (costs[i], i))]
