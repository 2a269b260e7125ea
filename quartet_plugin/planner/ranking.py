"""The best layouts of a job: bounds first, the full prediction only where a bound does not rule it out.

Equal devices are ranked in the launcher's order of ranks; on a cluster that is described in full every layout
is ranked with a mapping of its own, solved with little effort. `refine` then solves those of the best.
"""

import bisect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from quartet_plugin.cost.cluster import best_case_cluster
from quartet_plugin.cost.constants import Constants, fitted
from quartet_plugin.cost.memory import Memory, available_bytes, distinct_numbers, peak_memory
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import ScheduleKind
from quartet_plugin.errors import InfeasibleError
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.custom_schedule import CustomSchedule
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import STOCK
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.assignment_search import (
    EQUAL,
    THOROUGH,
    Assignment,
    AssignmentProblem,
    AssignmentSolver,
    NoPlan,
    SolverEffort,
    assign,
)
from quartet_plugin.planner.bounds import LowerBounds, bounds_of
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.layout_table import (
    BALANCED,
    GIB,
    SPLIT,
    LayoutTable,
    Refusal,
    TooLarge,
    layout_table_of,
    refused_degrees,
)
from quartet_plugin.planner.no_layout import no_layout_words
from quartet_plugin.scaling.shapes import BudgetRule, equal_shapes

# Layouts of a cluster whose mappings are solved with more effort than for ranking.
REFINED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One planned layout and schedule. `equal_work_s` is its time for the FLOPs of the requested model.

    `group` is that of an interleaved schedule. `slots[r]` plays RANK r, None in the launcher's order;
    `stock_s` has the seconds of Megatron's stock orders where they were compared. `order` is a searched
    order, `gap` the makespan over a bound on every order with this split and placement, less one, where it is
    known.
    """

    shape: ModelShape
    layout: Layout
    split: tuple[int, ...]
    schedule: ScheduleKind
    group: int | None
    iteration_s: float
    equal_work_s: float
    terms: Mapping[str, float]
    memory: Memory
    slots: tuple[int, ...] | None = None
    stock_s: Mapping[str, float] | None = None
    order: CustomSchedule | None = None
    gap: float | None = None

    @property
    def schedule_label(self) -> str:
        """The schedule's name, with its group where there is one."""
        if self.order is not None:
            # A search may end with a named order, also with one that is not planned by itself.
            return "searched" if self.order.named is None else self.order.label
        return self.schedule.value if self.group is None else f"{self.schedule.value} g{self.group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The best layouts first, and how many of all were predicted, too large for memory, or pruned."""

    best: tuple[Ranked, ...]
    num_considered: int
    num_predicted: int
    num_too_large: int
    num_pruned: int
    too_large: tuple[TooLarge, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShapeLayouts:
    """The layouts of one shape; `scale` makes their times those for the FLOPs of the requested shape."""

    shape: ModelShape
    table: LayoutTable
    bounds: LowerBounds
    scale: float


def rank(
    job: PlanRequest, *, top: int = 1, exhaustive: bool = False, constants: Constants | None = None
) -> Ranking:
    """The `top` layouts that fit in memory, by predicted time for equal work.

    Layouts are predicted in the order of their bounds until no bound is under the last of the best, so the
    ranking is that of predicting all, which `exhaustive` does. Raises InfeasibleError when none is legal or
    none fits; it names the layout that needs the least memory.
    """
    used = constants or fitted()
    layouts_by_shape = [_shape_layouts(job, shape, used) for shape in shapes_of(job)]
    total = sum(len(layouts.table) for layouts in layouts_by_shape)
    if not total:
        raise InfeasibleError(no_layout_words(job))
    solver = None if job.cluster is None else AssignmentSolver(job, used, job.topology(used))
    best: list[tuple[float, int, int, Ranked]] = []
    limit_bytes = _available_bytes(job)
    order = _ordered(layouts_by_shape, limit_bytes=math.inf if exhaustive else limit_bytes)
    predicted, visited, too_slow = 0, 0, 0
    unfit: list[tuple[int, int]] = []
    for bound, index, row in order:
        if not exhaustive and len(best) == top and bound > best[-1][0]:
            break
        visited += 1
        last = best[-1][0] if len(best) == top and not exhaustive else math.inf
        ranked = _planned(
            job, layouts_by_shape[index], row, used, solver, limit_s=last / layouts_by_shape[index].scale
        )
        if ranked is NoPlan.UNFIT:
            unfit.append((index, row))
        if isinstance(ranked, NoPlan):
            too_slow += ranked is NoPlan.TOO_SLOW
            continue
        predicted += 1
        bisect.insort(best, (ranked.equal_work_s, index, row, ranked), key=lambda entry: entry[:3])
        del best[top:]
    if not best:
        raise InfeasibleError(_nearest(job, layouts_by_shape))
    return Ranking(
        best=tuple(entry[3] for entry in best),
        num_considered=total,
        num_predicted=predicted,
        num_too_large=total - len(order) + len(unfit),
        num_pruned=len(order) - visited + too_slow,
        too_large=_too_large(layouts_by_shape, unfit, limit_bytes),
    )


def best_plans(
    job: PlanRequest, *, top: int = 1, exhaustive: bool = False, constants: Constants | None = None
) -> Ranking:
    """The `top` layouts, mappings solved; more are ranked first where that can change their order."""
    more = top if job.cluster is None else max(top, REFINED)
    ranking = rank(job, top=more, exhaustive=exhaustive, constants=constants)
    refined = refine(job, ranking, constants=constants)
    return replace(refined, best=refined.best[:top])


def refine(
    job: PlanRequest,
    ranking: Ranking,
    *,
    constants: Constants | None = None,
    effort: SolverEffort | None = None,
) -> Ranking:
    """The same layouts with mappings (and splits where devices differ) of their own, ranked again.

    Unchanged where the job names its orders and devices are equal.
    """
    if job.search.mapping is not None and not job.has_unequal_devices:
        return ranking
    used = constants or fitted()
    effort = effort or (EQUAL if job.cluster is None else THOROUGH)
    topology = job.topology(used)
    refined = []
    for ranked in ranking.best:
        problem = AssignmentProblem(
            job=job,
            shape=ranked.shape,
            layout=ranked.layout,
            split=ranked.split,
            schedule=ranked.schedule,
            group=ranked.group,
            constants=used,
            topology=topology,
            may_split=job.search.split is None,
        )
        better = assign(problem, effort=effort)
        if better is not None and better.prediction.iter_time_s <= ranked.iteration_s * (1 + 1e-12):
            ranked = _with(ranked, better)
        refined.append(ranked)
    refined.sort(key=lambda ranked: ranked.equal_work_s)
    return replace(ranking, best=tuple(refined))


def refusals(job: PlanRequest, ranking: Ranking | None) -> list[Refusal]:
    """Why layouts were refused, the reason that refused most first: degrees, then memory."""
    too_large, available = () if ranking is None else ranking.too_large, _available_bytes(job)
    return [
        *refused_degrees(job, job.shape),
        *(group.refusal(available) for group in sorted(too_large, key=lambda group: -group.num_layouts)),
    ]


def shapes_of(job: PlanRequest) -> tuple[ModelShape, ...]:
    """The shapes of the job: the requested one, or those of an equal budget that it searches."""
    scaling = job.search.scaling
    if scaling is None:
        return (job.shape,)
    rule = BudgetRule(**scaling.model_dump())
    rule.check_proportions(job.shape)
    return equal_shapes(job.shape, rule=rule)


def _shape_layouts(job: PlanRequest, shape: ModelShape, constants: Constants) -> _ShapeLayouts:
    table = layout_table_of(job, shape)
    bounded, used = job, constants
    if job.cluster is not None:
        machines, used = best_case_cluster(job.cluster, constants)
        bounded = replace(job, machines=machines)
    return _ShapeLayouts(
        shape=shape,
        table=table,
        bounds=bounds_of(
            bounded,
            shape,
            table,
            constants=used,
            slowdown=slowdown_of(job),
            limit_bytes=_available_bytes(job),
        ),
        scale=job.shape.model_flops_per_sequence / shape.model_flops_per_sequence,
    )


def least_seconds(
    job: PlanRequest, *, constants: Constants
) -> Iterator[tuple[ModelShape, LayoutTable, FloatArray]]:
    """Each shape with its table, and seconds for equal work that no plan of a row is under.

    They are infinite for the rows that do not fit in memory.
    """
    for shape in shapes_of(job):
        layouts = _shape_layouts(job, shape, constants)
        fits = layouts.bounds.memory_bytes <= _available_bytes(job)
        yield shape, layouts.table, np.where(fits, layouts.bounds.time_s * layouts.scale, np.inf)


def slowdown_of(job: PlanRequest) -> FloatArray | None:
    """The slowdown of each slot [num_slots]; None where all devices are equal."""
    return job.cluster.slowdown if job.cluster is not None and job.has_unequal_devices else None


def _ordered(layouts_by_shape: list[_ShapeLayouts], *, limit_bytes: float) -> list[tuple[float, int, int]]:
    """(bound, index of shape, row) by rising bound, of layouts whose memory may be under `limit_bytes`."""
    scaled = np.concatenate([layouts.bounds.time_s * layouts.scale for layouts in layouts_by_shape])
    memory = np.concatenate([layouts.bounds.memory_bytes for layouts in layouts_by_shape])
    owner = np.repeat(np.arange(len(layouts_by_shape)), [len(layouts.table) for layouts in layouts_by_shape])
    rows = np.concatenate([np.arange(len(layouts.table)) for layouts in layouts_by_shape])
    order = np.argsort(scaled, kind="stable")
    order = order[memory[order] <= limit_bytes]
    return list(zip(scaled[order].tolist(), owner[order].tolist(), rows[order].tolist(), strict=True))


def _planned(
    job: PlanRequest,
    layouts: _ShapeLayouts,
    row: int,
    constants: Constants,
    solver: AssignmentSolver | None,
    *,
    limit_s: float = math.inf,
) -> Ranked | NoPlan:
    """The row with its best group's prediction, or why there is none; none over `limit_s` need be made."""
    refused = None if limit_s == math.inf else lru_cache(partial(_refused, job, layouts, row, limit_s))
    planned = [
        _planned_with(job, layouts, row, group, constants, solver, limit_s, refused)
        for group in layouts.table.groups(row)
    ]
    able = [ranked for ranked in planned if isinstance(ranked, Ranked)]
    if able:
        return min(able, key=lambda ranked: ranked.iteration_s)
    return NoPlan.TOO_SLOW if NoPlan.TOO_SLOW in planned else NoPlan.UNFIT


def _refused(
    job: PlanRequest, layouts: _ShapeLayouts, row: int, limit_s: float, split: tuple[int, ...]
) -> NoPlan | None:
    """Why the row cannot be planned with a split, by its bounds; None where it may."""
    time, memory = layouts.bounds.of_split(layouts.table, row, split)
    if memory > _available_bytes(job):
        return NoPlan.UNFIT
    return NoPlan.TOO_SLOW if time > limit_s else None


def _planned_with(
    job: PlanRequest,
    layouts: _ShapeLayouts,
    row: int,
    group: int | None,
    constants: Constants,
    solver: AssignmentSolver | None,
    limit_s: float,
    refused: Callable[[tuple[int, ...]], NoPlan | None] | None,
) -> Ranked | NoPlan:
    """The row's prediction with one group; splits that are `refused` are not tried."""
    layout, schedule = layouts.table.layout(row), layouts.table.schedule(row)
    split = layouts.bounds.split(job, layouts.shape, layouts.table, row)
    ranked = partial(Ranked, shape=layouts.shape, layout=layout, split=split, schedule=schedule, group=group)
    if solver is None:
        run = job.run(layouts.shape, layout, split, schedule=schedule, group=group)
        # Memory takes less to compute: it goes first while no time is too long.
        memory = peak_memory(run) if limit_s == math.inf else None
        if memory is not None and not memory.fits:
            return NoPlan.UNFIT
        prediction = predict(run, constants)
        time = prediction.iter_time_s
        if time > limit_s:
            return NoPlan.TOO_SLOW
        memory = memory or peak_memory(run)
        if not memory.fits:
            return NoPlan.UNFIT
        return ranked(
            iteration_s=time, equal_work_s=time * layouts.scale, terms=prediction.terms, memory=memory
        )
    is_free = int(layouts.table.columns[row, SPLIT]) == BALANCED
    assignment = solver.assign(
        layouts.shape,
        layout,
        split,
        may_split=is_free,
        schedule=schedule,
        group=group,
        limit_s=limit_s,
        refused=refused,
    )
    if isinstance(assignment, NoPlan):
        return assignment
    bare = ranked(iteration_s=1.0, equal_work_s=layouts.scale, terms={}, memory=assignment.memory)
    return _with(bare, assignment)


def _with(ranked: Ranked, assignment: Assignment) -> Ranked:
    """The layout with an assignment; the scale of its shape stays."""
    time = assignment.prediction.iter_time_s
    return replace(
        ranked,
        split=assignment.split,
        iteration_s=time,
        equal_work_s=time * ranked.equal_work_s / ranked.iteration_s,
        terms=assignment.prediction.terms,
        memory=assignment.memory,
        slots=None if list(assignment.slots) == sorted(assignment.slots) else assignment.slots,
        stock_s=assignment.stock_s,
    )


def _too_large(
    layouts_by_shape: list[_ShapeLayouts], unfit: list[tuple[int, int]], limit_bytes: float
) -> tuple[TooLarge, ...]:
    """The layouts over `limit_bytes` or measured unfit, grouped by degrees."""
    groups: list[TooLarge] = []
    for index, layouts in enumerate(layouts_by_shape):
        over = layouts.bounds.memory_bytes > limit_bytes
        over[[row for owner, row in unfit if owner == index]] = True
        groups += TooLarge.by_degrees(layouts.table.columns[over], layouts.bounds.memory_bytes[over])
    return tuple(groups)


def _available_bytes(job: PlanRequest) -> float:
    return available_bytes(float(job.machines.memory_bytes))


def _nearest(job: PlanRequest, layouts_by_shape: list[_ShapeLayouts]) -> str:
    """Which layout needs the least memory, and how much too much that is."""
    order = sorted(
        (float(layouts.bounds.memory_bytes[row]), index, row)
        for index, layouts in enumerate(layouts_by_shape)
        for row in range(len(layouts.table))
    )
    best: tuple[float, Layout, Memory] | None = None
    for bound, index, row in order:
        if best is not None and bound >= best[0]:
            break
        layouts = layouts_by_shape[index]
        layout = layouts.table.layout(row)
        split = layouts.bounds.split(job, layouts.shape, layouts.table, row)
        schedule = layouts.table.schedule(row)
        group = layouts.table.groups(row)[0]
        memory = peak_memory(job.run(layouts.shape, layout, split, schedule=schedule, group=group))
        if best is None or memory.total_bytes < best[0]:
            best = (memory.total_bytes, layout, memory)
    assert best is not None
    total, layout, memory = best
    orders = job.search.mapping or (STOCK,)
    if memory.fits and STOCK not in orders:
        asked = ", ".join(orders)
        return f"search.mapping: {asked}; none of {len(order)} layouts can have it; choose auto or stock"
    if memory.fits:
        groups = ", ".join(job.search.inside) or "tensor"
        return (
            f"mapping: none of {len(order)} layouts has an order of ranks with its {groups} parallel groups "
            "inside a scale-up domain and RANK 0 on the first node; allow smaller degrees"
        )
    largest = max(memory.terms, key=lambda name: memory.terms[name]).removesuffix("_bytes")
    needed, available = distinct_numbers(total / GIB, memory.available_bytes / GIB, digits=1)
    return (
        f"memory: none of {len(order)} layouts fits; the nearest, {layout.label} recompute {layout.recompute}"
        f"{' distributed optimizer' if layout.distributed_optimizer else ''}, needs {needed} GiB of the "
        f"{available} GiB that are usable on pipeline rank {memory.device} (most: {largest}); use more or "
        "larger devices, or allow more of search"
    )
