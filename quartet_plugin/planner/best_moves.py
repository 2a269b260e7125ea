"""The best splits and mappings of ranked plans, chosen together under the calibrated iteration model.

Plans that differ in their split and mapping alone are one choice here. The search returns the best splits of
the first choices, and of each later choice only plans that are faster than all before; it leaves a choice
whose lower bound is slower. Only plans that may fit in memory prove others to be slower. Where none of a
choice's fastest plans may fit, more of its splits are searched, and those that may fit are returned beside
the fastest.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from quartet_plugin.cost.iteration.split_model import CalibratedSplits, SlotOrder
from quartet_plugin.mapping.orders import slot_indices
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Mapping, Plan, Split
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.order_candidates import OrderCandidates
from quartet_plugin.planner.split_search import NUM_SPLITS, FoundSplit, SplitsFound, best_splits
from quartet_plugin.space.moved_plans import moved
from quartet_plugin.space.param_sources import SPLIT_EMBEDDING, Params
from quartet_plugin.space.plan_space import Space

# Choices of which several splits are returned, and the work of all searches of one call together, in
# simulated actions: a good half of a second.
NUM_FIRST = 12
MAX_WORK = 16_000_000
# Splits of a choice among which those that may fit are looked for, and choices that do not fit with their
# balanced split for which they are.
MANY_SPLITS = 64
MAX_UNFIT = 24


class Move(Protocol):
    """A plan and the parameters that lead to it."""

    @property
    def params(self) -> Params:
        """The parameters of the study that lead to the plan."""

    @property
    def plan(self) -> Plan:
        """The plan after the move."""


@dataclass(slots=True, kw_only=True)
class Moves[M: Move]:
    """The moved plans, each with the one that it was made of and its parameters; what limits cut off."""

    plans: list[tuple[M, Params, Plan]] = field(default_factory=list)
    limits: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _MovesSearch[M: Move]:
    """The moved plans of one call, the seconds of the fastest that may fit by shape, and the work done."""

    space: Space
    may_fit: Callable[[Plan], bool]
    moves: Moves[M] = field(default_factory=Moves)
    fastest_s: dict[ModelShape, float] = field(default_factory=dict)
    work: int = 0
    num_cut_off: int = 0

    def limit_s(self, shape: ModelShape) -> float:
        """The seconds of the fastest plan of the shape that may fit; infinite while there is none."""
        return self.fastest_s.get(shape, float("inf"))

    def keep(self, best: M, result: SplitsFound, *, only_fitting: bool = False) -> bool:
        """Make plans of the splits; whether one of them may fit.

        `only_fitting`: the others are left out, and of those that may fit all but the fastest.
        """
        plan, num_fitting = best.plan, 0
        self.work += result.work
        self.num_cut_off += result.num_cut_off > 0
        for split in result.splits:
            fits = self.may_fit(replace(plan, split=_with_counts(plan.split, split.split)))
            if only_fitting and not fits:
                continue
            made = moved(self.space, best.params, plan, split=split.split, mapping=split.mapping)
            if made is None:
                continue
            self.moves.plans.append((best, *made))
            if fits:
                num_fitting += 1
                self.fastest_s[plan.shape] = min(self.limit_s(plan.shape), split.seconds)
            if only_fitting and num_fitting == NUM_SPLITS:
                break
        return num_fitting > 0


def _always(_: Plan) -> bool:
    return True


def best_moves[M: Move](
    space: Space,
    ranked: Sequence[M],
    *,
    splits_of: Callable[[Plan], CalibratedSplits | None],
    may_fit: Callable[[Plan], bool] = _always,
) -> Moves[M]:
    """The best splits and mappings of `ranked`: plans that `may_fit` come first, and the fastest of these."""
    search: _MovesSearch[M] = _MovesSearch(space=space, may_fit=may_fit)
    orders, prohibitions = OrderCandidates(space), space.rules().prohibitions
    num_left = num_unfit = 0
    for number, best in enumerate(_choices(ranked)):
        plan, shape = best.plan, best.plan.shape
        # While nothing is known to fit, every choice is searched alike.
        is_unfit = shape in search.fastest_s and not may_fit(plan)
        num_unfit += is_unfit
        if is_unfit and num_unfit > MAX_UNFIT:
            continue
        calibrated = splits_of(plan)
        if calibrated is None:
            continue
        if search.work >= MAX_WORK:
            num_left += 1
            continue
        mapping, may_one_fit = plan.mapping, False
        if not is_unfit:
            present = (slot_indices(space.nodes, mapping), mapping)
            splits: list[FoundSplit] = []
            if number < NUM_FIRST:
                result = _search(space, calibrated, [present], best, num_splits=NUM_SPLITS)
                may_one_fit = search.keep(best, result)
                splits += result.splits
            every = [
                (slots, order)
                for slots, order in (present, *orders.of(plan, calibrated))
                if prohibitions.of_mapping(replace(plan, mapping=order)) is None
            ]
            result = _search(space, calibrated, every, best, incumbent_s=search.limit_s(shape))
            may_one_fit |= search.keep(best, result)
            splits += result.splits
            if may_one_fit or not splits:
                continue
            mapping = min(splits, key=lambda split: split.seconds).mapping
        # An order of ranks needs the memory of every other: splits are searched under the fastest.
        order = [(slot_indices(space.nodes, mapping), mapping)]
        limit_s = search.limit_s(shape)
        result = _search(space, calibrated, order, best, incumbent_s=limit_s, num_splits=MANY_SPLITS)
        search.keep(best, result, only_fitting=True)
    search.moves.limits = (
        *_limits(num_cut_off=search.num_cut_off, num_left=num_left, num_unfit=num_unfit - MAX_UNFIT),
        *orders.limits,
    )
    return search.moves


def _search(
    space: Space,
    calibrated: CalibratedSplits,
    mappings: Sequence[tuple[SlotOrder, Mapping]],
    best: Move,
    *,
    incumbent_s: float = float("inf"),
    num_splits: int = 1,
) -> SplitsFound:
    plan = best.plan
    is_before_last = bool(plan.split.mtp_before_last)
    splits = space.fixed_splits(plan.shape, plan.layout, is_mtp_before_last=is_before_last)
    if splits is None and SPLIT_EMBEDDING not in best.params:
        # A file says the split, or there is one alone.
        splits = (plan.split.transformer_layers_per_stage,)

    def may_have(split: tuple[int, ...], mapping: Mapping) -> bool:
        moved_plan = replace(plan, split=_with_counts(plan.split, split), mapping=mapping)
        return space.refusal_of(moved_plan) is None

    return best_splits(
        calibrated,
        mappings,
        num_layers=plan.shape.num_layers,
        incumbent_s=incumbent_s,
        allowed=splits,
        least_of_end_stages=space.least_of_end_stages,
        num_splits=num_splits,
        may_have=may_have,
    )


def _with_counts(split: Split, counts: tuple[int, ...]) -> Split:
    """The split with these layers of each stage; the stage of multi-token prediction stays."""
    return replace(split, transformer_layers_per_stage=counts)


def _choices[M: Move](ranked: Sequence[M]) -> Iterator[M]:
    """The first of the plans that differ in their split and mapping alone."""
    seen: set[object] = set()
    for best in ranked:
        plan = best.plan
        key: tuple[Layout, object] = (plan.layout, _without_moves(plan))
        if key not in seen:
            seen.add(key)
            yield best


def _without_moves(plan: Plan) -> object:
    """What identifies a plan beside its layers of stages and mapping: of a custom schedule its name."""
    custom = plan.schedule.custom
    if custom is not None and custom.named is not None:
        return plan.shape, custom.named, custom.group, custom.placement
    if custom is not None:
        return plan.identity
    return plan.shape, plan.schedule, plan.split.mtp_before_last


def _limits(*, num_cut_off: int, num_left: int, num_unfit: int) -> Iterator[str]:
    if num_cut_off:
        yield (
            f"splits: for {num_cut_off} combinations only a local search was possible; the full enumeration "
            "reached its limit"
        )
    if num_left:
        yield (
            f"splits: {num_left} slower combinations keep the balanced split; the work limit was spent on "
            "faster ones"
        )
    if num_unfit > 0:
        yield (
            f"splits: {num_unfit} combinations keep a balanced split that does not fit; splits that fit are "
            f"searched only for {MAX_UNFIT} others"
        )
