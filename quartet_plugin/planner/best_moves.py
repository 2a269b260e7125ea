"""The best splits and mappings of ranked plans, chosen together under the calibrated iteration model.

Plans that differ in their split and mapping alone are one choice here. The search returns the best splits of
the first choices, and of each later choice only plans that are faster than all before; it leaves a choice
whose lower bound is slower.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quartet_plugin.cost.iteration.split_model import CalibratedSplits, SlotOrder
from quartet_plugin.mapping.orders import slot_indices
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Mapping, Plan
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.order_candidates import OrderCandidates
from quartet_plugin.planner.split_search import NUM_SPLITS, SplitsFound, best_splits
from quartet_plugin.space.moved_plans import moved
from quartet_plugin.space.param_sources import SPLIT_HEAD, Params
from quartet_plugin.space.plan_space import Space

# Choices of which several splits are returned, and the work of all searches of one call together, in
# simulated actions: a good half of a second.
NUM_FIRST = 12
MAX_WORK = 16_000_000


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


def best_moves[M: Move](
    space: Space, ranked: Sequence[M], *, splits_of: Callable[[Plan], CalibratedSplits | None]
) -> Moves[M]:
    """The best splits and mappings of `ranked`, whose fastest plan comes first."""
    moves: Moves[M] = Moves()
    orders = OrderCandidates(space)
    fastest_s: dict[ModelShape, float] = {}
    work = num_cut_off = num_left = 0
    for number, best in enumerate(_choices(ranked)):
        calibrated = splits_of(best.plan)
        if calibrated is None:
            continue
        if work >= MAX_WORK:
            num_left += 1
            continue
        plan, limit = best.plan, fastest_s.get(best.plan.shape, float("inf"))
        present = (slot_indices(space.nodes, plan.mapping), plan.mapping)
        results: list[SplitsFound] = []
        if number < NUM_FIRST:
            results.append(_search(space, calibrated, [present], best, num_splits=NUM_SPLITS))
            limit = min([limit, *(split.seconds for split in results[0].splits)])
        others = orders.of(plan, calibrated)
        results.append(_search(space, calibrated, [present, *others], best, incumbent_s=limit))
        for result in results:
            work += result.work
            num_cut_off += result.num_cut_off > 0
            for split in result.splits:
                fastest_s[plan.shape] = min(fastest_s.get(plan.shape, float("inf")), split.seconds)
                made = moved(space, best.params, plan, split=split.split, mapping=split.mapping)
                if made is not None:
                    moves.plans.append((best, *made))
    moves.limits = (*_limits(num_cut_off=num_cut_off, num_left=num_left), *orders.limits)
    return moves


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
    splits = space.fixed_splits(plan.shape, plan.layout)
    if splits is None and SPLIT_HEAD not in best.params:
        splits = (plan.split.transformer_layers_per_stage,)  # a file says the split
    return best_splits(
        calibrated,
        mappings,
        num_layers=plan.shape.num_layers,
        incumbent_s=incumbent_s,
        allowed=splits,
        least_of_end_stages=space.least_of_end_stages,
        num_splits=num_splits,
    )


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
    """What identifies a plan beside its split and mapping: of a custom schedule its name."""
    custom = plan.schedule.custom
    if custom is not None and custom.named is not None:
        return plan.shape, custom.named, custom.group, custom.placement
    if custom is not None:
        return plan.identity
    return plan.shape, plan.schedule


def _limits(*, num_cut_off: int, num_left: int) -> Iterator[str]:
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
